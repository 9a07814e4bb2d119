"""Algorithms of an experiment, built from its flags."""
