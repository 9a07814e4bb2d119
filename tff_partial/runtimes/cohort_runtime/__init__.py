"""The cohort runtime: one compiled loop over a round's clients."""
