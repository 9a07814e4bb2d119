"""Training of tables by the rows that a client looks up."""
