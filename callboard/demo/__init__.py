"""The demonstrations: an RLHF run and an elastic training loop on a cluster of their own, and their workers."""
