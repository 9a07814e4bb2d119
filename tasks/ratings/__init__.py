"""Ratings of a CSV file of one's own, with the ids that people have."""
