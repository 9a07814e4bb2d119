"""Digits and voices that users like or not, as in the FedEmbed paper."""
