"""Next-word prediction by users who have words of their own."""
