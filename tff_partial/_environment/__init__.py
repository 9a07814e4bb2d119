"""Adjustments to Python and TensorFlow that make TFF importable and quiet."""
