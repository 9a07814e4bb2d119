"""Export of trained models to devices, as SavedModel and TFLite."""
