"""Flags of an experiment, grouped by what they configure."""
