"""The simulated machine below an agent: ``callboard.agents.machine.Machine`` on a virtual one.

What an agent starts lives on the machine and not in the agent: it goes on while the agent is stopped or dead.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from callboard.agents.files.lease_file import HeardLease
from callboard.agents.files.output_store import OutputBounds, OutputOf, Outputs
from callboard.agents.files.run_dir import RunDir, Started
from callboard.agents.host.worker_secrets import Hide
from callboard.agents.link.exec_carrier import ExecCarrier
from callboard.agents.link.fence import LOOK_S, looks
from callboard.agents.link.session import Connect
from callboard.agents.machine import HostFacts, LeaseStore, Sender
from callboard.agents.ray.ray_command import RayNodeSpec
from callboard.agents.ray.ray_faults import RayNodeError
from callboard.agents.ray.ray_node import RayNode
from callboard.agents.supplies.containers import Containers
from callboard.agents.supplies.environments import Environments
from callboard.agents.supplies.package_cache import Packages
from callboard.agents.system.process_tree import TreeEnd
from callboard.agents.system.processes import Processes
from callboard.agents.system.usage import Usage
from callboard.agents.worker.ports import Ports
from callboard.security.processes import ProcessEntry, ProcessId, descendants, trees_of
from callboard.simulation.options import Fault
from callboard.simulation.world.machines import Machine, Running
from callboard.simulation.world.ray_driver import Driver
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site
from callboard.simulation.world.virtual_time import EPOCH_MS, Process, in_dead_process
from callboard.v1 import agent_pb2

_LOOK_AROUND_S = 0.001
"""For a look at the table of processes."""

_IDLE_S = 5.0
"""Between looks of a fence while the lease is over and no worker lives: its agent may have ended."""

_NOTHING = Usage()

_INIT = 1
_AGENT = ProcessEntry(ProcessId(2, 0), _INIT, 0, 0, gone=False)
"""The agent itself, in the table of processes: one that is asked about lives."""


class SimulatedProcesses:
    """What lives on a machine, for one run of its agent."""

    def __init__(self, site: Site, machine: Machine, agent: Process, kills: Callable[[ProcessId], None]) -> None:
        """
        Args:
            kills: told whose tree is going to be killed.
        """
        self._site = site
        self._machine = machine
        self._agent = agent
        self._kills = kills
        self._table = machine.table
        self._adopted: frozenset[ProcessId] = frozenset()

    def is_living(self, process: ProcessId) -> bool:
        return process in self._machine.table

    def start_ms(self, process: ProcessId) -> int:
        return EPOCH_MS + process.start_ticks * 10

    async def exited(self, process: ProcessId) -> int | None:
        """Return when it has ended."""
        running = self._machine.table.get(process)
        if running is None:
            return None
        ended: asyncio.Future[int | None] = self._site.timeline.create_future()
        running.watchers.append(ended)
        return await ended

    def send_signal(self, process: ProcessId, number: signal.Signals) -> bool:
        """Every signal ends it but SIGCONT, which nothing stopped waits for; only SIGKILL at once."""
        running = self._machine.table.get(process)
        if running is None or number is signal.SIGCONT:
            return running is not None
        self._site.machines.kill(self._machine, running, -number, None if number is signal.SIGKILL else 200)
        return True

    def usage_of(self, tree: Iterable[ProcessId]) -> Usage:  # noqa: ARG002 - memory isn't simulated
        return _NOTHING

    async def ours(self) -> frozenset[ProcessId]:
        """Nobody asks: simulated devices have no driver."""
        return frozenset()

    def oom_kills(self) -> int:
        return 0

    async def end(
        self, leader: ProcessId, *, marker: str, also: Iterable[ProcessId] = (), budget_s: float, alone: bool = False
    ) -> TreeEnd:
        """End a worker's tree."""
        self._kills(leader)
        seen = [leader, *also]

        def find() -> Iterable[ProcessId]:
            carry = [
                each.id for tree in self._machine.trees.values() if tree.marker == marker for each in tree.living()
            ]
            return self._below([*seen, *carry, *(self._orphans() if alone else ())])

        return await self._end(find, budget_s)

    def adopt(self, roots: Iterable[ProcessId]) -> None:
        self._adopted |= frozenset(roots)

    async def end_roots(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots with what is below them."""
        chosen = list(roots)
        return await self._end(lambda: self._below(chosen), budget_s)

    async def end_marked(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots and what is nobody's."""
        chosen = list(roots)
        return await self._end(lambda: self._below([*chosen, *self._orphans()]), budget_s)

    async def trees(self, roots: Iterable[ProcessId]) -> dict[ProcessId, frozenset[ProcessId]]:
        """The tree below each root."""
        chosen = list(roots)
        await asyncio.sleep(_LOOK_AROUND_S)
        return trees_of(chosen, self._entries())

    def close(self) -> None:
        """Nothing more is asked."""

    def _below(self, roots: Iterable[ProcessId]) -> frozenset[ProcessId]:
        """The roots that live, and everything below them."""
        return descendants(roots, self._entries())

    def _entries(self) -> dict[int, ProcessEntry]:
        """The table of processes, as the kernel shows it to the agent."""
        entries, agent_pid = {_AGENT.id.pid: _AGENT}, _AGENT.id.pid
        for each in self._table.values():
            root = each.root
            # What lost its parent hangs from init.
            parent = agent_pid if root is self._agent else _INIT
            if isinstance(root, Running) and not root.gone:
                parent = root.id.pid
            entries[each.id.pid] = ProcessEntry(each.id, parent, 0, 0, gone=False)
        return entries

    def _orphans(self) -> list[ProcessId]:
        """What hangs neither from this agent nor from what it adopted."""
        ours = self._below([_AGENT.id, *self._adopted])
        return [each for each in self._table if each not in ours]

    async def _end(self, find: Callable[[], Iterable[ProcessId]], budget_s: float) -> TreeEnd:
        timeline = self._site.timeline
        until_ms = timeline.now_ms + round(budget_s * 1_000)
        killed: dict[Running, None] = {}
        while victims := [self._table[each] for each in sorted(find())]:
            for each in victims:
                self._site.machines.kill(self._machine, each)
            killed.update(dict.fromkeys(victims))
            gone_ms = max(timeline.now_ms + 1, *(each.dies_ms for each in victims))
            await asyncio.sleep((min(gone_ms, max(until_ms, timeline.now_ms + 1)) - timeline.now_ms) / 1_000)
            left = [each.id for each in victims if not each.gone]
            if left or timeline.now_ms >= until_ms:
                return TreeEnd(tuple(sorted(left)), len(killed))
        return TreeEnd((), len(killed))


class SimulatedRunDir(RunDir):
    """Records that outlive the agent, on a disk that is neither full nor torn."""

    def __init__(self, machine: Machine) -> None:
        self.path = Path("/run") / machine.node_id
        self.logs = self.sockets = self.output = self.checkpoints = self.ray_temp = self.path
        self.ray_token = self.path / "ray-token"
        self._machine = machine
        self._started = dict(machine.records)

    def _write(self) -> None:
        if not in_dead_process():
            self._machine.records = dict(self._started)
            self._machine.noted.set()

    def write_checkpoint(self, name: str, text: bytes) -> None:
        self._machine.checkpoints[name] = text

    def read_checkpoint(self, name: str) -> bytes | None:
        return self._machine.checkpoints.get(name)

    def remove_checkpoint(self, name: str) -> None:
        if not in_dead_process():
            self._machine.checkpoints.pop(name, None)

    def write_ray_token(self, token: str) -> None:
        """Keep it for the next agent."""
        self._machine.ray_token = token

    def read_ray_token(self) -> str:
        """As an earlier agent wrote it."""
        return self._machine.ray_token

    def clear_ray(self) -> None:
        """Ray keeps no files here, but for its token."""
        if not in_dead_process():
            self._machine.ray_token = ""

    def close(self, *, keep: bool, keep_output: bool = False) -> None:  # noqa: ARG002 - nothing is printed
        if not keep:
            self._machine.records = {}
            self._machine.checkpoints.clear()
            self._machine.lease = None


class SimulatedLease:
    """The lease as a machine remembers it."""

    def __init__(self, site: Site, machine: Machine) -> None:
        self._site = site
        self._machine = machine

    def read(self) -> HeardLease | None:
        return self._machine.lease

    def write(self, heard: HeardLease) -> None:
        """Write it down.

        Raises:
            RuleBroken: it counts from later than the controller's own count of the node's silence.
        """
        heard_ms = self._site.heard_ms.get(self._machine.node_id, -1)
        if heard.heard_s * 1_000 > heard_ms and not in_dead_process():
            message = (
                f"the lease of {self._machine.node_id} counts from {heard.heard_s} s, it was heard at {heard_ms} ms"
            )
            self._site.timeline.fail(RuleBroken("R5", message))
        self._machine.lease = heard
        self._machine.noted.set()

    def close(self) -> None:
        """Write no more."""


class NoOutput:
    """Simulated workers print nothing, and nobody reads it."""

    bounds = OutputBounds(1, 1)

    def jobs(self) -> list[str]:
        return []

    def folder_of(self, whose: OutputOf) -> Path:
        """Where a worker would write to."""
        return Path("/run") / whose.folder

    def begin(self, whose: OutputOf) -> None:
        """Nothing is written."""

    def end(self, whose: OutputOf, scratch: Path | None = None) -> None:
        """Nothing was written."""

    def forget(self, jobs: Iterable[str]) -> None:
        """Nothing is kept."""

    def stderr_tail(self, whose: OutputOf, hide: Hide) -> str:  # noqa: ARG002 - there is none
        return ""

    async def keep(self) -> None:
        """Nothing needs to be kept in bounds; runs until cancelled."""
        await asyncio.Event().wait()


class NoSender:
    """Nobody reads output."""

    def begin(self, ask: agent_pb2.ReadOutput) -> None:
        """Nobody asks."""

    async def close(self) -> None:
        """Nothing is under way."""


class _Claim:
    def close(self) -> None:
        """Nobody else claims ports."""


class Fence:
    """One run of a node's fence: the looks that ship, at a simulated machine."""

    def __init__(self, site: Site, machine: Machine, agent: Process) -> None:
        self._site = site
        self._machine = machine
        self._agent = agent
        self._program = Process(f"fence of {machine.node_id}")
        self._running = site.machines.begin(machine, "fence", agent, on_end=self._ended)
        self.process: ProcessId | None = self._running.id
        self.now_s = site.timeline.time
        self._begun: asyncio.Future[bool] = site.timeline.create_future()
        # Its task lives as long as the fence does.
        _ = self._program.start(site.timeline, self._watch(site.chance.agents.randint(50, 300)))

    async def _watch(self, begins_ms: int) -> None:
        await asyncio.sleep(begins_ms / 1_000)
        self._begun.set_result(True)
        for wait_s in looks(self):
            # It looks all the time; only looks that can find something are simulated.
            await self._something(wait_s)
        self._site.machines.kill(self._machine, self._running)

    async def _something(self, wait_s: float) -> None:
        """Wait for the next look that can find something: as long as no worker lives, that takes one that is noted, or
        another lease."""
        machine, begun_s = self._machine, self._site.timeline.time()
        if wait_s > LOOK_S or any(each.process in machine.trees for each in machine.records.values()):
            await asyncio.sleep(wait_s)
            return
        machine.noted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_S):
                await machine.noted.wait()
        await asyncio.sleep(wait_s - (self._site.timeline.time() - begun_s) % wait_s)

    def _ended(self) -> None:
        self._program.kill()
        if not self._begun.done():
            self._begun.set_result(False)

    # ---- what its keeper asks ----

    async def watches(self) -> bool:
        return await asyncio.shield(self._begun)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        if not self._running.gone:
            ended: asyncio.Future[int | None] = self._site.timeline.create_future()
            self._running.watchers.append(ended)
            await ended
        return -signal.SIGKILL

    # ---- what it looks at ----

    def heard(self) -> HeardLease | None:
        """The lease as it was written last."""
        return self._machine.lease

    def records(self) -> Iterable[Started]:
        """What was written down of what was started."""
        return self._machine.records.values()

    def agent_lives(self) -> bool:
        return self._agent.alive

    def is_living(self, process: ProcessId) -> bool:
        """Whether it is there, or what it started is."""
        return process in self._machine.trees

    def end(self, worker: Started) -> None:
        """Kill what lives of a worker's tree."""
        tree = self._machine.trees.get(worker.process) if worker.process is not None else None
        living = [] if tree is None else tree.living()
        if living and not any(each.dies_ms for each in living):
            self._site.count("worker ended by its fence")
        for each in living:
            self._site.machines.kill(self._machine, each)


class AgentMachine:
    """The machine below one run of an agent."""

    def __init__(
        self, site: Site, machine: Machine, agent: Process, connect: Connect, kills: Callable[[ProcessId], None]
    ) -> None:
        self.run_dir: RunDir = SimulatedRunDir(machine)
        self.processes: Processes = SimulatedProcesses(site, machine, agent, kills)
        self.lease_file: LeaseStore = SimulatedLease(site, machine)
        self.ports = Ports(clock=site.timeline.time, claim=lambda _: _Claim(), is_free=lambda _: True)
        self.outputs: Outputs = NoOutput()
        self.packages: Packages | None = None
        self.environments: Environments | None = None
        self.containers: Containers | None = None
        self.sender: Sender = NoSender()
        self.execs: ExecCarrier | None = None
        self.connect: Connect = connect
        self.facts = HostFacts(hostname=machine.node_id, pid=1, python_version="3", ray_version="simulated")
        self.environment: Mapping[str, str] = {}
        self.boot_s = site.timeline.time
        self.uniform = site.chance.agents.uniform
        self._site = site
        self._machine = machine
        self._agent = agent

    def wall_ns(self) -> int:
        return self._site.timeline.wall_ms * 1_000_000

    def token_hex(self, size: int) -> str:
        return self._site.chance.agents.randbytes(size).hex()

    async def start_driver(self, environment: Mapping[str, str]) -> Driver:  # noqa: ARG002 - it reads none
        return Driver(self._site, self._machine, self._agent)

    async def start_fence(self, environment: Mapping[str, str]) -> Fence:  # noqa: ARG002 - it reads none
        return Fence(self._site, self._machine, self._agent)

    async def start_ray_node(self, spec: RayNodeSpec) -> RayNode:
        """``ray start``, as it is specified.

        Raises:
            RayNodeError: nobody answers where the head should be.
        """
        starting = RayStart(self._site, self._machine, self._agent, spec)
        vital = await starting.vital
        node = RayNode(starting.leader.id, self.processes)
        node.vital = vital
        return node


class RayStart:
    """A machine's part in Ray: a process that leads the node's group, a raylet, and on the head a GCS."""

    def __init__(self, site: Site, machine: Machine, agent: Process, spec: RayNodeSpec) -> None:
        self.vital: asyncio.Future[dict[ProcessId, str]] = site.timeline.create_future()
        """Processes without which it is lost, once it is up; fails with `RayNodeError`."""
        self._site = site
        self._machine = machine
        self._spec = spec
        self._fails = site.strikes(Fault.RAY, 0.03)
        self._follow_ms = site.chance.ray.randint(100, 2_000)
        self.leader = site.machines.begin(machine, "ray", agent, on_end=self._leader_ended)
        site.timeline.after(site.chance.agents.randint(300, 2_000), self._come_up)

    def _come_up(self) -> None:
        ray, spec = self._site.ray, self._spec
        if self.leader.gone or self.leader.dies_ms:
            return
        if self._fails or (not spec.head and (not ray.session or spec.gcs_address != ray.address)):
            self._kill(self.leader)
            return
        vital = []
        if spec.head:
            ray.start_head(spec.gcs_address)
            vital.append(self._begin("gcs_server", self._gcs_ended))
        raylet = self._begin("raylet", lambda: self._raylet_ended(raylet, ray_node_id))
        vital.append(raylet)
        # It follows the head's end.
        ray_node_id = ray.add_raylet(spec.gpus * 1_000, lambda: self._kill(raylet, self._follow_ms))
        self._machine.raylet = ray_node_id
        if not self.vital.done():
            self.vital.set_result({each.id: each.name for each in vital})

    def _begin(self, name: str, on_end: Callable[[], None]) -> Running:
        return self._site.machines.begin(self._machine, name, self.leader, kill_ms=50, on_end=on_end)

    def _kill(self, running: Running, in_ms: int | None = None) -> None:
        self._site.machines.kill(self._machine, running, in_ms=in_ms)

    def _leader_ended(self) -> None:
        for each in list(self._machine.table.values()):
            if each.root is self.leader:
                self._kill(each)
        if not self.vital.done():
            self.vital.set_exception(RayNodeError("ray start failed: nobody answers there"))
            self.vital.exception()  # Whoever waited may be dead.

    def _gcs_ended(self) -> None:
        self._site.ray.stop_head()
        self._kill(self.leader, 50)

    def _raylet_ended(self, raylet: Running, ray_node_id: str) -> None:
        ray = self._site.ray
        ray.drop_raylet(ray_node_id)
        self._machine.raylet = ""
        self._kill(self.leader, 50)
        for tree in self._machine.trees.values():
            if tree.leader.root is raylet:
                # An actor outlives a killed raylet by about a second.
                self._kill(tree.leader, max(self._site.chance.ray.randint(10, 1_000), tree.leader.stuck_ms))
        for name in [name for name, actor in ray.actors.items() if actor.tree.leader.root is raylet]:
            del ray.actors[name]
