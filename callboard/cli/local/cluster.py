"""How does a whole cluster come up on this machine, and go without a trace?

Order: directory and record, controller, agents, READY; and back: agents (the one with Ray's head last),
controller, directory. Every program is recorded (pid and start time) before the next one is started, so
that `down` finds all of them even if we are killed.

Guaranteed: when `stop` returns, no process, port or file of the cluster is left, or it has raised
`Leftovers` that says what is. `stop` works at any moment of `start`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from callboard.cli.local.children import Child
from callboard.cli.local.ending import StillRunning, end_politely, kill_trees, marked
from callboard.cli.local.plan import ClusterPlan, network_of
from callboard.cli.local.ports import is_taken, listening_in
from callboard.client.client import Client
from callboard.client.clusters import (
    CONTROLLER_ROLE,
    ClusterRecord,
    make_private,
    read_record,
    write_record,
)
from callboard.client.processes import ProcessId, descendants, identify
from callboard.v1.node_pb2 import Node, NodeState

Result = TypeVar("Result")

AGENT_GRACE_S = 25.0
"""How long agents may take to stop workers and Ray. Above the 20 s after which they give up
themselves, so that they end in order and prove it."""

CONTROLLER_GRACE_S = 8.0
"""How long the controller may take: its own grace is 3 s."""

WATCHER_GRACE_S = 60.0
"""How long an `up` that watches over its cluster may take to end it: longer than all the others together."""

UP_ROLE = "up"

AGENT_MARK = "CALLBOARD_AGENT"
"""Variable that everything an agent starts carries, with the agent's run directory as its value."""


class PortTaken(Exception):
    """A port that the cluster needs is in use.

    Attributes:
        host: address of the port.
        port: the port.
        needed_by: who needs it.
    """

    def __init__(self, host: str, port: int, needed_by: str) -> None:
        super().__init__(f"port {port} on {host}, needed by {needed_by}, is in use")
        self.host = host
        self.port = port
        self.needed_by = needed_by


class AlreadyUp(Exception):
    """A cluster of that name runs on this machine.

    Attributes:
        record: its record.
    """

    def __init__(self, record: ClusterRecord) -> None:
        super().__init__(f"cluster {record.name} runs at {record.controller}")
        self.record = record


class NotReady(Exception):
    """The cluster was not ready in time.

    Attributes:
        timeout_s: how long was waited.
        missing: what was missing, a sentence each.
        directory: where the logs are.
    """

    def __init__(self, timeout_s: float, missing: Sequence[str], directory: Path) -> None:
        super().__init__(f"not ready within {timeout_s:g} s: {'; '.join(missing)}")
        self.timeout_s = timeout_s
        self.missing = tuple(missing)
        self.directory = directory


class Leftovers(Exception):
    """Something of the cluster is left after its end.

    Attributes:
        what: a sentence each.
    """

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__("; ".join(what))
        self.what = tuple(what)


class Observer(Protocol):
    """Is told how far a cluster is."""

    def step(self, text: str) -> None:
        """Something begins."""

    def nodes(self, nodes: Sequence[Node]) -> None:
        """The nodes as they are now."""


class LocalCluster:
    """A cluster of this machine, from its start to its end.

    Attributes:
        plan: what it consists of.
        record: what is written about it.
    """

    def __init__(self, plan: ClusterPlan, observer: Observer, *, hurry: asyncio.Event) -> None:
        self.plan = plan
        self.record = ClusterRecord(
            name=plan.name,
            controller=plan.controller,
            directory=plan.directory,
            block=plan.block,
            ray_token_path=plan.ray_token_path(),
        )
        self._observer = observer
        self._hurry = hurry
        self._children: list[Child] = []
        self._claimed = False

    async def start(self, timeout_s: float, *, alongside: Callable[[], Awaitable[None]] | None = None) -> list[Node]:
        """Starts everything and waits until every node takes work.

        Args:
            timeout_s: how long all of it may take.
            alongside: called once the directory exists, for what may start at the same time.

        Returns:
            The nodes.

        Raises:
            AlreadyUp: a cluster of that name runs.
            PortTaken: a port is in use.
            ChildEnded: a program ended by itself.
            NotReady: it took longer than ``timeout_s``.
        """
        if is_taken("127.0.0.1", self.plan.port):
            raise PortTaken("127.0.0.1", self.plan.port, "the controller")
        self._claim()
        self.plan.log("controller").parent.mkdir(mode=0o700)
        self._observer.step("starting the controller")
        self._spawn(CONTROLLER_ROLE, self.plan.controller_arguments(), self.plan.log("controller"))
        async with Client(self.plan.controller) as client:
            try:
                async with asyncio.timeout(timeout_s):
                    if alongside is not None:
                        await alongside()
                    await self._unless_ended(client.stats())
                    self._observer.step("starting the agents")
                    for rank in range(self.plan.agents):
                        node = self.plan.node_id(rank)
                        self._spawn(f"agent {node}", self.plan.agent_arguments(rank), self.plan.log(node))
                    return await self._unless_ended(self._all_ready(client))
            except TimeoutError:
                raise NotReady(timeout_s, await self._missing(client), self.plan.directory) from None

    async def run(self) -> None:
        """Runs until a program ends by itself.

        Raises:
            ChildEnded: one did.
        """
        await self._unless_ended(asyncio.Event().wait())

    async def stop(self) -> None:
        """Ends everything and removes every file.

        Raises:
            Leftovers: something is left.
        """
        if self._claimed:
            try:
                self._observer.step("stopping")
            finally:
                # Also when nobody reads what we say any more.
                await end_cluster(self.record, hurry=self._hurry)
        for child in self._children:
            child.reap()

    def _claim(self) -> None:
        claim_directory(self.plan.directory)
        self._claimed = True
        if (ourselves := identify(os.getpid())) is not None and not self.plan.detached:
            self.record = self.record.with_process(UP_ROLE, ourselves)
        write_record(self.record)

    def _spawn(self, role: str, arguments: Sequence[str], log: Path) -> None:
        child = Child(role, arguments, log)
        self._children.append(child)
        self.record = self.record.with_process(role, child.process)
        write_record(self.record)

    async def _unless_ended(self, work: Awaitable[Result]) -> Result:
        """The result of ``work``, unless a child ends before it: then that."""
        working = asyncio.ensure_future(work)
        endings = [asyncio.ensure_future(child.ended()) for child in self._children]
        try:
            await asyncio.wait({working, *endings}, return_when=asyncio.FIRST_COMPLETED)
            for ending in endings:
                if ending.done():
                    raise ending.result()
            return working.result()
        finally:
            for task in (working, *endings):
                task.cancel()
            await asyncio.gather(working, *endings, return_exceptions=True)

    async def _all_ready(self, client: Client) -> list[Node]:
        revision = (await client.stats()).revision
        nodes = await client.list_nodes()
        self._observer.nodes(nodes)
        if _ready(nodes) >= self.plan.agents:
            return nodes
        async for _ in client.watch(start_revision=revision + 1, types=["node."]):
            nodes = await client.list_nodes()
            self._observer.nodes(nodes)
            if _ready(nodes) >= self.plan.agents:
                break
        return nodes

    async def _missing(self, client: Client) -> list[str]:
        if not await client.reachable(1.0):
            return ["the controller does not answer"]
        known = {node.name.removeprefix("nodes/"): node for node in await client.list_nodes()}
        missing = []
        for rank in range(self.plan.agents):
            node = known.get(self.plan.node_id(rank))
            if node is None:
                missing.append(f"{self.plan.node_id(rank)} has not joined")
            elif node.state != NodeState.NODE_STATE_READY:
                state = NodeState.Name(node.state).removeprefix("NODE_STATE_")
                missing.append(f"{self.plan.node_id(rank)} is {state} {node.state_reason}".rstrip())
        return missing


def claim_directory(directory: Path) -> None:
    """Makes the directory of a cluster; what a dead cluster of that name left is removed first.

    Raises:
        AlreadyUp: a cluster of that name runs.
    """
    make_private(directory.parent)
    record = read_record(directory) if directory.is_dir() else None
    if record is not None and any(entry.process.is_running() for entry in record.processes):
        raise AlreadyUp(record)
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(mode=0o700)


async def take_down(record: ClusterRecord, *, hurry: asyncio.Event) -> None:
    """Ends a cluster from outside: through the `up` that watches over it, if there is one.

    Raises:
        Leftovers: something is left.
    """
    watchers = [entry.process for entry in record.processes if entry.role == UP_ROLE]
    await end_politely([process for process in watchers if process.is_running()], grace_s=WATCHER_GRACE_S, hurry=hurry)
    await end_cluster(record, hurry=hurry)


async def end_cluster(record: ClusterRecord, *, hurry: asyncio.Event) -> None:
    """Ends exactly the programs of a record with all that descends from them, and removes its files.

    Args:
        record: which cluster; its "up" program is left alone.
        hurry: when set, nobody is waited for.

    Raises:
        Leftovers: something is left.
    """
    programs = [entry for entry in record.processes if entry.role != UP_ROLE]
    controllers = [entry.process for entry in programs if entry.role == CONTROLLER_ROLE]
    agents = [entry.process for entry in programs if entry.role != CONTROLLER_ROLE]
    tree = descendants([*agents, *controllers])
    # Ray's head is on the first node: the others' Ray would wait for it in vain if it went first.
    for group, grace_s in (
        (agents[1:], AGENT_GRACE_S),
        (agents[:1], AGENT_GRACE_S),
        (controllers, CONTROLLER_GRACE_S),
    ):
        await _end_group(group, grace_s, hurry, tree)
    left: list[str] = []
    # What left its tree still carries the mark of its agent.
    strays = [*tree, *marked(f"{AGENT_MARK}={record.directory}/")]
    try:
        await kill_trees([process for process in strays if process.is_running()])
    except StillRunning as error:
        left += [f"process {process.pid} still runs" for process in error.processes]
    left += [f"port {address} is still open" for address in _open_ports(record)]
    remove_directory(record.directory)
    if left:
        raise Leftovers(left)


def remove_directory(directory: Path) -> None:
    """Removes the directory of a cluster, and the run directory if it is empty now."""
    if directory.exists():
        shutil.rmtree(directory)
    # Not empty: another cluster's. Gone: another `down` was faster.
    with suppress(OSError):
        directory.parent.rmdir()


async def _end_group(group: Sequence[ProcessId], grace_s: float, hurry: asyncio.Event, tree: list[ProcessId]) -> None:
    # Taken again here: what was started since the first look would lose its parent now.
    tree.extend(process for process in descendants(list(group)) if process not in tree)
    stubborn = await end_politely(group, grace_s=grace_s, hurry=hurry)
    if stubborn:
        await kill_trees(stubborn)


def _open_ports(record: ClusterRecord) -> list[str]:
    host, _, port = record.controller.rpartition(":")
    of_nodes = listening_in(network_of(record.block))
    return [record.controller, *of_nodes] if is_taken(host, int(port)) else of_nodes


def _ready(nodes: Sequence[Node]) -> int:
    return sum(1 for node in nodes if node.state == NodeState.NODE_STATE_READY)


__all__ = [
    "AlreadyUp",
    "Leftovers",
    "LocalCluster",
    "NotReady",
    "Observer",
    "PortTaken",
    "claim_directory",
    "end_cluster",
    "take_down",
]
