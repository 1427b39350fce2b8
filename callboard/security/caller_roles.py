"""Roles of callers: who calls, and which methods each role may call.

The table names every method of the API; a test compares it with the descriptors, so that a new method is refused to
everybody but the owner until somebody decides who may call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from enum import StrEnum

from callboard.model.frozen import dataclass


class Role(StrEnum):
    """What a caller is there for."""

    AGENT = "agent"
    OPERATOR = "operator"
    TRAINER = "trainer"
    VIEWER = "viewer"
    JOINER = "joiner"
    """Whoever holds a join token: may exchange it, and nothing else."""


_AGENT = frozenset({Role.AGENT})
_OPERATOR = frozenset({Role.OPERATOR})
_TRAINER = _OPERATOR | {Role.TRAINER}
_READERS = _OPERATOR | {Role.VIEWER}
_PEOPLE = _TRAINER | {Role.VIEWER}

_BY_SERVICE: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "callboard.v1.AgentService": {
        "Session": _AGENT,
        "SendOutput": _AGENT,
        "AttachExec": _AGENT,
        "GetPackage": _AGENT,
        # An agent that has joined gets its next certificate by the one it has.
        "Join": _AGENT | {Role.JOINER},
    },
    "callboard.v1.NodeService": {
        "GetNode": _PEOPLE,
        "ListNodes": _PEOPLE,
        "CordonNode": _OPERATOR,
        # An agent whose machine is about to go asks for the drain of its node.
        "DrainNode": _OPERATOR | _AGENT,
        "UncordonNode": _OPERATOR,
        "RemoveNode": _OPERATOR,
        # Shows processes and files of whoever works there.
        "InspectNode": _OPERATOR,
    },
    "callboard.v1.PoolService": {
        "CreatePool": _OPERATOR,
        "GetPool": _PEOPLE,
        "ListPools": _PEOPLE,
        "UpdatePool": _OPERATOR,
        "DeletePool": _OPERATOR,
    },
    "callboard.v1.JobService": {
        "SubmitJob": _TRAINER,
        "PutPackage": _TRAINER,
        "GetJob": _PEOPLE,
        "ListJobs": _PEOPLE,
        "CancelJob": _TRAINER,
        "CompleteJob": _TRAINER,
        "PreemptJob": _OPERATOR,
        "ScaleJob": _TRAINER,
        "RenewJobs": _TRAINER,
        "ReportSignals": _TRAINER,
        "ExplainJob": _PEOPLE,
        # What jobs print may hold anything, so it is not for viewers.
        "ReadJobOutput": _TRAINER,
        "ExecWorker": _TRAINER,
    },
    "callboard.v1.PlacementGroupService": {
        "GetPlacementGroup": _READERS,
        "ListPlacementGroups": _READERS,
        "DeletePlacementGroup": _OPERATOR,
    },
    "callboard.v1.PlacementService": {"ResolvePlacement": _PEOPLE, "SearchPlacement": _TRAINER},
    "callboard.v1.SchedulerService": {
        "GetPolicy": _PEOPLE,
        "SetPolicy": _OPERATOR,
        "GetStats": _PEOPLE,
        "GetOverview": _PEOPLE,
        # Names jobs of every pool.
        "GetDemand": _READERS,
        "ListAudit": _OPERATOR,
    },
    "callboard.v1.EventService": {"Watch": _PEOPLE, "ListEvents": _PEOPLE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _PEOPLE},
}

ROLES: Mapping[str, frozenset[Role]] = {
    f"/{service}/{method}": roles for service, methods in _BY_SERVICE.items() for method, roles in methods.items()
}
"""Method → roles that may call it."""

OPEN = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Methods for callers without a token: whether the controller serves is no secret, and a probe has no files."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a call.

    Attributes:
        name: unique among the clients of a controller; pools name their members by it, and the audit log says it.
        role: what it may do; None: everything.
        node: the only node that an agent may be or join as; empty: any.
    """

    name: str
    role: Role | None
    node: str = ""

    @property
    def in_pools_only(self) -> bool:
        """Whether it sees and does only what belongs to pools that name it as a member."""
        return self.role is Role.TRAINER


ANYBODY = Identity("anybody", None)
"""Every caller of a controller that runs with --insecure."""

OWNER = Identity("owner", None)
"""The account that started the controller."""

GUEST = Identity("guest", Role.VIEWER)
"""Everybody who reads a web page that is open (--page-open)."""

_caller: ContextVar[Identity] = ContextVar("callboard_caller", default=OWNER)


def caller() -> Identity:
    """Who makes the call that this task handles; what the controller does by itself is done by its owner."""
    return _caller.get()


def handle_for(identity: Identity) -> None:
    """Says who makes the call that this task handles."""
    _caller.set(identity)


def check_role(identity: Identity, method: str) -> None:
    """Whether the caller's role includes a method.

    Raises:
        NotAllowed: it doesn't.
    """
    allowed = ROLES.get(method, frozenset())
    if identity.role is None or identity.role in allowed:
        return
    name = method.rpartition("/")[2]
    needed = " or ".join(sorted(allowed)) or "the controller's own account"
    raise _not_allowed(
        f"{name} is not for {identity.name}, whose role is {identity.role}; it is for {needed}. "
        "Ask an operator for it, or for a token with that role"
    )


def check_node(node_id: str, who: Identity | None = None) -> None:
    """Whether the caller may act for a node: an agent that is bound to one acts for no other.

    Raises:
        NotAllowed: it is the agent of another node.
    """
    who = who or caller()
    if who.node and who.node != node_id:
        raise _not_allowed(
            f"{who.name} is the agent of node {who.node}, and the call is about {node_id[:63]!r}. Start the agent with "
            f"--node-id {who.node}, or give it a certificate or token of its own"
        )


def _not_allowed(text: str) -> Exception:
    from callboard.wire.refusals import NotAllowed  # noqa: PLC0415 - a list of verbs names the roles and refuses nobody

    return NotAllowed(text)
