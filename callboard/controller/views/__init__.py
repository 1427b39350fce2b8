"""How does a record look to a caller? Records as messages of the API; nothing here decides or waits."""
