"""The calls of a client that concern nodes, the policy, figures and the event log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.client.paging import PAGE_SIZE, all_pages
from callboard.client.stores import ObjectStore, node_to_ask, stores_of
from callboard.client.watching import watch_events
from callboard.model.durations import parse_duration_ms
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import preemption_policy
from callboard.model.policy import PreemptionPolicy as ExactPolicy
from callboard.model.quantities import QuantityError
from callboard.model.requests import PreemptionPolicy
from callboard.v1.common_pb2 import Resources
from callboard.v1.event_pb2 import Event, EventFilter, ListEventsRequest
from callboard.v1.inspection_pb2 import InspectionAsk, NodeInspection
from callboard.v1.node_pb2 import (
    CordonNodeRequest,
    DrainNodeRequest,
    GetNodeRequest,
    InspectNodeRequest,
    ListNodesRequest,
    ListNodesResponse,
    Node,
    RemoveNodeRequest,
    UncordonNodeRequest,
)
from callboard.v1.scheduler_pb2 import (
    AuditEntry,
    Demand,
    GetDemandRequest,
    GetPolicyRequest,
    GetStatsRequest,
    ListAuditRequest,
    SetPolicyRequest,
    Stats,
)
from callboard.wire.amounts import resources_from_proto
from callboard.wire.policy import policy_from_proto, policy_to_proto
from callboard.wire.refusals import Unavailable


class ClusterCalls:
    """Nodes, policy, figures, events."""

    _connection: Connection

    async def get_node(self, node_id: str) -> Node:
        """One node.

        Raises:
            NotFound: there is none of that id.
        """
        request = GetNodeRequest(name=f"nodes/{node_id}")
        return (await self._connection.call(methods.GET_NODE, request)).node

    async def list_nodes(self) -> list[Node]:
        """Every node, by rank."""

        async def fetch(token: str) -> ListNodesResponse:
            request = ListNodesRequest(page_size=PAGE_SIZE, page_token=token)
            return await self._connection.call(methods.LIST_NODES, request)

        return [node async for page in all_pages(fetch) for node in page.nodes]

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
        request = InspectNodeRequest(name=f"nodes/{node_id}", ask=ask)
        return (await self._connection.call(methods.INSPECT_NODE, request)).inspection

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
        request = InspectNodeRequest(name=f"nodes/{node_id}", ask=InspectionAsk(object_stores=True))
        seen = (await self._connection.call(methods.INSPECT_NODE, request)).inspection
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
        request = CordonNodeRequest(name=f"nodes/{node_id}")
        return (await self._connection.call(methods.CORDON_NODE, request)).node

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
        request = DrainNodeRequest(name=f"nodes/{node_id}", within_ms=within_ms, reason=reason)
        return (await self._connection.call(methods.DRAIN_NODE, request)).node

    async def uncordon_node(self, node_id: str) -> Node:
        """Takes a cordon or a drain back."""
        request = UncordonNodeRequest(name=f"nodes/{node_id}")
        return (await self._connection.call(methods.UNCORDON_NODE, request)).node

    async def remove_node(self, node_id: str) -> None:
        """Forgets a node that is LOST or has LEFT; its rank is free already.

        Raises:
            NotFound: there is no node of that id.
            WrongState: its agent is there, or a placement group on it is still being removed.
        """
        await self._connection.call(methods.REMOVE_NODE, RemoveNodeRequest(name=f"nodes/{node_id}"))

    async def get_policy(self) -> ExactPolicy:
        """The cluster's preemption policy, every default filled in."""
        response = await self._connection.call(methods.GET_POLICY, GetPolicyRequest())
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
        request = SetPolicyRequest(policy=policy_to_proto(read), validate_only=validate_only)
        response = await self._connection.call(methods.SET_POLICY, request)
        return policy_from_proto(response.policy)

    async def stats(self) -> Stats:
        """Figures of the whole cluster, read from the ledger at the moment of the call."""
        return (await self._connection.call(methods.GET_STATS, GetStatsRequest())).stats

    async def demand(self) -> list[Demand]:
        """What waiting jobs and growing components want beyond what there is, oldest first; for autoscalers."""
        return list((await self._connection.call(methods.GET_DEMAND, GetDemandRequest())).demands)

    async def audit(self, *, last: int = 100, who: str = "") -> list[AuditEntry]:
        """Who changed what, newest first; for operators.

        Args:
            last: how many entries, at most 1000.
            who: only what this client did; empty: of all.
        """
        request = ListAuditRequest(page_size=last, who=who)
        return list((await self._connection.call(methods.LIST_AUDIT, request)).entries)

    async def list_events(
        self,
        *,
        start_revision: int = 0,
        types: Sequence[str] = (),
        subject: str = "",
        newest: int = 0,
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
            request = ListEventsRequest(page_size=newest, filter=event_filter, newest=True)
            return list((await self._connection.call(methods.LIST_EVENTS, request)).events)
        events: list[Event] = []
        request = ListEventsRequest(start_revision=start_revision, page_size=1000, filter=event_filter)
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
            self._connection,
            start_revision=start_revision,
            event_filter=EventFilter(types=types, subject=subject),
        )


def _amounts(message: Resources) -> dict[str, float]:
    """Amounts by resource; cpu and gpu always, the rest where there is some."""
    amounts = {"cpu": 0.0, "gpu": 0.0}
    for name, amount in resources_from_proto(message).items():
        amounts[name] = float(amount) if name == "memory" else amount / 1000
    return amounts
