"""The handlers: what each event changes, and what agents are owed then."""
