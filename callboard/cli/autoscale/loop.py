"""The autoscaling loop: when a cluster gets a node, and when it loses one.

Up: as soon as workers wait for room that no node has or is about to have, by as many nodes as would give all of them
their place, at most to the limit. Down: one at a time, when no worker waits that a node could help, a node on which
nothing ran for the idle time; it is cordoned, looked at once more, drained, ended and forgotten. Nothing can start
between the look and the end, and a job that was faster takes the cordon back (NJ-10). Before any of them, those go that
are still on their way: a batch system may have put them in a queue behind the very nodes that are idle.

Never touched: Ray's head, nodes of others, nodes that hold a reserved placement group, and the fewest nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from typing import Protocol

from callboard.cli.autoscale.sizing import Room, size
from callboard.client.calls.cluster_calls import GONE, id_of
from callboard.client.client import Client
from callboard.model.frozen import dataclass
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.placement_group_pb2 import PlacementGroupKind
from callboard.wire.amounts import resources_from_proto
from callboard.wire.refusals import DeadlineExceeded, NotFound, Unavailable, WrongState

EMPTY_S = 60.0
"""Beyond the notice of a drain: how long the proof that a node is empty may take, and the goodbye of its agent."""

RETRY_S = 30.0
"""After a node could not be added: how long none is tried again."""


class ProviderFailed(Exception):
    """A node could not be added or removed; the text says why."""


class Provider(Protocol):
    def new_room(self, nodes: Sequence[Node]) -> Room | None:
        """What one more node would have; None: that is not known yet."""

    def owns(self, node_id: str) -> bool:
        """Whether the node may be removed through this provider."""

    async def add(self) -> str:
        """Adds a node and returns its id when it takes work.

        Raises:
            ProviderFailed: it could not.
        """

    async def remove(self, node_id: str) -> None:
        """Ends a node that is empty; returns when its agent has ended.

        Raises:
            ProviderFailed: it could not.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the loop keeps to.

    Attributes:
        idle_s: a node on which nothing ran for so long may go.
        grow_elastic: nodes are added for elastic components too.
    """

    least: int
    most: int
    idle_s: float
    notice_s: float
    grow_elastic: bool = False


@dataclass(slots=True)
class Autoscaler:
    """The loop.

    Attributes:
        provider: where nodes come from.
        tell: told what it does, a line each.
        clock: monotonic seconds.
    """

    client: Client
    provider: Provider
    limits: Limits
    tell: Callable[[str], None]
    clock: Callable[[], float]
    _adding: dict[asyncio.Task[None], None] = field(default_factory=dict)  # the oldest first
    _settled: set[str] = field(default_factory=set)
    """Nodes that came by no addition that is under way."""
    _unwanted_since: float | None = None
    _idle_since: dict[str, float] = field(default_factory=dict)
    _not_before: float = float("-inf")
    _told: str = ""

    async def run(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Looks, acts, pauses, until it is cancelled. Additions that are under way are then taken back.

        A controller that is away is waited for, once it was there.
        """
        reached = False
        try:
            while True:
                try:
                    await self.look()
                    reached = True
                except (Unavailable, DeadlineExceeded) as error:
                    if not reached:
                        raise
                    self._say_once(f"{error}; nothing is changed until it does")
                await pause()
        finally:
            for task in self._adding:
                task.cancel()
            await asyncio.gather(*self._adding, return_exceptions=True)

    async def look(self) -> None:
        """One look, and what follows from it."""
        nodes = [node for node in await self.client.list_nodes() if node.state not in GONE]
        serving = self._without_arriving([node for node in nodes if node.state != NodeState.NODE_STATE_DRAINING])
        demands = await self.client.demand()
        here, coming = len(serving), len(self._adding)
        new, grow = self.provider.new_room(nodes), self.limits.grow_elastic
        most = max(0, self.limits.most - here - coming)
        sizing = size(demands, serving, new, coming=coming, most=most, grow_elastic=grow)
        self._say_once("; ".join(sizing.hopeless))
        self._note_idle(serving)
        goal = min(self.limits.most, max(self.limits.least, here + coming + sizing.nodes))
        if goal > here + coming:
            self._add(goal - here - coming, [job for entry in demands for job in entry.jobs])
        elif coming:
            needed = size(demands, serving, new, coming=0, most=coming, grow_elastic=grow).nodes
            await self._take_back(min(coming - needed, here + coming - self.limits.least))
        elif not sizing.nodes and not sizing.waiting:
            await self._shrink(serving)

    def _without_arriving(self, nodes: list[Node]) -> list[Node]:
        """The nodes less those of additions under way: these are counted with their additions, from the moment they
        were asked for until they take work, and only there."""
        if not self._adding:
            self._settled = {id_of(node) for node in nodes}
        new = [id_of(node) for node in nodes if id_of(node) not in self._settled and self.provider.owns(id_of(node))]
        arriving = set(new[: len(self._adding)])
        return [node for node in nodes if id_of(node) not in arriving]

    async def added(self) -> None:
        """Returns when no addition is under way."""
        if self._adding:
            await asyncio.wait(set(self._adding))

    def _add(self, count: int, jobs: list[str]) -> None:
        if self.clock() < self._not_before:
            return
        self._unwanted_since = None
        why = f"for {', '.join(dict.fromkeys(jobs))}" if jobs else "to have the fewest"
        self.tell(f"adding {count} node{'s' if count > 1 else ''} {why}")
        for _ in range(count):
            task = asyncio.create_task(self._added())
            self._adding[task] = None
            task.add_done_callback(self._adding.pop)

    async def _take_back(self, count: int) -> None:
        """Gives up the newest of the nodes that are on their way, once some were too many for the idle time."""
        now = self.clock()
        if count <= 0:
            self._unwanted_since = None
            return
        self._unwanted_since = now if self._unwanted_since is None else self._unwanted_since
        if now - self._unwanted_since < self.limits.idle_s:
            return
        self._unwanted_since = None
        self.tell(f"taking back {count} node{'s' if count > 1 else ''} on the way: nobody waits for them")
        given_up = list(self._adding)[-count:]
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)

    async def _added(self) -> None:
        try:
            node_id = await self.provider.add()
        except (ProviderFailed, Unavailable, DeadlineExceeded) as error:
            self._not_before = self.clock() + RETRY_S
            self.tell(f"a node could not be added: {error}")
        else:
            self._settled.add(node_id)
            self.tell(f"{node_id} takes work")

    def _note_idle(self, nodes: Sequence[Node]) -> None:
        now = self.clock()
        idle = {id_of(node) for node in nodes if node.state == NodeState.NODE_STATE_READY and _is_unused(node)}
        self._idle_since = {node_id: self._idle_since.get(node_id, now) for node_id in idle}

    async def _shrink(self, nodes: Sequence[Node]) -> None:
        """Removes the node that is idle the longest, of those that may go; the highest rank of equals."""
        if len(nodes) <= self.limits.least:
            return
        now = self.clock()
        kept = await self._with_reserved_groups()
        ripe = [
            node
            for node in nodes
            if not node.ray_head
            and self.provider.owns(id_of(node))
            and id_of(node) not in kept
            and now - self._idle_since.get(id_of(node), now) >= self.limits.idle_s
        ]
        if ripe:
            await self._remove(id_of(min(ripe, key=lambda node: (self._idle_since[id_of(node)], -node.rank))))

    async def _with_reserved_groups(self) -> set[str]:
        groups = await self.client.list_placement_groups()
        reserved = [group for group in groups if group.kind == PlacementGroupKind.PLACEMENT_GROUP_KIND_RESERVED]
        return {bundle.node_id for group in reserved for bundle in group.bundles}

    async def _remove(self, node_id: str) -> None:
        revision = (await self.client.stats()).revision
        if not _is_unused(await self.client.cordon_node(node_id)):
            await self.client.uncordon_node(node_id)  # A job was faster.
            return
        self.tell(f"removing {node_id}: nothing ran there for {self.limits.idle_s:g} s")
        try:
            async with asyncio.timeout(self.limits.notice_s + EMPTY_S):
                await self.client.drain_node(node_id, within=self.limits.notice_s, reason="idle; removed by autoscale")
                await self.provider.remove(node_id)
                await self._gone(node_id, revision)
        except ProviderFailed as error:
            self.tell(f"{node_id} could not be removed: {error}")
            return
        except TimeoutError:
            self.tell(f"{node_id} could not be removed in time; it takes nothing new")
            return
        self._idle_since.pop(node_id, None)
        self.tell(f"{node_id} is gone")

    async def _gone(self, node_id: str, revision: int) -> None:
        """Waits for the goodbye of a node's agent, then has the node forgotten."""
        events = self.client.watch(start_revision=revision + 1)
        while True:
            try:
                if (await self.client.get_node(node_id)).state in GONE:
                    await self.client.remove_node(node_id)
                    return
            except NotFound:
                return  # Somebody else had it forgotten.
            except WrongState:
                pass  # A placement group on it is still being removed.
            await anext(events)

    def _say_once(self, text: str) -> None:
        if text and text != self._told:
            self.tell(text)
        self._told = text


def _is_unused(node: Node) -> bool:
    return not any(amount for _, amount in resources_from_proto(node.used).items())
