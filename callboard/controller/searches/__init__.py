"""Searches beside the loop: placement texts on the nodes of now, and searches for the fastest placement."""
