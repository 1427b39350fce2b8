"""The sessions of agents: admission, commands to each, workers' output, and what silence means."""
