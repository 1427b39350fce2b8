"""Records as messages of the API; nothing here decides or waits."""
