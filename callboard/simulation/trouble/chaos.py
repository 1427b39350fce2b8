"""Faults of machines, agents, Ray, network and controller, each at its own random times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from callboard.simulation.options import Fault
from callboard.simulation.programs.agent import Supervisor
from callboard.simulation.programs.controller import Controller
from callboard.simulation.trouble.calls import repeat
from callboard.simulation.world.disk import BROKEN, FULL
from callboard.simulation.world.machines import Machine
from callboard.simulation.world.site import Site

LAG_MS = 9_000
"""By how much answers are late before their node is cut off: above the longest kill and the controller's margin, so
that a lease which counts from their arrival outlives the node; with a heartbeat to spare below the lease."""

LONGEST_HANG_MS = 60_000
"""The longest partition after which something hangs on, so that nothing does when all is healed."""


class Chaos:
    """Injects faults until it is told to heal."""

    def __init__(self, site: Site, controller: Controller, supervisors: Sequence[Supervisor]) -> None:
        self._site = site
        self._controller = controller
        self._supervisors = supervisors
        self._chance = site.chance.chaos
        self._on = True

    def start(self) -> None:
        """Begins. The gaps are means per fault in seconds; those of nodes are for ten of them."""
        nodes = len(self._supervisors)
        for fault, per_node, gap_s, do in (
            (Fault.AGENT, True, 60, self._crash_agent),
            (Fault.AGENT, True, 120, self._freeze_agent),
            (Fault.AGENT, True, 240, self._leave),
            (Fault.PARTITION, True, 60, self._partition),
            (Fault.NODE, True, 180, self._power_off),
            (Fault.RAY, True, 180, self._kill_raylet),
            (Fault.RAY, True, 180, self._kill_driver),
            (Fault.RAY, False, 900, self._kill_head),
            (Fault.WORKER, True, 20, self._kill_worker),
            (Fault.CONTROLLER, False, 300, self._crash_controller),
            (Fault.CONTROLLER, False, 400, self._cut_controllers_power),
            (Fault.CONTROLLER, False, 400, self._freeze_controller),
            (Fault.CLOCK, False, 300, self._jump),
            (Fault.DISK, False, 400, self._fill_disk),
            (Fault.DISK, False, 150, self._slow_disk_down),
        ):
            mean_ms = gap_s * 1_000 * (10 / nodes if per_node else 1)
            if fault in self._site.faults:
                repeat(self._site, self._chance, do, mean_ms, lambda: self._on)

    def heal(self) -> None:
        """Ends all faults: everything comes back, everything is connected."""
        self._on = False
        self._site.faults = frozenset()
        self._site.network.faults = frozenset()
        for supervisor in self._supervisors:
            self._site.network.heal(supervisor.node_id)
            supervisor.power_on()
        self._controller.disk.heal()
        self._controller.start()

    def _some(self) -> Supervisor:
        return self._chance.choice(self._supervisors)

    def _crash_agent(self) -> None:
        # Back before anybody noticed, before its lease is over, and after its node was given up.
        supervisor, wait_ms = self._some(), self._chance.choice([200, 1_000, 3_000, 8_000, 40_000])
        alone = self._chance.random() < 0.8
        if supervisor.agent is not None:
            self._site.count("agent crashed")
            supervisor.crash(wait_ms)
            if not alone:
                # As when memory runs out: what the next agent finds on record is gone.
                self._site.timeline.after(wait_ms // 2, lambda: self._kill_workers(supervisor))

    def _freeze_agent(self) -> None:
        supervisor, for_ms = self._some(), self._chance.choice([500, 5_000, 20_000, 45_000])
        if supervisor.agent is not None:
            self._site.count("agent frozen")
            supervisor.agent.freeze(for_ms)

    def _leave(self) -> None:
        supervisor, wait_ms = self._some(), self._chance.randint(1_000, 30_000)
        if supervisor.agent is not None:
            self._site.count("agent left")
            supervisor.leave(wait_ms)

    def _partition(self) -> None:
        first = self._chance.randrange(len(self._supervisors))
        size = self._chance.choice([1, 1, 1, 2, 3])
        ways: tuple[str, ...] = self._chance.choice([("up", "down"), ("up", "down"), ("up",), ("up",), ("down",)])
        # Its last answers may be slow to come: the agent hears them when it is heard no more.
        lag_ms = self._chance.choice([0, LAG_MS, LAG_MS]) if ways == ("up",) else 0
        wait_ms = self._chance.choice([500, 5_000, 20_000, 60_000, 200_000])
        # What waits for storage that is cut off, too, can't be killed until a while after that is back.
        dies_ms, hangs_ms = self._chance.choice([0, 500, 3_000, 10_000]), self._chance.randint(5_000, 40_000)
        for place in range(first, first + size):
            supervisor = self._supervisors[place % len(self._supervisors)]
            node_id = supervisor.node_id
            if self._site.network.is_cut(node_id):
                continue
            self._site.count("node cut off")
            if lag_ms:
                self._site.network.lag_ms[node_id] = lag_ms
            self._site.timeline.after(lag_ms, lambda node_id=node_id: self._cut(node_id, ways, wait_ms))  # type: ignore[misc]
            if dies_ms and wait_ms <= LONGEST_HANG_MS and Fault.WORKER in self._site.faults:
                hang = partial(self._hang, supervisor.machine, wait_ms + hangs_ms)
                self._site.timeline.after(lag_ms + dies_ms, hang)

    def _cut(self, node_id: str, ways: tuple[str, ...], wait_ms: int) -> None:
        if self._on:
            self._site.network.partition(node_id, ways)
            self._site.timeline.after(wait_ms, lambda: self._site.network.heal(node_id))

    def _hang(self, machine: Machine, for_ms: int) -> None:
        """A worker dies and leaves a child that can't be killed for so long."""
        at_work = [tree for tree in machine.trees.values() if tree.ready and not tree.leader.dies_ms]
        if self._on and at_work and self._site.happens("worker hung"):
            self._site.count("worker left what can't be killed")
            self._site.machines.hang(machine, at_work[0], for_ms)

    def _power_off(self) -> None:
        supervisor, wait_ms = self._some(), self._chance.choice([2_000, 30_000, 120_000])
        if supervisor.machine.powered:
            self._site.count("node lost power")
            supervisor.power_off(wait_ms)

    def _kill_raylet(self) -> None:
        self._kill(self._some(), "raylet", "raylet died")

    def _kill_head(self) -> None:
        self._kill(self._supervisors[0], "gcs_server", "Ray's head died")

    def _kill_driver(self) -> None:
        self._kill(self._some(), "driver", "Ray driver died")

    def _kill_worker(self) -> None:
        self._kill(self._some(), "worker", "worker killed")

    def _kill_workers(self, supervisor: Supervisor) -> None:
        for tree in list(supervisor.machine.trees.values()):
            self._site.machines.kill(supervisor.machine, tree.leader)

    def _kill(self, supervisor: Supervisor, name: str, what: str) -> None:
        """Kills a process of a machine, if there is one of this name."""
        there = [each for each in supervisor.machine.table.values() if each.name == name]
        if there:
            self._site.count(what)
            self._site.machines.kill(supervisor.machine, self._chance.choice(there))

    def _crash_controller(self) -> None:
        wait_ms = self._chance.choice([300, 2_000, 10_000, 40_000])
        if self._controller.alive:
            self._site.count("controller crashed")
            self._controller.crash()
            self._site.timeline.after(wait_ms, self._controller.start)

    def _freeze_controller(self) -> None:
        # Shorter than a lease, longer than one, and long enough for every node to be given up if it counted.
        for_ms = self._chance.choice([2_000, 8_000, 20_000, 70_000])
        if self._controller.alive:
            self._site.count("controller frozen")
            self._controller.freeze(for_ms)

    def _cut_controllers_power(self) -> None:
        # What was written a moment before must be there, whatever becomes of what is being written.
        in_ms, wait_ms = self._chance.choice([0, 3_000, 10_000]), self._chance.choice([2_000, 10_000, 40_000])
        if self._controller.alive:
            self._controller.lose_power(in_ms, lambda: self._site.timeline.after(wait_ms, self._controller.start))

    def _fill_disk(self) -> None:
        disk, wait_ms = self._controller.disk, self._chance.choice([1, 1_000, 20_000, 60_000])
        disk.error = self._chance.choice([FULL, FULL, BROKEN])
        self._site.count("disk full" if disk.error == FULL else "disk reports errors")
        disk.full_until_ms = self._site.timeline.now_ms + wait_ms

    def _slow_disk_down(self) -> None:
        self._site.count("spell of a slow disk")
        wait_ms = self._chance.choice([5_000, 20_000, 60_000])
        self._controller.disk.slow_until_ms = self._site.timeline.now_ms + wait_ms

    def _jump(self) -> None:
        self._site.count("wall clock jumped")
        self._site.timeline.wall_offset_ms += self._chance.choice([-3_600_000, -5_000, 5_000, 60_000, 3_600_000])
