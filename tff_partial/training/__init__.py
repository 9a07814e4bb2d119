"""Training programs: the loop, evaluation, checkpoints, client states."""
