"""What `make dist` builds beside the wheel of the project."""
