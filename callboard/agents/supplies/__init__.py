"""Supplies of a worker on its node: code and Python environments that jobs bring along, containers, variables."""
