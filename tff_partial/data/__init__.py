"""Clients' examples: their form, packing, partitions, splits and sources."""
