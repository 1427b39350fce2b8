"""The virtual machines, the process trees that live on them, and the devices they use.

Nobody else decides what lives: agents begin and kill processes here, and every rule about devices is checked against
this, not against anybody's books.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from callboard.agents.files.lease_file import HeardLease
from callboard.agents.files.run_dir import Started
from callboard.security.processes import ProcessId
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.virtual_time import Timeline, in_dead_process

CRASH = -11
"""Exit code of a worker that a signal of its own code ends."""

MILLI = 1000

Key = tuple[str, str, int]
"""(job uid, component, rank)."""

NOBODY: Key = ("", "", 0)
"""Key of a host that runs no worker yet."""


@dataclass(slots=True, eq=False)
class Running:
    """One process.

    Attributes:
        root: what it hangs from: a raylet, or the run of a program that started it.
        kill_ms: how long its end takes.
        stuck_ms: how long it can't be killed, from the first attempt on.
        dies_ms: when it will be gone; 0: nobody has killed it.
        watchers: told its exit code.
    """

    id: ProcessId
    name: str
    root: object
    kill_ms: int = 1
    stuck_ms: int = 0
    on_end: Callable[[], object] = lambda: None
    dies_ms: int = 0
    gone: bool = False
    watchers: list[asyncio.Future[int | None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Tree:
    """The processes of one worker.

    Attributes:
        leader: the worker's own.
        children: what it started.
        generation: of the worker; 0: it is a host that waits for one.
        marker: "NAME=value" that its processes carry, once it runs code of the user.
        devices: (index, milli) that its processes use.
        strict: its job's copies must never run at the same time.
        ready: its agent said that it serves calls.
        asked: what its host was asked of its stop: when first, and with which notice.
        answered: what of that was answered.
    """

    leader: Running
    generation: int = 0
    key: Key = NOBODY
    children: list[Running] = field(default_factory=list)
    marker: str = ""
    devices: tuple[tuple[int, int], ...] = ()
    strict: bool = False
    ready: bool = False
    asked: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    answered: dict[str, None] = field(default_factory=dict)

    def living(self) -> list[Running]:
        return [each for each in (self.leader, *self.children) if not each.gone]

    def is_stuck(self, now_ms: int) -> bool:
        """Whether something of it can't be killed."""
        return any(each.stuck_ms and each.dies_ms > now_ms for each in self.living())


@dataclass(slots=True, eq=False)
class Machine:
    """One machine.

    Attributes:
        gpu_memory_bytes: memory of each of its GPUs.
        gpu_models: models of its GPUs, in turn.
        powered: False: everything on it is dead.
        table: its living processes.
        trees: living process trees of workers, by their leaders.
        records: what its agents wrote down of what they started.
        noted: set when something is written down.
        checkpoints: what its agents wrote down of what workers left.
        lease: as its agents wrote it down last.
        raylet: Ray's id of its living raylet; empty: it has none.
        ray_token: what its agents keep for those who want into their Ray cluster.
    """

    node_id: str
    gpus: int
    cpu_milli: int
    memory_bytes: int
    labels: dict[str, str]
    gpu_memory_bytes: int = 80 << 30
    gpu_models: tuple[str, ...] = ("A100",)
    powered: bool = True
    table: dict[ProcessId, Running] = field(default_factory=dict)
    trees: dict[ProcessId, Tree] = field(default_factory=dict)
    records: dict[tuple[str, str], Started] = field(default_factory=dict)
    noted: asyncio.Event = field(default_factory=asyncio.Event)
    checkpoints: dict[str, bytes] = field(default_factory=dict)
    lease: HeardLease | None = None
    raylet: str = ""
    ray_token: str = ""
    pids: Iterator[int] = field(default_factory=lambda: itertools.count(1_000))


class Machines:
    """All of them, with what must always hold: no device share is used twice (R2), no command acts twice (R6)."""

    def __init__(self, timeline: Timeline, machines: list[Machine]) -> None:
        self.by_node = {machine.node_id: machine for machine in machines}
        self.strict: dict[int, None] = {}
        """Generations that the controller asked for of jobs whose copies must never run at the same time."""
        self.spawned = 0
        self._timeline = timeline
        self._home: dict[int, tuple[Machine, Tree]] = {}
        self._copies: dict[Key, dict[int, Tree]] = {}

    def alive(self, generation: int) -> Machine | None:
        """The machine on which a process of this generation lives; None: nowhere."""
        home = self._home.get(generation)
        return None if home is None else home[0]

    def living(self) -> list[tuple[str, Tree]]:
        """(node, tree) of every worker's process that lives."""
        return [(node_id, tree) for node_id, machine in self.by_node.items() for tree in machine.trees.values()]

    # ---- processes ----

    def begin(self, machine: Machine, name: str, root: object, **facts: Any) -> Running:
        process = ProcessId(next(machine.pids), self._timeline.now_ms // 10)
        running = machine.table[process] = Running(process, name, root, **facts)
        return running

    def kill(self, machine: Machine, running: Running, code: int = -9, in_ms: int | None = None) -> None:
        """A process gets a signal that ends it, unless whoever sends it is dead.

        Args:
            in_ms: when it is gone, whatever it is like; None: as long as it takes.
        """
        if in_dead_process():
            return
        now_ms = self._timeline.now_ms
        at_ms = now_ms + in_ms if in_ms is not None else now_ms + max(running.kill_ms, running.stuck_ms)
        if running.gone or (running.dies_ms and running.dies_ms <= at_ms):
            return
        running.dies_ms = at_ms
        self._timeline.after(at_ms - now_ms, lambda: self._end(machine, running, code))

    def hang(self, machine: Machine, tree: Tree, for_ms: int) -> None:
        """A worker dies, and what it leaves can't be killed for a while."""
        tree.children.append(self.begin(machine, "child", tree.leader, stuck_ms=for_ms))
        self.kill(machine, tree.leader, CRASH, 0)

    def power_off(self, machine: Machine) -> None:
        """Everything on a machine is dead, and what it had in memory gone."""
        machine.powered = False
        for running in list(machine.table.values()):
            self._end(machine, running, -9)
        machine.records.clear()
        machine.checkpoints.clear()
        machine.lease = None
        machine.ray_token = ""

    def _end(self, machine: Machine, running: Running, code: int) -> None:
        if machine.table.pop(running.id, None) is None:
            return
        running.gone = True
        watchers, running.watchers = running.watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(code)
        running.on_end()
        for tree in [tree for tree in machine.trees.values() if not tree.living()]:
            self._end_tree(machine, tree)

    # ---- workers ----

    def launch(self, machine: Machine, tree: Tree) -> None:
        """The host of a worker begins."""
        machine.trees[tree.leader.id] = tree
        if tree.generation:
            self._settle(machine, tree)
        self.spawned += 1

    def use(self, machine: Machine, tree: Tree, key: Key, generation: int, devices: Iterable[tuple[int, int]]) -> None:
        """A host becomes a worker: from now on it runs code of the user.

        Raises:
            RuleBroken: its devices are used by others, or it lives already.
        """
        tree.generation, tree.key = generation, key
        self._settle(machine, tree)
        tree.devices = tuple(devices)
        self._check_devices(machine, tree)
        tree.strict = generation in self.strict
        if tree.strict:
            self._check_strict(tree)

    def _settle(self, machine: Machine, tree: Tree) -> None:
        if self._home.setdefault(tree.generation, (machine, tree))[1] is not tree:
            raise RuleBroken("R6/I9", f"generation {tree.generation} was started twice", tree.key[0])

    def _end_tree(self, machine: Machine, tree: Tree) -> None:
        """Every process of a tree is gone."""
        del machine.trees[tree.leader.id]
        self._home.pop(tree.generation, None)
        if tree.strict:
            copies = self._copies[tree.key]
            del copies[tree.generation]
            if not copies:
                del self._copies[tree.key]

    def _check_devices(self, machine: Machine, tree: Tree) -> None:
        for index, milli in tree.devices:
            users = [
                (other, share)
                for other in machine.trees.values()
                for used, share in other.devices
                if used == index and other is not tree
            ]
            if milli + sum(share for _, share in users) > MILLI:
                others = ", ".join(f"g{other.generation} of {other.key[0]} ({share})" for other, share in users)
                raise RuleBroken(
                    "R2/I1",
                    f"g{tree.generation} of {tree.key[0]} takes {milli} milli of device {index} on {machine.node_id}, "
                    f"which living processes use: {others}",
                    tree.key[0],
                )

    def _check_strict(self, tree: Tree) -> None:
        copies = self._copies.setdefault(tree.key, {})
        for other in copies.values():
            # No lease helps against processes that can't be killed; their devices stay taken all the same.
            if not other.is_stuck(self._timeline.now_ms):
                raise RuleBroken(
                    "R5",
                    f"g{tree.generation} of strict job {tree.key[0]} starts while its copy g{other.generation} lives",
                    tree.key[0],
                )
        copies[tree.generation] = tree
