"""Differential privacy: clipping, noise, and accounting of privacy costs."""
