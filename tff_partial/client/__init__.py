"""A client's work: batches, steps of its phases, and what it returns."""
