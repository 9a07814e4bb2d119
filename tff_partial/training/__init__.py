"""Runs in Python: the loop, evaluation, checkpoints, what clients keep."""
