"""The site: what everything virtual shares, chance included."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from callboard.simulation.options import Fault, SimulationOptions
from callboard.simulation.world.machines import Machines
from callboard.simulation.world.network import End, Network
from callboard.simulation.world.rayworld import RayWorld
from callboard.simulation.world.virtual_time import Timeline


def stream(seed: int, purpose: str) -> random.Random:
    """The random numbers for one purpose; the same for every PYTHONHASHSEED."""
    return random.Random(f"{seed}/{purpose}")  # noqa: S311 - chance that can be repeated is what is wanted


class Chance:
    """One stream of random numbers per purpose, all from one seed: a change of the workload doesn't change what the
    network does."""

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


@dataclass(slots=True, eq=False)
class Site:
    """The virtual world.

    Attributes:
        faults: what may go wrong at the moment; emptied when everything heals.
        heard_ms: when the controller last heard of each node.
        controller: where agents' streams lead.
        happened: names of the faults and of the users' acts so far, in order; of a shrunk run, those that were kept.
    """

    options: SimulationOptions
    timeline: Timeline
    chance: Chance
    machines: Machines
    ray: RayWorld
    network: Network
    faults: frozenset[Fault]
    heard_ms: dict[str, int] = field(default_factory=dict)
    controller: End | None = None
    counts: Counter[str] = field(default_factory=Counter)
    happened: list[str] = field(default_factory=list)
    _numbers: Counter[str] = field(default_factory=Counter)
    _only: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._only = None if self.options.only is None else frozenset(self.options.only)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def happens(self, what: str) -> bool:
        """Whether the next thing of a kind happens. Each has a name, by which a shrunk run keeps it or not."""
        self._numbers[what] += 1
        name = f"{what} {self._numbers[what]}"
        kept = self._only is None or name in self._only
        if kept:
            self.happened.append(name)
        return kept

    def strikes(self, fault: Fault, chance: float) -> bool:
        """Whether a fault among workers or in Ray happens now. The draw is made in any case."""
        drawn = (self.chance.ray if fault is Fault.RAY else self.chance.workers).random() < chance
        return drawn and fault in self.faults and self.happens(fault.value)
