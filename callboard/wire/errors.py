"""Errors of calls, in one place: the exceptions and how they travel.

The controller raises a :class:`CallboardError` and answers with :func:`status_of`; the client raises
:func:`error_from_rpc` of what it caught. The exceptions alone, without gRPC: :mod:`callboard.wire.refusals`.
"""

from __future__ import annotations

from callboard.wire.refusals import (
    DOMAIN,
    AlreadyExists,
    CallboardError,
    CallError,
    DeadlineExceeded,
    ErrorReason,
    EtagMismatch,
    InternalError,
    InvalidRequest,
    InventoryChanged,
    LimitReached,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    PoolInUse,
    PreemptionRefused,
    QuotaExceeded,
    QuotaViolation,
    RevisionCompacted,
    Unavailable,
    Unschedulable,
    VersionMismatch,
    WrongState,
    code_of,
    exception_for,
)
from callboard.wire.status import (
    DETAILS_KEY,
    StatusDetails,
    error_from_rpc,
    is_answer,
    parse_error,
    status_details,
    status_of,
)

__all__ = [
    "DETAILS_KEY",
    "DOMAIN",
    "AlreadyExists",
    "CallError",
    "CallboardError",
    "DeadlineExceeded",
    "ErrorReason",
    "EtagMismatch",
    "InternalError",
    "InvalidRequest",
    "InventoryChanged",
    "LimitReached",
    "NotAllowed",
    "NotAuthenticated",
    "NotFound",
    "PoolInUse",
    "PreemptionRefused",
    "QuotaExceeded",
    "QuotaViolation",
    "RevisionCompacted",
    "StatusDetails",
    "Unavailable",
    "Unschedulable",
    "VersionMismatch",
    "WrongState",
    "code_of",
    "error_from_rpc",
    "exception_for",
    "is_answer",
    "parse_error",
    "status_details",
    "status_of",
]
