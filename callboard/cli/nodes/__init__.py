"""Nodes on the command line."""
