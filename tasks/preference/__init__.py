"""Preferences of users for digits or voices, as in the FedEmbed paper."""
