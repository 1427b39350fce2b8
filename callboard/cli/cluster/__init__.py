"""A cluster on the command line: up, down, controller, agent, one more node."""
