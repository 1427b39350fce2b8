"""The address of Ray: what the head's agent told us, for every other agent.

Kept in memory only: the token is written to no journal and no log. A restarted controller learns it again when the
head's agent joins.
"""

from __future__ import annotations

from callboard.v1 import agent_pb2


class RayBoard:
    """The way into the Ray cluster."""

    def __init__(self) -> None:
        self._node_id = ""
        self._bootstrap: agent_pb2.RayBootstrap | None = None

    @property
    def bootstrap(self) -> agent_pb2.RayBootstrap | None:
        """What agents are told; without an address while a head is being started, None while none is known."""
        return self._bootstrap

    def learn(self, node_id: str, ray: agent_pb2.RayNode) -> bool:
        """Takes in what an agent says of its node's part in Ray; True if agents must be told."""
        known = self._bootstrap
        if not ray.head:
            if node_id == self._node_id:
                return self.forget(node_id)  # it was the head and is none any more
            return False
        if not ray.gcs_address:
            if known is not None and known.gcs_address and node_id != self._node_id:
                return False  # another node's head is up
            self._node_id = node_id
            self._bootstrap = agent_pb2.RayBootstrap(head_node=node_id)  # it starts, or is started again
            return self._bootstrap != known
        told = agent_pb2.RayBootstrap(
            gcs_address=ray.gcs_address, auth_token=ray.auth_token, session=ray.session, head_node=node_id
        )
        if not told.auth_token and known is not None and known.session == told.session:
            told.auth_token = known.auth_token  # a heartbeat need not repeat it
        self._node_id = node_id
        self._bootstrap = told
        return told != known

    def forget(self, node_id: str) -> bool:
        """The node no longer runs Ray; True if agents wait for the head that it was to start, and must be told."""
        if node_id != self._node_id:
            return False
        starting = self._bootstrap is not None and not self._bootstrap.gcs_address
        self._node_id = ""
        self._bootstrap = None
        return starting

    def __repr__(self) -> str:
        return f"RayBoard(head={self._node_id!r}, token=…)"
