"""Values of TFF types, and the data of a cohort's clients."""
