"""Refusals of calls: one hierarchy for both sides, with fields; the text is made where it is shown.

A class declares the status code and the reasons that it stands for; how a refusal travels, what the client raises and
the table in docs/cli.md follow from that.

The controller raises these and :mod:`callboard.wire.errors` turns them into statuses; the client gets them back.
Only :class:`Unavailable` is worth a retry. gRPC is not imported here, so that ``except QuotaExceeded`` costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from typing import ClassVar

from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass

DOMAIN = "callboard.dev"
"""The domain of every ``google.rpc.ErrorInfo``."""


class ErrorReason(StrEnum):
    """The names of ``callboard.v1.ErrorReason`` without their prefix (a test keeps both equal)."""

    UNSPECIFIED = "UNSPECIFIED"
    INVALID_FIELD = "INVALID_FIELD"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    UNSCHEDULABLE = "UNSCHEDULABLE"
    WRONG_STATE = "WRONG_STATE"
    ETAG_MISMATCH = "ETAG_MISMATCH"
    REVISION_COMPACTED = "REVISION_COMPACTED"
    BAD_PAGE_TOKEN = "BAD_PAGE_TOKEN"  # noqa: S105 - a reason, not a password
    LIMIT_REACHED = "LIMIT_REACHED"
    STORE_FAILED = "STORE_FAILED"
    STOPPING = "STOPPING"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    NODE_TAKEN = "NODE_TAKEN"
    POOL_IN_USE = "POOL_IN_USE"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    PREEMPTION_REFUSED = "PREEMPTION_REFUSED"
    INTERNAL = "INTERNAL"
    INVENTORY_CHANGED = "INVENTORY_CHANGED"
    NOT_AUTHENTICATED = "NOT_AUTHENTICATED"
    NOT_ALLOWED = "NOT_ALLOWED"
    NOT_LEADER = "NOT_LEADER"


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One quota that is too small.

    Attributes:
        subject: whose quota: ``pools/rlhf``.
        description: asked and allowed amounts, one sentence.
    """

    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class CallError:
    """What a failed call said, whether or not a controller answered.

    Attributes:
        code: name of the gRPC status code, e.g. ``NOT_FOUND``.
        reason: the controller's reason; UNSPECIFIED where none (or an unknown one) came with the status.
        metadata: named values of the reason, e.g. ``{"job": "train-00"}``.
        faults: fields of the request that are wrong.
        quota: quotas that are too small.
    """

    code: str
    reason: ErrorReason = ErrorReason.UNSPECIFIED
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    quota: tuple[QuotaViolation, ...] = ()


class CallboardError(Exception):
    """A call failed. ``str()`` is one sentence.

    Attributes:
        error: all that is known, as data.
    """

    code: ClassVar[str] = "UNKNOWN"
    """gRPC status code this class stands for; without a reason of ours the first class below that has it."""
    reasons: ClassVar[tuple[ErrorReason, ...]] = ()
    """The reasons that it stands for. The first is used when none is given."""

    def __init__(
        self,
        message: str,
        *,
        reason: ErrorReason | None = None,
        metadata: Mapping[str, str] | None = None,
        faults: tuple[Fault, ...] = (),
        quota: tuple[QuotaViolation, ...] = (),
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        reason = reason or next(iter(self.reasons), ErrorReason.UNSPECIFIED)
        self.error = CallError(code or self.code, reason, message, dict(metadata or {}), faults, quota)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Fields of the request that are wrong; empty for most errors."""
        return self.error.faults


class InvalidRequest(CallboardError):
    """Fields of the request are wrong; ``faults`` names each."""

    code = "INVALID_ARGUMENT"
    reasons = (ErrorReason.INVALID_FIELD, ErrorReason.BAD_PAGE_TOKEN)

    @classmethod
    def of(cls, invalid: InvalidInput) -> InvalidRequest:
        """The refusal of an input with these faults."""
        count = len(invalid.faults)
        more = f" (and {count - 1} more)" if count > 1 else ""
        return cls(f"{invalid.faults[0]}{more}" if count else str(invalid), faults=invalid.faults)


def invalid(field: str, message: str) -> InvalidRequest:
    """The refusal of one field."""
    return InvalidRequest.of(InvalidInput([Fault(field, message)]))


class NotFound(CallboardError):
    """The named object does not exist."""

    code = "NOT_FOUND"
    reasons = (ErrorReason.NOT_FOUND,)


class AlreadyExists(CallboardError):
    """An object of that name exists with another content, or the name, rank or request id is taken."""

    code = "ALREADY_EXISTS"
    reasons = (ErrorReason.ALREADY_EXISTS, ErrorReason.NODE_TAKEN, ErrorReason.REQUEST_ID_REUSED)


class LimitReached(CallboardError):
    """A bound of the controller is reached: inbox, jobs or watchers."""

    code = "RESOURCE_EXHAUSTED"
    reasons = (ErrorReason.LIMIT_REACHED,)


class QuotaExceeded(CallboardError):
    """The pool's quota can never hold the request; ``error.quota`` says which and by how much."""

    code = "RESOURCE_EXHAUSTED"
    reasons = (ErrorReason.QUOTA_EXCEEDED,)


class WrongState(CallboardError):
    """The state of the object forbids the call."""

    code = "FAILED_PRECONDITION"
    reasons = (ErrorReason.WRONG_STATE,)


class PoolInUse(WrongState):
    """Jobs are in the pool."""

    reasons = (ErrorReason.POOL_IN_USE,)


class PreemptionRefused(WrongState):
    """May not preempt: the rules of the policy say no."""

    reasons = (ErrorReason.PREEMPTION_REFUSED,)


class VersionMismatch(WrongState):
    """The agent's version does not fit the controller's."""

    reasons = (ErrorReason.VERSION_MISMATCH,)


class Unschedulable(CallboardError):
    """No node could ever hold the request."""

    code = "FAILED_PRECONDITION"
    reasons = (ErrorReason.UNSCHEDULABLE,)


class EtagMismatch(CallboardError):
    """The object changed since it was read; read it again."""

    code = "ABORTED"
    reasons = (ErrorReason.ETAG_MISMATCH,)


class RevisionCompacted(CallboardError):
    """The revision asked for is no longer kept; list, then watch again."""

    code = "OUT_OF_RANGE"
    reasons = (ErrorReason.REVISION_COMPACTED,)


class InventoryChanged(CallboardError):
    """A placement was planned for nodes or devices that have changed since; plan again."""

    code = "ABORTED"
    reasons = (ErrorReason.INVENTORY_CHANGED,)


class Unavailable(CallboardError):
    """The controller can't be reached, is stopping, or can't write its journal. The only one worth a retry."""

    code = "UNAVAILABLE"
    reasons: ClassVar[tuple[ErrorReason, ...]] = (
        ErrorReason.UNSPECIFIED,
        ErrorReason.STORE_FAILED,
        ErrorReason.STOPPING,
    )


class NotLeader(Unavailable):
    """Another controller of the cluster decides; ``error.metadata["leader"]`` is its address. Nothing was done."""

    reasons = (ErrorReason.NOT_LEADER,)


class DeadlineExceeded(CallboardError):
    """No answer in time. Whether the call had an effect is unknown: repeat it with the same request id."""

    code = "DEADLINE_EXCEEDED"


class NotAllowed(CallboardError):
    """The caller's role does not include the call, or the caller is not known at all (:class:`NotAuthenticated`)."""

    code = "PERMISSION_DENIED"
    reasons = (ErrorReason.NOT_ALLOWED,)


class NotAuthenticated(NotAllowed):
    """The caller did not show a token or certificate, or not a valid one."""

    code = "UNAUTHENTICATED"
    reasons = (ErrorReason.NOT_AUTHENTICATED,)


class InternalError(CallboardError):
    """The call ended inside the controller; a bug."""

    code = "INTERNAL"
    reasons = (ErrorReason.INTERNAL,)


def _kinds(base: type[CallboardError]) -> Iterator[type[CallboardError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == __name__:  # others (the client's Unreachable) are nobody's answer
            yield kind
            yield from _kinds(kind)


KINDS = tuple(_kinds(CallboardError))
"""The refusals, a class before those that are more special."""

_BY_REASON: dict[ErrorReason, type[CallboardError]]
_BY_REASON = {reason: kind for kind in KINDS for reason in kind.reasons if reason is not ErrorReason.UNSPECIFIED}
_BY_CODE = {kind.code: kind for kind in reversed(KINDS)}


def exception_for(error: CallError) -> CallboardError:
    """The exception of ``error``: by its reason, else by its code, else a plain :class:`CallboardError`.

    A status without one of our reasons keeps UNSPECIFIED: gRPC itself says RESOURCE_EXHAUSTED for a message that is
    too large, and INTERNAL for a broken connection.
    """
    kind = _BY_REASON.get(error.reason) or _BY_CODE.get(error.code, CallboardError)
    return kind(
        error.message,
        reason=error.reason,
        metadata=error.metadata,
        faults=error.faults,
        quota=error.quota,
        code=error.code,
    )


def code_of(reason: ErrorReason) -> str:
    """Name of the gRPC status code that goes with ``reason``."""
    return _BY_REASON[reason].code if reason in _BY_REASON else CallboardError.code
