"""Plans on views of the state: where a job fits, what it may use, and who would yield to it."""
