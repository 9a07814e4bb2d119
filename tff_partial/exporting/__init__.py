"""Trained models as files that devices compute with: SavedModel and TFLite."""
