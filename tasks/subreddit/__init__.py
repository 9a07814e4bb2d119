"""Comments and messages by many authors, as in the FURL paper."""
