"""The search: synchronous and asynchronous, its entry, and the checker of what it finds."""
