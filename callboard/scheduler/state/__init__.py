"""The state: every record, the indexes over them, and the one way to change it."""
