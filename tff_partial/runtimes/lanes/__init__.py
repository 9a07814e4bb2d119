"""Experimental: several clients in lock-step in one vectorized program."""
