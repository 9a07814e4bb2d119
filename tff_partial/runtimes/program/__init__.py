"""TFF computations as flat programs, and their evaluation."""
