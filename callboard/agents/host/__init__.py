"""The worker's own side: what runs inside a worker process. Standard library only."""
