"""Watching on the command line: status, events, workers, loads and the doctor."""
