"""Errors on the wire: ``google.rpc.Status`` in the trailer ``grpc-status-details-bin``, written and read.

The controller raises a :class:`CallboardError` and answers with :func:`status_of`; the client raises
:func:`error_from_rpc` of what it caught. The exceptions alone, without gRPC: :mod:`callboard.wire.refusals`.

Done without grpcio-status, whose protobuf pin excludes trainers that hold protobuf 5 or 6 (CONTRIBUTING.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from callboard.model.faults import Fault
from callboard.model.frozen import dataclass
from callboard.wire.refusals import DOMAIN, CallboardError, CallError, ErrorReason, QuotaViolation, exception_for

DETAILS_KEY = "grpc-status-details-bin"
"""Trailer that carries the serialized ``google.rpc.Status``."""

MAX_MESSAGE_BYTES = 800
"""Longest message. A peer cuts off trailers above 8 KiB by default and the call then fails with another status; in
the worst case the message is sent percent-encoded (× 3) and the details in base64 (× 4/3): 2 400 + 5 100 < 8 192."""

MAX_DETAILS_BYTES = 3_800
"""Largest serialized ``google.rpc.Status``; see :data:`MAX_MESSAGE_BYTES`."""


_UNCONNECTED = (
    ("Connection refused", "nothing listens there (connection refused)"),
    ("HTTP status", "what listens there is another kind of server, which does not speak gRPC"),
    ("before receiving SETTINGS", "something listens there but does not answer: it may be stopped or overloaded"),
    ("Socket closed", "what listens there closed the connection: it asks for TLS, or is another kind of server"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is of no authority that is named here, or is over"),
    ("is not in peer certificate", "its certificate is for other addresses than this one"),
    ("No route to host", "there is no route to that host"),
    ("etwork is unreachable", "that network can't be reached from here"),
    ("Domain name not found", "its host name can't be resolved"),
    ("address lookup failed", "its host name can't be resolved"),
)
"""What gRPC says where no connection came about, and what that means."""


_LOCATED = re.compile(r"(?P<line>[0-9]{1,9}):(?P<column>[0-9]{1,9}): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StatusDetails:
    """Arguments of ``context.abort``: ``await context.abort(s.code, s.message, s.trailing_metadata)``."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


T = TypeVar("T")


class FailedCall(Protocol):
    """What ``grpc.aio.AioRpcError`` and the errors of synchronous stubs have in common."""

    def code(self) -> grpc.StatusCode | None:
        """Status code."""

    def details(self) -> str | None:
        """Message."""

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Trailers."""


def status_of(error: CallboardError) -> StatusDetails:
    """The status of an exception that a handler raised.

    Faults and quota violations beyond :data:`MAX_DETAILS_BYTES` are left out and counted in a last entry.
    """
    known = error.error
    status_code = grpc.StatusCode[known.code]
    message = _clip(known.message, MAX_MESSAGE_BYTES)
    number: int = status_code.value[0]
    status = status_pb2.Status(code=number, message=message)
    info = error_details_pb2.ErrorInfo(reason=known.reason.value, domain=DOMAIN)
    for key, value in list(known.metadata.items())[:16]:
        info.metadata[_clip(key, 64)] = _clip(value, 128)
    _pack(status, info)
    room = MAX_DETAILS_BYTES - status.ByteSize() - 200  # for two Any wrappers and the "more" entries
    bad_request, failure = error_details_pb2.BadRequest(), error_details_pb2.QuotaFailure()
    faults = [{"field": _clip(each.field, 256), "description": _clip(_located(each), 512)} for each in known.faults]
    quota = [{"subject": _clip(q.subject, 128), "description": _clip(q.description, 512)} for q in known.quota]
    for detail, into, entries in (
        (bad_request, bad_request.field_violations, faults),
        (failure, failure.violations, quota),
    ):
        for index, entry in enumerate(entries):
            room -= into.add(**entry).ByteSize() + 4
            if room < 0:
                del into[-1]
                into.add(description=f"and {len(entries) - index} more")
                break
        if into:
            _pack(status, detail)
    return StatusDetails(status_code, message, ((DETAILS_KEY, status.SerializeToString()),))


def _located(fault: Fault) -> str:
    """The message of a fault, behind its line and column if it has them."""
    return f"{fault.line}:{fault.column}: {fault.message}" if fault.line else fault.message


def _fault(entry: error_details_pb2.BadRequest.FieldViolation) -> Fault:
    """The inverse of :func:`_located`."""
    located = _LOCATED.fullmatch(entry.description)
    if located is None:
        return Fault(entry.field, entry.description)
    return Fault(entry.field, located["message"], int(located["line"]), int(located["column"]))


def parse_error(failed: FailedCall) -> CallError:
    """What a failed call says. A trailer that is missing, broken or of another domain leaves the reason UNSPECIFIED."""
    code = failed.code()
    name = code.name if code is not None else "UNKNOWN"
    message = failed.details() or ""
    status = _details_of(failed)
    if status is None:
        return CallError(name, message=message)
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    failure = error_details_pb2.QuotaFailure()
    for detail in status.details:
        for target in (info, bad_request, failure):
            _unpack(detail, target)
    ours = info.domain == DOMAIN
    known = ours and info.reason in ErrorReason.__members__
    return CallError(
        name,
        reason=ErrorReason[info.reason] if known else ErrorReason.UNSPECIFIED,
        message=message or status.message,
        metadata=dict(info.metadata) if ours else {},
        faults=tuple(_fault(entry) for entry in bad_request.field_violations),
        quota=tuple(QuotaViolation(entry.subject, entry.description) for entry in failure.violations),
    )


def is_answer(failed: FailedCall) -> bool:
    """Whether a controller sent the status, and not gRPC in its place: because nobody answered, or answered in time."""
    status = _details_of(failed)
    if status is None:
        return False
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        _unpack(detail, info)
    return info.domain == DOMAIN


def was_unconnected(details: str) -> bool:
    """Whether gRPC says that it made no connection, so that nothing of the call was sent."""
    return any(
        text in details for text in ("failed to connect to all addresses", "DNS resolution failed", "errors resolving")
    )


def why_lost(code: grpc.StatusCode, details: str | None) -> str:
    """Why there was no answer, from the status that gRPC made in its place."""
    details = details or ""
    if was_unconnected(details):
        return next((words for text, words in _UNCONNECTED if text in details), details)
    # UNAVAILABLE is the usual way to lose a connection; any other helps whoever looks into it.
    said = details or "the connection was lost"
    return said if code is grpc.StatusCode.UNAVAILABLE else f"{said} ({code.name})"


def error_from_rpc(failed: FailedCall) -> CallboardError:
    """The exception to raise for a failed call: ``raise error_from_rpc(failed) from failed``."""
    return exception_for(parse_error(failed))


def _details_of(failed: FailedCall) -> status_pb2.Status | None:
    for key, value in failed.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def _unpack(detail: AnyMessage, target: Message) -> None:
    if detail.TypeName() == target.DESCRIPTOR.full_name:
        try:
            detail.Unpack(target)
        except DecodeError:
            target.Clear()  # a peer's broken detail is worth no more than a missing one


def _clip(text: str, limit_bytes: int) -> str:
    """``text`` in at most ``limit_bytes`` of UTF-8, without lone surrogates, which no message can carry."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode("utf-8")
    return encoded[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
