"""Checks of arguments, with messages that name the argument."""
