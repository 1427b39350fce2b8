"""The calls of a client that concern nodes, the policy, figures and the event log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from callboard.client import methods
from callboard.client.connection import Connection
from callboard.client.paging import PAGE_SIZE, all_pages
from callboard.client.watching import watch_events
from callboard.model.durations import parse_duration_ms
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import preemption_policy
from callboard.model.policy import PreemptionPolicy as ExactPolicy
from callboard.model.quantities import QuantityError
from callboard.model.requests import PreemptionPolicy
from callboard.v1.event_pb2 import Event, EventFilter, ListEventsRequest
from callboard.v1.node_pb2 import (
    CordonNodeRequest,
    DrainNodeRequest,
    GetNodeRequest,
    ListNodesRequest,
    ListNodesResponse,
    Node,
    UncordonNodeRequest,
)
from callboard.v1.scheduler_pb2 import GetPolicyRequest, GetStatsRequest, SetPolicyRequest, Stats
from callboard.wire.policy import policy_from_proto, policy_to_proto


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
