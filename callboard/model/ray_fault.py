"""Why a node is in no Ray cluster: the code that programs read, the text that people read, and what to do about it."""

from __future__ import annotations

from enum import StrEnum

from callboard.model.frozen import dataclass

NO_RAY_HEAD = "no Ray head: start one agent with --ray-head"

MAX_TEXT = 1_000
"""Characters of the text that travel and are kept."""


class RayFaultCode(StrEnum):
    """The names of ``callboard.v1.RayFaultCode`` without their prefix."""

    NO_HEAD = "NO_HEAD"
    """No agent starts Ray's head, so there is no cluster to join."""
    AWAITS_HEAD = "AWAITS_HEAD"
    """An agent starts Ray's head, which is not up yet."""
    PORT_TAKEN = "PORT_TAKEN"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    BAD_OPTION = "BAD_OPTION"
    """Ray refuses what it was started with."""
    NOT_INSTALLED = "NOT_INSTALLED"
    """Ray, or a program of it, is missing or can't be run."""
    FILES = "FILES"
    """A directory or a file can't be made or used."""
    NOT_AUTHENTICATED = "NOT_AUTHENTICATED"
    UNREACHABLE = "UNREACHABLE"
    """The cluster to join does not answer."""
    NOT_OURS = "NOT_OURS"
    """The cluster is another controller's, or another session than the one that is wanted."""
    START_FAILED = "START_FAILED"
    """Anything else."""


_REMEDIES = {
    RayFaultCode.NO_HEAD: "start one agent with --ray-head, or give every agent --ray-address",
    RayFaultCode.AWAITS_HEAD: "wait until Ray's head is up",
    RayFaultCode.PORT_TAKEN: (
        "end what listens on that port, or start the agent of {node} with another (--ray-port, --dashboard-port, "
        "--port-base)"
    ),
    RayFaultCode.VERSION_MISMATCH: (
        "install the same Ray and the same minor version of Python on {node} as on the others, and restart its agent"
    ),
    RayFaultCode.BAD_OPTION: "start the agent of {node} with other options",
    RayFaultCode.NOT_INSTALLED: "install Ray in the environment of the agent of {node}, and restart that agent",
    RayFaultCode.FILES: (
        "make that path usable by the agent of {node}, or give it a short --run-dir elsewhere, and restart it"
    ),
    RayFaultCode.NOT_AUTHENTICATED: "start the agent of {node} with the token of the Ray cluster (--ray-token-file)",
    RayFaultCode.UNREACHABLE: "see that Ray's head runs and that {node} reaches its address; the agent tries again",
    RayFaultCode.NOT_OURS: "give each controller a Ray cluster of its own; the agent of {node} tries again",
    RayFaultCode.START_FAILED: "look at ray.log in the logs of the agent of {node}; the agent tries again",
}


@dataclass(frozen=True, slots=True)
class RayFault:
    """Why a node is in no Ray cluster.

    Attributes:
        message: one sentence, with what Ray said.
        permanent: the agent does not try again: the same would happen.
    """

    code: RayFaultCode
    message: str
    permanent: bool = False

    def remedy(self, node_id: str) -> str:
        """What to do about it on the node, without a full stop."""
        return _REMEDIES[self.code].format(node=node_id)
