"""Checks that an algorithm keeps what the papers promise."""
