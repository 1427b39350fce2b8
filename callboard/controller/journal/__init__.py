"""The journal: what survives, how it is written, and the rerun of what it holds."""
