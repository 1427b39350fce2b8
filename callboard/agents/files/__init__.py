"""What an agent keeps on disk: its run directory, the lease, checkpoints, workers' output."""
