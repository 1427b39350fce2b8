"""What happens to them: clients, operators, and faults."""
