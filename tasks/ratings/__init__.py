"""Ratings from custom CSV files, with their original ids."""
