"""The simulator and the replay on the command line."""
