"""Whether an algorithm keeps what the papers promise."""
