"""Calls of a client to the controller: the connection, each method, and what it follows through lost connections."""
