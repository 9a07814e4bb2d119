"""K-means in TensorFlow, for tables of private attributes (HPFL)."""
