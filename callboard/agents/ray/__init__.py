"""The node's part in Ray: its raylet, its driver, placement groups and the numbering of GPUs."""
