"""Next-word prediction for users with words outside the vocabulary."""
