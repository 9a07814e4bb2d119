"""The Keras side: a model in parts, as pure functions."""
