"""Programs that measure what the cohort runtime must show; see README.md."""
