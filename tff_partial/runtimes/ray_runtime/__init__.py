"""The Ray runtime: cohorts spread over processes and machines."""
