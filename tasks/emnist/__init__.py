"""MNIST and EMNIST: single characters."""
