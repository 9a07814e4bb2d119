"""Differential privacy: clipping, noise, and what a run costs."""
