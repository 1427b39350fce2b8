"""A whole cluster on this machine: how it comes up, and goes without a trace.

Order: directory and record, controller, agents, READY; and back: agents (the one with Ray's head last),
controller, directory. Every program is recorded (pid and start time) before the next one is started, so
that `down` finds all of them even if we are killed.

Guaranteed: when `stop` returns, no process, port or file of the cluster is left, or it has raised
`Leftovers` that says what is. `stop` works at any moment of `start`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from callboard.agents.ray.ray_command import DASHBOARD_HOST
from callboard.cli.local.children import Child, unless_ended
from callboard.cli.local.cluster_lock import cluster_lock
from callboard.cli.local.plan import ClusterPlan, write_plan
from callboard.cli.local.ports import is_taken
from callboard.cli.local.records import UP_ROLE, check_free, claim_directory
from callboard.cli.local.taking_down import end_cluster, sweep
from callboard.cli.show.exits import CommandFailed
from callboard.client.calls.cluster_calls import id_of
from callboard.client.client import Client
from callboard.client.clusters import CONTROLLER_ROLE, ClusterRecord, read_record, running_clusters, write_record
from callboard.security.processes import identify
from callboard.security.tokens import forget_stated_token
from callboard.v1.node_pb2 import Node, NodeState


class PortTaken(CommandFailed):
    """A port that the cluster needs is in use."""

    def __init__(self, host: str, port: int, needed_by: str, cluster: str = "") -> None:
        """
        Args:
            host: address that it is of.
            port: the port.
            needed_by: what would listen there.
            cluster: name of the cluster of this machine whose controller listens there; empty: somebody else does.
        """
        by = f"; the controller of cluster {cluster} listens there" if cluster else ""
        super().__init__(
            f"Port {port} on {host} is in use.",
            f"It is the one for {needed_by}{by}.",
            "Choose another (--port, --ray-port, --dashboard-port, --port-base), or end what listens there.",
        )


class NotReady(CommandFailed):
    """The cluster was not ready in time."""

    def __init__(self, timeout_s: float | None, missing: Sequence[str]) -> None:
        """
        Args:
            timeout_s: how long was waited; None: waiting longer would not help.
            missing: what was missing, a sentence each.
        """
        super().__init__(
            "The cluster can't get ready."
            if timeout_s is None
            else f"The cluster was not ready within {timeout_s:g} s.",
            f"{'; '.join(missing)}.",
            "Correct what it says and start again."
            if timeout_s is None
            else "Give it longer with --timeout; run `callboard controller` and `callboard agent` by hand to see more.",
        )


class Observer(Protocol):
    """Is told how far a cluster is."""

    def step(self, text: str) -> None:
        """Something begins."""

    def nodes(self, nodes: Sequence[Node]) -> None:
        """The nodes as they are now."""


class LocalCluster:
    """A cluster of this machine, from its start to its end."""

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
        forget_stated_token()
        # Before its ports: a cluster of this name that runs holds them, and is the reason a person can act on.
        base = self.plan.directory.parent
        check_free(self.plan.directory)
        if is_taken("127.0.0.1", self.plan.port):
            there = [each.name for each in running_clusters(base) if each.controller == self.plan.controller]
            raise PortTaken("127.0.0.1", self.plan.port, "the controller", there[0] if there else "")
        self._check_ray_ports()
        await sweep(base)
        self._claim()
        # Whoever adds a node waits until the record is whole.
        async with cluster_lock(self.plan.directory, "`callboard up`, which starts the cluster"):
            return await self._start(timeout_s, alongside)

    async def _start(self, timeout_s: float, alongside: Callable[[], Awaitable[None]] | None) -> list[Node]:
        self.plan.log("controller").parent.mkdir(mode=0o700)
        self._observer.step("starting the controller")
        self._spawn(CONTROLLER_ROLE, self.plan.controller_arguments(), self.plan.log("controller"))
        # A slow machine may take a controller longer to listen than a client of its own accord waits for one.
        async with Client(self.plan.controller, retry=timeout_s) as client:
            try:
                async with asyncio.timeout(timeout_s):
                    if alongside is not None:
                        await alongside()
                    await unless_ended(client.stats(), self._children)
                    self._observer.step("starting the agents")
                    for rank in range(self.plan.agents):
                        node = self.plan.node_id(rank)
                        self._spawn(
                            f"agent {node}",
                            self.plan.agent_arguments(rank),
                            self.plan.log(node),
                            self.plan.environment_of(rank),
                        )
                    return await unless_ended(self._all_ready(client), self._children)
            except TimeoutError:
                raise NotReady(timeout_s, await self._missing(client)) from None

    async def run(self) -> None:
        """Runs until a program ends by itself that the others can't do without: the controller, Ray's head.

        The end of another agent is told; its node has left or is lost, and its place can be taken by `add-worker`.

        Raises:
            ChildEnded: one did.
        """
        vital = self._children[: 2 if self.plan.own_ray else 1]
        others = self._children[len(vital) :]
        await unless_ended(asyncio.gather(*(self._tell_end(child) for child in others), asyncio.Event().wait()), vital)

    async def _tell_end(self, child: Child) -> None:
        ended = await child.ended()
        self._observer.step(f"{child.role} ended with exit code {ended.exit_code}; the cluster goes on without it")

    async def stop(self) -> None:
        """Ends everything and removes every file.

        Raises:
            Leftovers: something is left.
        """
        try:
            if self._claimed:
                try:
                    self._observer.step("stopping")
                finally:
                    # Also when nobody reads what we say any more.
                    await end_cluster(self.record, hurry=self._hurry)
        finally:
            for child in self._children:
                child.reap()

    def _claim(self) -> None:
        claim_directory(self.plan.directory)
        self._claimed = True
        if (ourselves := identify(os.getpid())) is not None:
            self.record = self.record.with_process(UP_ROLE, ourselves)
        write_plan(self.plan)
        write_record(self.record)

    def _check_ray_ports(self) -> None:
        """Fails before anything starts where a port of Ray that was asked for is in use (NJ-04)."""
        plan = self.plan
        of_ray = ((plan.node_ip(0), plan.ray_port, "Ray"), (DASHBOARD_HOST, plan.dashboard_port, "Ray's dashboard"))
        for host, port, needed_by in of_ray:
            if plan.own_ray and port and is_taken(host, port):
                raise PortTaken(host, port, needed_by)
        for rank in range(self.plan.agents):
            for port in self.plan.ports_of(rank):
                if is_taken(self.plan.node_ip(rank), port):
                    raise PortTaken(self.plan.node_ip(rank), port, self.plan.node_id(rank))

    async def let_go(self) -> None:
        """Leaves a cluster that is up to itself: from now on nobody watches over it."""
        async with cluster_lock(self.plan.directory, "`callboard up`, which leaves the cluster to itself"):
            record = read_record(self.plan.directory) or self.record
            kept = tuple(entry for entry in record.processes if entry.role != UP_ROLE)
            self.record = replace(record, processes=kept)
            write_record(self.record)

    def _spawn(
        self, role: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        child = Child(role, arguments, log, environment)
        self._children.append(child)
        self.record = self.record.with_process(role, child.process)
        write_record(self.record)

    async def _all_ready(self, client: Client) -> list[Node]:
        revision = (await client.stats()).revision
        changes = client.watch(start_revision=revision + 1, types=["node."])
        while _ready(nodes := await self._looked_at(client)) < self.plan.agents:
            await anext(changes)
        return nodes

    async def _looked_at(self, client: Client) -> list[Node]:
        """The nodes as they are. Raises `NotReady` once one can't get ready."""
        nodes = await client.list_nodes()
        self._observer.nodes(nodes)
        if any(node.ray_fault.permanent for node in nodes):
            raise NotReady(None, await self._missing(client))
        return nodes

    async def _missing(self, client: Client) -> list[str]:
        if not await client.reachable(1.0):
            return ["the controller does not answer"]
        known = {id_of(node): node for node in await client.list_nodes()}
        missing = []
        for rank in range(self.plan.agents):
            node = known.get(self.plan.node_id(rank))
            if node is None:
                missing.append(f"{self.plan.node_id(rank)} has not joined")
            elif node.state != NodeState.NODE_STATE_READY:
                state = NodeState.Name(node.state).removeprefix("NODE_STATE_")
                why = f": {node.state_reason}" if node.state_reason else ""
                missing.append(f"{self.plan.node_id(rank)} is {state}{why}")
        return missing


def _ready(nodes: Sequence[Node]) -> int:
    return sum(1 for node in nodes if node.state == NodeState.NODE_STATE_READY)
