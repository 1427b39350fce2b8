"""Conversion between the stream's messages and the scheduler's events and commands."""
