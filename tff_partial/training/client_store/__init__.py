"""Client states between rounds, in SQLite files that survive kills."""
