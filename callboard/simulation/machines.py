"""The virtual machines, the process trees that live on them, and the devices they use.

Nobody else decides what lives: agents spawn and kill here, and every rule about devices is checked against this, not
against anybody's books.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from callboard.simulation.rules import RuleBroken

MILLI = 1000

Key = tuple[str, str, int]
"""(job uid, component, rank)."""


@dataclass(slots=True, eq=False)
class Tree:
    """The processes of one worker.

    Attributes:
        generation: of the worker.
        key: of the worker.
        devices: (index, milli) that its processes use.
        strict: its job's copies must never run at the same time.
        kill_ms: how long the end of the tree takes.
        stuck_until_ms: it can't be killed before.
        living: processes that live, the worker's own among them.
    """

    generation: int
    key: Key
    devices: tuple[tuple[int, int], ...]
    strict: bool
    kill_ms: int
    stuck_until_ms: int = 0
    living: int = 1


@dataclass(slots=True, eq=False)
class Machine:
    """One machine.

    Attributes:
        powered: False: everything on it is dead.
        lease_until_ms: when the lease ends that its agent wrote down last.
        trees: living process trees by generation.
    """

    node_id: str
    gpus: int
    cpu_milli: int
    memory_bytes: int
    labels: dict[str, str]
    simulated: bool = True
    powered: bool = True
    lease_until_ms: int = 0
    trees: dict[int, Tree] = field(default_factory=dict)


class Machines:
    """All of them, with what must always hold: no device share is used twice (R2), no command acts twice (R6)."""

    def __init__(self, machines: list[Machine]) -> None:
        self.by_node = {machine.node_id: machine for machine in machines}
        self._home: dict[int, Machine] = {}
        self._strict: dict[Key, dict[int, Tree]] = {}
        self.spawned = 0

    def alive(self, generation: int) -> Machine | None:
        """The machine on which a process of this generation lives; None: nowhere."""
        return self._home.get(generation)

    def spawn(self, machine: Machine, tree: Tree, now_ms: int) -> None:
        """A tree comes to life.

        Raises:
            RuleBroken: its devices are used by others, or it lives already.
        """
        if tree.generation in self._home:
            raise RuleBroken("R6/I9", f"generation {tree.generation} was started twice", tree.key[0])
        self._check_devices(machine, tree)
        if tree.strict:
            self._check_strict(tree, now_ms)
        machine.trees[tree.generation] = tree
        self._home[tree.generation] = machine
        self.spawned += 1

    def end(self, machine: Machine, tree: Tree) -> None:
        """Every process of a tree is gone."""
        if machine.trees.pop(tree.generation, None) is None:
            return
        tree.living = 0
        del self._home[tree.generation]
        if tree.strict:
            copies = self._strict[tree.key]
            del copies[tree.generation]
            if not copies:
                del self._strict[tree.key]

    def power_off(self, machine: Machine) -> None:
        """Everything on a machine is dead."""
        machine.powered = False
        for tree in list(machine.trees.values()):
            self.end(machine, tree)

    def living(self) -> list[tuple[str, Tree]]:
        """(node, tree) of everything that lives."""
        return [(node_id, tree) for node_id, machine in self.by_node.items() for tree in machine.trees.values()]

    def _check_devices(self, machine: Machine, tree: Tree) -> None:
        for index, milli in tree.devices:
            users = [
                (other, share) for other in machine.trees.values() for used, share in other.devices if used == index
            ]
            if milli + sum(share for _, share in users) > MILLI:
                others = ", ".join(f"g{other.generation} of {other.key[0]} ({share})" for other, share in users)
                raise RuleBroken(
                    "R2/I1",
                    f"g{tree.generation} of {tree.key[0]} takes {milli} milli of device {index} on {machine.node_id}, "
                    f"which living processes use: {others}",
                    tree.key[0],
                )

    def _check_strict(self, tree: Tree, now_ms: int) -> None:
        copies = self._strict.setdefault(tree.key, {})
        for other in copies.values():
            # No lease helps against processes that can't be killed; their devices stay taken all the same.
            if other.stuck_until_ms <= now_ms:
                raise RuleBroken(
                    "R5",
                    f"g{tree.generation} of strict job {tree.key[0]} starts while its copy g{other.generation} lives",
                    tree.key[0],
                )
        copies[tree.generation] = tree
