"""The cluster that a placement is resolved against: nodes, node groups, hardware."""
