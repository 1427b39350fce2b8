"""Chance: one stream of random numbers per purpose, all from one seed.

Streams of their own, so that a change of the workload doesn't change what the network does.
"""

from __future__ import annotations

import random


def stream(seed: int, purpose: str) -> random.Random:
    """The random numbers for one purpose; the same for every PYTHONHASHSEED."""
    return random.Random(f"{seed}/{purpose}")  # noqa: S311 - chance that can be repeated is what is wanted


class Chance:
    """The streams of one simulation."""

    def __init__(self, seed: int, schedule: int = 0) -> None:
        self._seed = seed
        self.network = stream(seed, "network")
        self.workers = stream(seed, "workers")
        self.ray = stream(seed, "ray")
        self.agents = stream(seed, "agents")
        self.controller = stream(seed, "controller")
        self.disk = stream(seed, "disk")
        self.workload = stream(seed, "workload")
        self.chaos = stream(seed, "chaos")
        self.schedule = stream(seed, f"schedule/{schedule}")

    def renew(self, used: random.Random, purpose: str) -> None:
        """Begins a stream anew for one purpose: what is drawn then depends on nothing that was drawn before, so that
        what is left out of a shrunk run changes nothing else."""
        used.seed(f"{self._seed}/{purpose}")
