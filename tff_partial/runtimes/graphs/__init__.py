"""Reading and rewriting TensorFlow graphs."""
