"""TFF's native runtime in a process of its own."""
