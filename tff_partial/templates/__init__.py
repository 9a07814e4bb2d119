"""Shared bodies of algorithms that differ in a few arguments."""
