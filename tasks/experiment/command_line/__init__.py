"""Command lines of the programs: flags, help and errors."""
