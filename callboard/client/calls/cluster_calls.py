"""The calls of a client that concern pools, nodes, the policy, figures and the event log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.calls.watching import watch_events
from callboard.model.durations import parse_duration_ms
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs import pool_spec, preemption_policy
from callboard.model.policy import PreemptionPolicy as ExactPolicy
from callboard.model.quantities import IN_BYTES, QuantityError
from callboard.model.requests import PoolSpec, PreemptionPolicy
from callboard.model.specs import PoolSpec as ExactPoolSpec
from callboard.v1.common_pb2 import Resources
from callboard.v1.event_pb2 import Event, EventFilter
from callboard.v1.inspection_pb2 import InspectionAsk, NodeInspection, RayObjectStore
from callboard.v1.node_pb2 import Node, NodeState
from callboard.v1.placement_group_pb2 import PlacementGroup
from callboard.v1.pool_pb2 import Pool
from callboard.v1.scheduler_pb2 import AuditEntry, Demand, Stats
from callboard.wire.amounts import resources_from_proto
from callboard.wire.refusals import Unavailable
from callboard.wire.specs import policy_from_proto, policy_to_proto, pool_spec_to_proto


class ClusterCalls:
    """Pools, placement groups, nodes, policy, figures, events."""

    _connection: Connection

    async def create_pool(
        self, spec: PoolSpec | ExactPoolSpec | Mapping[str, Any], *, validate_only: bool = False
    ) -> Pool:
        """Makes a pool; one that exists with an equal spec is returned as it is.

        Args:
            spec: the SDK's PoolSpec, a frozen one, or a mapping in human units:
                ``{"name": "rlhf", "nominal": {"cpu": 6}}``.
            validate_only: only check.

        Raises:
            InvalidInput: the mapping has faults; nothing was sent.
            AlreadyExists: a pool of that name has another spec.
        """
        read = spec if isinstance(spec, ExactPoolSpec) else pool_spec(spec)
        response = await self._connection.ask(
            methods.CREATE_POOL, pool_id=read.name, spec=pool_spec_to_proto(read), validate_only=validate_only
        )
        return response.pool

    async def ensure_pool(self, /, name: str, **fields: Any) -> Pool:
        """Makes the pool ``name`` unless it exists with an equal spec.

        Args:
            name: name of the pool.
            **fields: fields of the pool in human units: ``nominal={"cpu": 6, "memory": "8GiB"}``,
                ``pg_pool={"reserved": [{"cpu": 2, "gpu": 1}], "max_dynamic": 2}``.
        """
        return await self.create_pool({"name": name, **fields})

    async def update_pool(
        self,
        spec: PoolSpec | ExactPoolSpec | Mapping[str, Any],
        *,
        fields: Sequence[str] = (),
        etag: str = "",
        validate_only: bool = False,
    ) -> Pool:
        """Changes a pool.

        Args:
            spec: the new spec; its name says which pool.
            fields: top-level fields to take from it; empty: all.
            etag: refuse if the pool changed since this was read; empty: don't care.
            validate_only: only check.

        Raises:
            InvalidInput: the mapping has faults; nothing was sent.
            EtagMismatch: the pool changed meanwhile.
        """
        read = spec if isinstance(spec, ExactPoolSpec) else pool_spec(spec)
        response = await self._connection.ask(
            methods.UPDATE_POOL,
            name=f"pools/{read.name}",
            spec=pool_spec_to_proto(read),
            update_mask=FieldMask(paths=fields),
            etag=etag,
            validate_only=validate_only,
        )
        return response.pool

    async def get_pool(self, name: str) -> Pool:
        """One pool.

        Raises:
            NotFound: there is none of that name.
        """
        return (await self._connection.ask(methods.GET_POOL, name=f"pools/{name}")).pool

    async def list_pools(self) -> list[Pool]:
        """Every pool, by name."""
        return [pool async for page in self._connection.pages(methods.LIST_POOLS) for pool in page.pools]

    async def delete_pool(self, name: str, *, force: bool = False) -> Pool | None:
        """Deletes a pool.

        Args:
            name: name of the pool.
            force: cancel the jobs that are in it.

        Returns:
            The pool while it still drains; None when it is gone.

        Raises:
            PoolInUse: jobs are in it and ``force`` was not given.
        """
        response = await self._connection.ask(methods.DELETE_POOL, name=f"pools/{name}", force=force)
        return response.pool if response.HasField("pool") else None

    async def list_placement_groups(self, *, pool: str = "") -> list[PlacementGroup]:
        """Every placement group, by id.

        Args:
            pool: only those of this pool; empty: all.
        """
        return [
            group
            async for page in self._connection.pages(methods.LIST_PLACEMENT_GROUPS, pool=pool)
            for group in page.placement_groups
        ]

    async def get_placement_group(self, group_id: str) -> PlacementGroup:
        """One placement group.

        Raises:
            NotFound: there is none of that id.
        """
        response = await self._connection.ask(methods.GET_PLACEMENT_GROUP, name=f"placementGroups/{group_id}")
        return response.placement_group

    async def delete_placement_group(self, group_id: str, *, when_free: bool = False) -> PlacementGroup | None:
        """Removes an idle placement group; a reserved one stays away until its pool is updated.

        Args:
            group_id: which.
            when_free: also one that is used: it takes no other job, and is removed once nobody uses it.

        Returns:
            The group while its removal is owed; None when it is gone.
        """
        response = await self._connection.ask(
            methods.DELETE_PLACEMENT_GROUP, name=f"placementGroups/{group_id}", when_free=when_free
        )
        return response.placement_group if response.HasField("placement_group") else None

    async def get_node(self, node_id: str) -> Node:
        """One node.

        Raises:
            NotFound: there is none of that id.
        """
        return (await self._connection.ask(methods.GET_NODE, name=f"nodes/{node_id}")).node

    async def list_nodes(self) -> list[Node]:
        """Every node, by rank."""
        return [node async for page in self._connection.pages(methods.LIST_NODES) for node in page.nodes]

    async def inspect_node(
        self,
        node_id: str,
        *,
        job: str = "",
        component: str = "",
        rank: int | None = None,
        environment: bool = False,
        foreign: bool = False,
    ) -> NodeInspection:
        """What a node sees now: CPU, memory and calls of its workers, and who uses its devices.

        Args:
            node_id: which node.
            job: only workers of the job of this uid; empty: of all.
            component: only workers of this component, or of the group it is a member of; empty: of all.
            rank: only workers of this rank; None: of all.
            environment: also the workers' variables, secret values masked.
            foreign: also Ray's own lists of actors and placement groups.

        Raises:
            NotFound: there is no node of that id.
            Unavailable: its agent is not connected, or did not answer.
        """
        ask = InspectionAsk(job_id=job, component=component, rank=rank, environment=environment, foreign=foreign)
        return (await self._connection.ask(methods.INSPECT_NODE, name=f"nodes/{node_id}", ask=ask)).inspection

    async def object_stores(self, nodes: Sequence[Node] | None = None) -> list[ObjectStore]:
        """How full the object store of each node of Ray is, by Ray's own account; none without Ray.

        Args:
            nodes: the nodes, if they are known already.

        Raises:
            Unavailable: the node that was asked, or its Ray, did not answer.
        """
        known = await self.list_nodes() if nodes is None else nodes
        node_id = node_to_ask(known)
        if not node_id:
            return []
        response = await self._connection.ask(
            methods.INSPECT_NODE, name=f"nodes/{node_id}", ask=InspectionAsk(object_stores=True)
        )
        seen = response.inspection
        if seen.unknown:
            raise Unavailable(f"{node_id}: {'; '.join(seen.unknown)}")
        return stores_of(known, seen.object_stores)

    async def cluster_resources(self) -> dict[str, float]:
        """What the nodes that take part have, in numbers of CPUs and GPUs, bytes of memory: ``{"cpu": 16.0, …}``."""
        return _amounts((await self.stats()).capacity)

    async def available_resources(self) -> dict[str, float]:
        """What of it is free, in the same units."""
        return _amounts((await self.stats()).free)

    async def cordon_node(self, node_id: str) -> Node:
        """Nothing new starts on the node; what runs goes on."""
        return (await self._connection.ask(methods.CORDON_NODE, name=f"nodes/{node_id}")).node

    async def drain_node(self, node_id: str, *, within: float | str = 0, reason: str = "") -> Node:
        """Nothing new starts on the node, and what runs there yields, with notice. Returns at once.

        Args:
            node_id: which node.
            within: seconds, or a span such as ``"30s"``, by which what runs must be gone; only shortens its
                stop. 0: by its own timeouts.
            reason: why, for people.

        Raises:
            InvalidInput: ``within`` is no span of time; nothing was sent.
            NotFound: there is no node of that id.
        """
        try:
            within_ms = parse_duration_ms(within)
        except QuantityError as error:
            raise InvalidInput([Fault("within", str(error))]) from error
        response = await self._connection.ask(
            methods.DRAIN_NODE, name=f"nodes/{node_id}", within_ms=within_ms, reason=reason
        )
        return response.node

    async def uncordon_node(self, node_id: str, devices: Sequence[int] = ()) -> Node:
        """Takes a cordon or a drain back.

        Args:
            node_id: the node.
            devices: open these of its GPUs instead, by index: they take work although its agent says why they
                shouldn't, until it says something else.
        """
        return (await self._connection.ask(methods.UNCORDON_NODE, name=f"nodes/{node_id}", devices=devices)).node

    async def remove_node(self, node_id: str) -> None:
        """Forgets a node that is LOST or has LEFT; its rank is free already.

        Raises:
            NotFound: there is no node of that id.
            WrongState: its agent is there, or a placement group on it is still being removed.
        """
        await self._connection.ask(methods.REMOVE_NODE, name=f"nodes/{node_id}")

    async def get_policy(self) -> ExactPolicy:
        """The cluster's preemption policy, every default filled in."""
        response = await self._connection.ask(methods.GET_POLICY)
        return policy_from_proto(response.policy)

    async def set_policy(
        self, policy: PreemptionPolicy | ExactPolicy | Mapping[str, Any], *, validate_only: bool = False
    ) -> ExactPolicy:
        """Replaces the cluster's preemption policy.

        Args:
            policy: the SDK's PreemptionPolicy, a frozen one, or a mapping in human units:
                ``{"label_rules": {"role": {"train": ["rollout"]}}, "cancel_timeout": "500ms"}``.
                What it doesn't state takes its default.
            validate_only: only check.

        Raises:
            InvalidInput: the mapping has faults; nothing was sent.
        """
        read = policy if isinstance(policy, ExactPolicy) else preemption_policy(policy)
        response = await self._connection.ask(
            methods.SET_POLICY, policy=policy_to_proto(read), validate_only=validate_only
        )
        return policy_from_proto(response.policy)

    async def stats(self) -> Stats:
        """Figures of the whole cluster, read from the ledger at the moment of the call."""
        return (await self._connection.ask(methods.GET_STATS)).stats

    async def demand(self) -> list[Demand]:
        """What waiting jobs and growing components want beyond what there is, oldest first; for autoscalers."""
        return list((await self._connection.ask(methods.GET_DEMAND)).demands)

    async def audit(self, *, last: int = 100, who: str = "") -> list[AuditEntry]:
        """Who changed what, newest first; for operators.

        Args:
            last: how many entries, at most 1000.
            who: only what this client did; empty: of all.
        """
        return list((await self._connection.ask(methods.LIST_AUDIT, page_size=last, who=who)).entries)

    async def list_events(
        self, *, start_revision: int = 0, types: Sequence[str] = (), subject: str = "", newest: int = 0
    ) -> list[Event]:
        """Events of the log, oldest first.

        Args:
            start_revision: first revision; 0: the oldest kept.
            types: only these types; ``"job."`` selects all of jobs.
            subject: only events of this subject (``"jobs/train-00"``) and of what lies below it.
            newest: only this many, the newest that match; 0: all.
        """
        event_filter = EventFilter(types=types, subject=subject)
        if newest:
            response = await self._connection.ask(
                methods.LIST_EVENTS, page_size=newest, filter=event_filter, newest=True
            )
            return list(response.events)
        events: list[Event] = []
        request = methods.LIST_EVENTS.request(start_revision=start_revision, page_size=1000, filter=event_filter)
        while True:
            page = await self._connection.call(methods.LIST_EVENTS, request)
            events.extend(page.events)
            if not page.next_revision:
                return events
            request.start_revision = page.next_revision

    def watch(self, *, start_revision: int = 0, types: Sequence[str] = (), subject: str = "") -> AsyncIterator[Event]:
        """Follows the event log, through reconnects, without a gap and without repeats.

        Args:
            start_revision: first revision; 0: what comes from now on.
            types: only these types; ``"job."`` selects all of jobs.
            subject: only events of this subject (``"jobs/train-00"``) and of what lies below it.

        Raises:
            RevisionCompacted: the log no longer holds where the watch must go on; list, then watch
                from what the list said.
            Unreachable: the controller stayed away for a minute.
        """
        return watch_events(
            self._connection, start_revision=start_revision, event_filter=EventFilter(types=types, subject=subject)
        )


def _amounts(message: Resources) -> dict[str, float]:
    """Amounts by resource; cpu and gpu always, the rest where there is some."""
    amounts = {"cpu": 0.0, "gpu": 0.0}
    for name, amount in resources_from_proto(message).items():
        amounts[name] = float(amount) if name in IN_BYTES else amount / 1000
    return amounts


_ANSWERING = (NodeState.NODE_STATE_READY, NodeState.NODE_STATE_CORDONED, NodeState.NODE_STATE_DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """The object store of one node of Ray.

    Attributes:
        node_id: the node; empty: a node of Ray that no agent runs.
        ray_node_id: Ray's id of it (hex).
        used_bytes: what its objects take; what was spilled to disk is not counted.
        total_bytes: what it may take.
    """

    node_id: str
    ray_node_id: str
    used_bytes: int
    total_bytes: int


GONE = (NodeState.NODE_STATE_LOST, NodeState.NODE_STATE_LEFT)
"""States of nodes that are no part of the cluster any more."""


def id_of(node: Node) -> str:
    """Id of a node."""
    return node.name.removeprefix("nodes/")


def node_to_ask(nodes: Iterable[Node]) -> str:
    """Id of the node whose agent is asked: that of Ray's head where it is one of ours; empty: none is in Ray."""
    inside = [node for node in nodes if node.ray_node_id and node.state in _ANSWERING]
    first = min(inside, key=lambda node: (not node.ray_head, node.rank), default=None)
    return "" if first is None else id_of(first)


def stores_of(nodes: Sequence[Node], told: Iterable[RayObjectStore]) -> list[ObjectStore]:
    """What Ray told, by the ranks of our nodes; those that aren't ours come last."""
    ours = {node.ray_node_id: node for node in nodes if node.ray_node_id}
    rank_of = {ray_node_id: (0, node.rank) for ray_node_id, node in ours.items()}
    return [
        ObjectStore(
            node_id=id_of(ours[store.ray_node_id]) if store.ray_node_id in ours else "",
            ray_node_id=store.ray_node_id,
            used_bytes=store.used_bytes,
            total_bytes=store.total_bytes,
        )
        for store in sorted(told, key=lambda store: (rank_of.get(store.ray_node_id, (1, 0)), store.ray_node_id))
    ]
