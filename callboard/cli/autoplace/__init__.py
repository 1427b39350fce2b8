"""The search for placements on the command line."""
