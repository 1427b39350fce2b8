"""The options of a simulation: the cluster, the time, and which faults may happen."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from callboard.model.frozen import dataclass


class Fault(StrEnum):
    """A kind of fault.

    Attributes:
        DROP: a message is lost, and its stream with it a while later.
        DUPLICATE: a message arrives twice.
        DELAY: a message and all behind it are late; the disk is slow.
        REORDER: a message arrives after later ones.
        PARTITION: nodes are cut off, in one or both directions, and heal.
        AGENT: an agent is killed and restarted, hangs for a while, or leaves and comes back.
        NODE: a machine loses its power and comes back empty.
        CONTROLLER: the controller is killed, with or without its last batch on disk, and replays.
        RAY: a raylet dies, or Ray's head with its whole session; creations fail.
        WORKER: slow starts, constructors that raise, deaths, hanging cancels, children that outlive their parent,
            trees that can't be killed for a while.
        CLIENT: answers of calls get lost, and calls are repeated.
        CLOCK: the wall clock jumps.
        DISK: the controller's disk is full for a while, or slow.
        SCHEDULE: tasks of one program that could go on at the same moment do so in any order.
    """

    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    REORDER = "reorder"
    PARTITION = "partition"
    AGENT = "agent"
    NODE = "node"
    CONTROLLER = "controller"
    RAY = "ray"
    WORKER = "worker"
    CLIENT = "client"
    CLOCK = "clock"
    DISK = "disk"
    SCHEDULE = "schedule"


ALL_FAULTS = frozenset(Fault)
NO_FAULTS: frozenset[Fault] = frozenset()


class UnknownFault(ValueError):
    """A word that names no fault. ``str()`` says which there are."""


def parse_faults(text: str) -> frozenset[Fault]:
    """The faults of a text such as ``all``, ``none`` or ``drop,delay``.

    Raises:
        UnknownFault: a word names none.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return ALL_FAULTS
    if words in ([], ["none"]):
        return NO_FAULTS
    known = {fault.value: fault for fault in Fault}
    for word in words:
        if word not in known:
            raise UnknownFault(f"{word!r} is no fault; there are all, none, {', '.join(known)}")
    return frozenset(known[word] for word in words)


def faults_text(faults: Iterable[Fault]) -> str:
    """The text that :func:`parse_faults` reads as ``faults``."""
    chosen = set(faults)
    if chosen == ALL_FAULTS:
        return "all"
    return ",".join(fault.value for fault in Fault if fault in chosen) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """One simulation; equal options give equal runs.

    Attributes:
        seed: where all chance comes from.
        hours: virtual hours until everything heals; None: until ``events`` or ``jobs``.
        events: events decided by the scheduler until everything heals; None: until ``hours`` or ``jobs``.
        jobs: jobs that clients submit; None: as many as there is time for.
        schedule: of the orders in which tasks that are ready at once may go on, which one; see :attr:`Fault.SCHEDULE`.
        only: names of the faults and of the users' acts that happen, as a shrunk run has them; None: all.
        full_check_every: events between checks of every invariant.
        heartbeat_ms, lease_ms, orphan_grace_ms, reconcile_grace_ms: as in the controller's options. The grace for
            orphans is shorter than in production, so that its end is met.
    """

    seed: int = 1
    hours: float | None = None
    events: int | None = None
    jobs: int | None = None
    nodes: int = 8
    faults: frozenset[Fault] = ALL_FAULTS
    schedule: int = 0
    only: tuple[str, ...] | None = None
    full_check_every: int = 1_000
    heartbeat_ms: int = 5_000
    lease_ms: int = 15_000
    orphan_grace_ms: int = 120_000
    reconcile_grace_ms: int = 20_000

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError("a simulation needs at least one node")
        if self.hours is None and self.events is None and self.jobs is None:
            raise ValueError("say how long to simulate: hours, events or jobs")

    @property
    def command(self) -> str:
        """The command line that replays this simulation."""
        words = ["callboard", "simulate", "--seed", str(self.seed), "--nodes", str(self.nodes)]
        for name in ("hours", "events", "jobs"):
            value = getattr(self, name)
            if value is not None:
                words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        if self.schedule:
            words += ["--schedule", str(self.schedule)]
        return " ".join([*words, "--faults", faults_text(self.faults)])
