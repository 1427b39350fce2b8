"""Placements and plans on the command line."""
