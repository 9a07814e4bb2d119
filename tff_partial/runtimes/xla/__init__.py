"""Rewrites that let XLA compile a client's graph to the same numbers."""
