"""Clients' examples: their form, packing, parts, and where they come from."""
