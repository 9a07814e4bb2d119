"""Tables of which a client needs some rows alone."""
