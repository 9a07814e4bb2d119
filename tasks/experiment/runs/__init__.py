"""A run of an experiment: its folder, training, and measurements."""
