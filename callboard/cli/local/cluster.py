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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from callboard.cli.local.children import Child
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.local.ports import is_taken
from callboard.cli.local.records import UP_ROLE, claim_directory
from callboard.cli.local.taking_down import end_cluster, sweep
from callboard.client.client import Client
from callboard.client.clusters import CONTROLLER_ROLE, ClusterRecord, write_record
from callboard.client.processes import identify
from callboard.v1.node_pb2 import Node, NodeState

Result = TypeVar("Result")


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
        await sweep(self.plan.directory.parent)
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
        if (ourselves := identify(os.getpid())) is not None:
            self.record = self.record.with_process(UP_ROLE, ourselves)
        write_record(self.record)

    def let_go(self) -> None:
        """Leaves a cluster that is up to itself: from now on nobody watches over it."""
        kept = tuple(entry for entry in self.record.processes if entry.role != UP_ROLE)
        self.record = replace(self.record, processes=kept)
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


def _ready(nodes: Sequence[Node]) -> int:
    return sum(1 for node in nodes if node.state == NodeState.NODE_STATE_READY)
