"""Nodes: read and cordoned."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from callboard.controller.convert.hello import MAX_DEVICES
from callboard.controller.loop.driver import Driver
from callboard.controller.options import ControllerOptions
from callboard.controller.services.request_parts import Context, build_page, id_of, is_member_of, page_of, text_of
from callboard.controller.sessions.session import AgentSession
from callboard.controller.views.nodes import NodeMessages
from callboard.scheduler import State
from callboard.scheduler.records.events import NodeCordoned, NodeDrained, NodeRemoved
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState
from callboard.security.caller_roles import caller, check_node
from callboard.v1 import node_pb2, node_pb2_grpc
from callboard.wire.refusals import NotFound, Unavailable, invalid

INSPECTION_S = 10.0
"""For an agent to look around: above what it allows itself for Ray and slow workers together."""

MAX_DRAIN_MS = 24 * 3_600_000
"""Longest notice of a drain."""


class NodeService(node_pb2_grpc.NodeServiceServicer):
    def __init__(
        self, driver: Driver, options: ControllerOptions, sessions: Mapping[str, AgentSession] = MappingProxyType({})
    ) -> None:
        """
        Args:
            sessions: of the connected agents, by node.
        """
        self._driver = driver
        self._options = options
        self._sessions = sessions
        self._messages = NodeMessages()

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> node_pb2.GetNodeResponse:
        node_id = id_of(request.name, "nodes")

        def build(state: State) -> node_pb2.Node:
            if node_id not in state.nodes:
                raise NotFound(f"there is no node {node_id}", metadata={"subject": f"nodes/{node_id}"})
            return _for_caller(self._seen(self._messages.of(state.nodes[node_id], state)), state)

        return node_pb2.GetNodeResponse(node=await self._driver.read(build))

    async def ListNodes(self, request: node_pb2.ListNodesRequest, context: Context) -> node_pb2.ListNodesResponse:
        """All nodes, by rank."""
        page = page_of(request.page_size, request.page_token, "nodes")
        state = self._driver.state
        places = sorted((f"{node.rank:010d}/{node.node_id}", node.node_id) for node in state.nodes.values())
        nodes, token = await build_page(
            [place for place in places if page.after is None or place[0] > page.after],
            page,
            key=lambda place: place[0],
            show=lambda place: self._shown(place[1]),
            most_bytes=self._options.limits.page_bytes,
        )
        await self._driver.journaled()
        return node_pb2.ListNodesResponse(nodes=nodes, next_page_token=token)

    async def foremost(self, most: int) -> tuple[list[node_pb2.Node], int]:
        """Nodes that have not left, by rank, and how many there are beside them: first those that need attention, then
        that of Ray's head. What they say may not be journaled yet."""
        state = self._driver.state
        there = [node for node in state.nodes.values() if node.state is not NodeState.LEFT]
        there.sort(key=lambda node: (not self._needs_attention(node), node.ray is None or not node.ray.head, node.rank))
        nodes, _ = await build_page(
            sorted(there[:most], key=lambda node: node.rank),
            page_of(most, "", "nodes"),
            key=lambda node: node.node_id,
            show=lambda node: self._shown(node.node_id),
            most_bytes=self._options.limits.page_bytes // 4,
        )
        return nodes, len(there) - len(nodes)

    async def CordonNode(self, request: node_pb2.CordonNodeRequest, context: Context) -> node_pb2.CordonNodeResponse:
        """Nothing new starts on the node."""
        return node_pb2.CordonNodeResponse(node=await self._cordon(request.name, cordoned=True))

    async def DrainNode(self, request: node_pb2.DrainNodeRequest, context: Context) -> node_pb2.DrainNodeResponse:
        """Nothing new starts on the node and what runs there yields."""
        node_id, reason = id_of(request.name, "nodes"), text_of(request.reason, "reason")
        check_node(node_id)
        if not 0 <= request.within_ms <= MAX_DRAIN_MS:
            raise invalid("within_ms", f"{request.within_ms} ms; 0 to {MAX_DRAIN_MS} are allowed")
        node = await self._driver.ask(
            lambda now_ms, cause: NodeDrained(
                now_ms=now_ms,
                cause=cause,
                node_id=node_id,
                deadline_ms=now_ms + request.within_ms if request.within_ms else 0,
                reason=reason,
                until_rejoin=request.until_rejoin,
            ),
            lambda _: self._message(node_id),
            source="drain",
        )
        return node_pb2.DrainNodeResponse(node=node)

    async def UncordonNode(
        self, request: node_pb2.UncordonNodeRequest, context: Context
    ) -> node_pb2.UncordonNodeResponse:
        """Takes a cordon back, or opens devices."""
        devices = tuple(request.devices[: MAX_DEVICES + 1])
        return node_pb2.UncordonNodeResponse(node=await self._cordon(request.name, cordoned=False, devices=devices))

    async def RemoveNode(self, request: node_pb2.RemoveNodeRequest, context: Context) -> node_pb2.RemoveNodeResponse:
        """Forgets a node that is gone."""
        node_id = id_of(request.name, "nodes")
        return await self._driver.ask(
            partial(NodeRemoved, node_id=node_id), lambda _: node_pb2.RemoveNodeResponse(), source="node"
        )

    async def InspectNode(self, request: node_pb2.InspectNodeRequest, context: Context) -> node_pb2.InspectNodeResponse:
        """Asks the node's agent what it sees."""
        node_id = id_of(request.name, "nodes")
        self._driver.check_serving()
        session = self._sessions.get(node_id)
        if session is None:
            if node_id not in self._driver.state.nodes:
                raise NotFound(f"there is no node {node_id}", metadata={"subject": f"nodes/{node_id}"})
            raise Unavailable(f"the agent of node {node_id} is not connected")
        return node_pb2.InspectNodeResponse(inspection=await session.inspect(request.ask, within_s=INSPECTION_S))

    async def _cordon(self, name: str, *, cordoned: bool, devices: tuple[int, ...] = ()) -> node_pb2.Node | None:
        node_id = id_of(name, "nodes")
        return await self._driver.ask(
            partial(NodeCordoned, node_id=node_id, cordoned=cordoned, devices=devices),
            lambda _: self._message(node_id),
            source="node",
        )

    def _needs_attention(self, node: NodeRecord) -> bool:
        """Whether it takes no work, or something of it does not work as it should."""
        session = self._sessions.get(node.node_id)
        return (
            node.cordoned
            or node.state is not NodeState.READY
            or bool(node.closed)
            or (
                session is not None
                and (
                    any(each.closed or each.warning for each in session.devices.values())
                    or any(each.refused for each in session.preloads)
                )
            )
        )

    def _shown(self, node_id: str) -> node_pb2.Node | None:
        message, state = self._message(node_id), self._driver.state
        return None if message is None else _for_caller(message, state)

    def _message(self, node_id: str) -> node_pb2.Node | None:
        state = self._driver.state
        return self._seen(self._messages.of(state.nodes[node_id], state)) if node_id in state.nodes else None

    def _seen(self, node: node_pb2.Node) -> node_pb2.Node:
        """The node with what its agent reported of this moment."""
        node_id = node.name.removeprefix("nodes/")
        session = self._sessions.get(node_id)
        if session is not None:
            opened = dict(self._driver.state.nodes[node_id].opened) if node_id in self._driver.state.nodes else {}
            node.preloads.extend(session.preloads)
            for use in node.devices:
                if use.device.index in session.devices:
                    use.state.CopyFrom(session.devices[use.device.index])
                if use.state.closed and use.device.index in opened:
                    use.state.warning, use.state.closed = f"opened by hand although {use.state.closed}", ""
        return node


def _for_caller(node: node_pb2.Node, state: State) -> node_pb2.Node:
    """The node as the caller may see it: a trainer sees of others' jobs how much they hold, and no names."""
    who = caller()
    if who.in_pools_only:
        for device in node.devices:
            theirs = [name for name in device.workers if is_member_of(state, name.job, who.name)]
            del device.workers[:]
            device.workers.extend(theirs)
    return node
