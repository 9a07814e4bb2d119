"""Keras models, split into tiers, as pure functions."""
