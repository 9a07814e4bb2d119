"""A search for good values of flags, by Optuna: `tasks.sweep --search`."""
