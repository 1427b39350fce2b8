"""Pools, placement groups and the policy on the command line."""
