"""Builders of what `make dist` makes in addition to the project's wheel."""
