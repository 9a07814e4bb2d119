"""Builders of wheels that `make dist` makes next to the project's own."""
