"""Which clients take part in a round: sampling, availability, latency."""
