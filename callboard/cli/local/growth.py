"""Growth of a cluster of this machine: one more node, or one less, while it runs.

A node takes the lowest free place: place N is the N-th share of the machine's GPUs, block of ports and address, and
its node is `node-N`, also after one in the middle left, drained or not. A place is taken as long as its agent runs. The
lock of the cluster is held only while a place is chosen and its agent started, so that many can be added at once.

Guaranteed: when :func:`add_worker` raises, the agent that it started has ended and its place is free again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from callboard.cli.local.children import Child, end_politely, kill_trees, unless_ended
from callboard.cli.local.cluster import NotReady, PortTaken
from callboard.cli.local.cluster_lock import ClusterGone, cluster_lock
from callboard.cli.local.plan import ClusterPlan, read_plan
from callboard.cli.local.ports import is_taken, listeners
from callboard.cli.local.records import UP_ROLE
from callboard.cli.local.taking_down import AGENT_GRACE_S, AGENT_MARK
from callboard.cli.show.exits import CommandFailed
from callboard.client.calls.cluster_calls import GONE, id_of
from callboard.client.client import Client
from callboard.client.clusters import ClusterRecord, read_record, write_record
from callboard.model.frozen import dataclass
from callboard.security.processes import ProcessId, descendants, marked, process_table
from callboard.v1.node_pb2 import Node, NodeState


class NotGrowable(CommandFailed):
    """The cluster was not started by `up`: nobody here knows what another node of it should be."""

    def __init__(self, record: ClusterRecord) -> None:
        super().__init__(
            f"Cluster {record.name} can't be added to from here.",
            "It was not started by `callboard up`, so what another node of it should be is not known.",
            f"Start one with `callboard agent --controller {record.controller}`.",
        )


class NoPlaceLeft(CommandFailed):
    """Every GPU of the machine (or every address) has its node."""

    def __init__(self, gpus: Sequence[str], holders: Sequence[tuple[str, str]]) -> None:
        """
        Args:
            gpus: ids of the machine's GPUs.
            holders: (GPU ids, node) of each place that is taken.
        """
        taken = "; ".join(f"GPU {gpus} by {node}" if gpus else node for gpus, node in holders)
        there = f"This machine has {', '.join(gpus)}. " if gpus else ""
        super().__init__(
            "No GPU is left on this machine." if gpus else "No place is left on this machine.",
            f"{there}Taken: {taken}.",
            "Let a node go (`callboard node drain NODE`, then end its agent), or add nodes on other machines with "
            "`callboard agent`.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A node that takes work.

    Attributes:
        gpus: ids of the GPUs it was dealt; empty: simulated ones of its own.
    """

    node: Node
    agent: ProcessId
    gpus: tuple[str, ...]


async def add_worker(directory: Path, tell: Callable[[str], None], *, timeout_s: float, lock_pause_s: float) -> Added:
    """Starts the agent of the next node and waits until the node takes work.

    Args:
        tell: told what begins.
        timeout_s: how long the node may take to be ready.
        lock_pause_s: seconds between attempts to get the lock of the cluster.

    Raises:
        ClusterGone: the cluster does not run (any more).
        NotGrowable: the cluster was not started by `up`.
        ClusterLocked: others were changing the cluster all the time.
        NoPlaceLeft: every GPU has its node.
        PortTaken: a port of the place is in use.
        ChildEnded: the agent ended by itself.
        NotReady: the node was not ready in time.
    """

    def in_progress(number: int, of: int, holder: str) -> None:
        tell(f"another addition is in progress, by {holder} (attempt {number}/{of})")

    async with cluster_lock(directory, "add-worker", pause_s=lock_pause_s, tell=in_progress):
        plan, record = running_plan(directory)
        async with Client(plan.controller) as client:
            nodes = await client.list_nodes()
            revision = (await client.stats()).revision
        rank = _lowest_free(plan, record, nodes)
        _check_ports(plan, rank)
        holders = {node.rank for node in nodes if node.state not in GONE and id_of(node) != plan.node_id(rank)}
        child = _start(plan, record, rank, with_rank=rank not in holders)
    gpus = plan.gpus_of(rank)
    offer = f"GPU {', '.join(gpus)}" if gpus else f"{plan.shape(rank).gpus} simulated GPUs of its own"
    tell(f"starting {plan.node_id(rank)} with {offer}")
    try:
        async with Client(plan.controller) as client, asyncio.timeout(timeout_s):
            node = await unless_ended(_ready(client, plan.node_id(rank), revision), [child])
    except TimeoutError:
        await _take_back(child)
        raise NotReady(timeout_s, [f"{plan.node_id(rank)} does not take work"]) from None
    except BaseException:
        await _take_back(child)
        raise
    return Added(node=node, agent=child.process, gpus=gpus)


async def end_worker(directory: Path, node_id: str) -> bool:
    """Ends the agent of a node, and with it what it started; it says goodbye. Whether there was one.

    Its place is free afterwards. What runs there is stopped with the short notice of a leaving agent: drain first.
    """
    record = read_record(directory)
    entry = next((each for each in record.processes if each.role == f"agent {node_id}"), None) if record else None
    if entry is None or not entry.process.is_running():
        return False
    await _end(entry.process)
    return True


def running_workers(directory: Path) -> dict[str, ProcessId]:
    """Agents of this machine's cluster that run, by node."""
    record = read_record(directory)
    agents = [each for each in record.processes if each.role.startswith("agent ")] if record else []
    return {each.role.removeprefix("agent "): each.process for each in agents if each.process.is_running()}


def running_plan(directory: Path) -> tuple[ClusterPlan, ClusterRecord]:
    """What a cluster that runs was started with, and its record.

    Raises:
        ClusterGone: it does not run.
        NotGrowable: it was not started by `up`.
    """
    record = read_record(directory)
    if record is None or not record.is_running():
        raise ClusterGone(directory)
    plan = read_plan(directory)
    if plan is None:
        raise NotGrowable(record)
    return plan, record


def _lowest_free(plan: ClusterPlan, record: ClusterRecord, nodes: Sequence[Node]) -> int:
    """The lowest place whose agent does not run and whose GPUs nobody on this machine offers."""
    agents = {each.role.removeprefix("agent "): each.process for each in record.processes}
    live = [node for node in nodes if node.state not in GONE]
    ours = socket.gethostname()
    holders: list[tuple[str, str]] = []
    for rank in range(plan.places):
        node_id, gpus = plan.node_id(rank), plan.gpus_of(rank)
        holder = _holder(node_id, agents.get(node_id), live, gpus, ours)
        if not holder:
            return rank
        holders.append((", ".join(gpus), holder))
    raise NoPlaceLeft(plan.machine_gpus, holders)


def _holder(node_id: str, agent: ProcessId | None, live: Sequence[Node], gpus: Sequence[str], host: str) -> str:
    """Who has a place; empty: nobody. One whose recorded agent has ended is free, whatever the controller still
    believes: its next agent finds what it left."""
    if agent is not None:
        if agent.is_running():
            return node_id
        live = [node for node in live if id_of(node) != node_id]
    for node in live:
        shares = node.hostname == host and {use.device.id for use in node.devices} & set(gpus)
        if shares or id_of(node) == node_id:
            return id_of(node)
    return ""


def _check_ports(plan: ClusterPlan, rank: int) -> None:
    host = plan.node_ip(rank)
    taken = [port for port in plan.ports_of(rank) if is_taken(host, port)]
    if not taken:
        return
    # Ray's node outlives an agent that was killed. The next agent of the place takes over what that one left.
    table = process_table()
    left = {process.pid for process in descendants(marked(f"{AGENT_MARK}={plan.node_directory(rank)}", table), table)}
    for port in taken:
        holders = [*listeners(f"{host}:{port}"), *listeners(f"0.0.0.0:{port}")]
        if not holders or not left.issuperset(holders):
            raise PortTaken(host, port, plan.node_id(rank))


def _start(plan: ClusterPlan, record: ClusterRecord, rank: int, *, with_rank: bool) -> Child:
    role = f"agent {plan.node_id(rank)}"
    arguments = plan.added_arguments(rank)
    if not with_rank:
        place = arguments.index("--rank")
        del arguments[place : place + 2]
    for each in record.processes:
        if each.role == UP_ROLE:
            # Whoever watches over the cluster takes it along, also when it is killed.
            arguments += ["--exit-with", f"{each.process.pid}:{each.process.start_ticks}"]
    child = Child(role, arguments, plan.log(plan.node_id(rank)), plan.environment_of(rank))
    kept = tuple(each for each in record.processes if each.role != role)
    write_record(replace(record, processes=kept).with_process(role, child.process))
    return child


async def _ready(client: Client, node_id: str, revision: int) -> Node:
    async for event in client.watch(start_revision=revision + 1, types=["node."], subject=f"nodes/{node_id}"):
        if event.state == "READY":
            node = await client.get_node(node_id)
            if node.state == NodeState.NODE_STATE_CORDONED:
                # Its predecessor was drained or cordoned. Whoever adds a node wants one that takes work.
                node = await client.uncordon_node(node_id)
            return node
    raise AssertionError("a watch goes on until it is ended")


async def _take_back(child: Child) -> None:
    """Ends an agent whose node did not come up."""
    await _end(child.process)
    child.reap()
    # Its entry stays in the record: it names a process that has ended, which holds nothing.


async def _end(agent: ProcessId) -> None:
    tree = descendants([agent], process_table())
    stubborn = await end_politely([agent], grace_s=AGENT_GRACE_S, hurry=asyncio.Event())
    left = [process for process in (*stubborn, *tree) if process.is_running()]
    if left:
        await kill_trees(left)
