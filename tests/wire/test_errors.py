"""How does an error travel? From an exception of the controller to one of the client."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import empty_pb2

from callboard.model.faults import Fault, InvalidInput
from callboard.scheduler.records.refusals import RefusalCode
from callboard.v1 import errors_pb2
from callboard.wire.errors import DETAILS_KEY, error_from_rpc, parse_error, status_of, why_lost
from callboard.wire.refusals import (
    KINDS,
    CallboardError,
    CallError,
    DeadlineExceeded,
    ErrorReason,
    InvalidRequest,
    LimitReached,
    NotFound,
    QuotaExceeded,
    QuotaViolation,
    RevisionCompacted,
    Unavailable,
    Unschedulable,
    WrongState,
    code_of,
    exception_for,
)


class Failed:
    """A failed call, as a stub reports it."""

    def __init__(self, code: grpc.StatusCode | None, details: str | None, trailers: Any = ()) -> None:
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def travelled(error: CallboardError) -> CallboardError:
    status = status_of(error)
    return error_from_rpc(Failed(status.code, status.message, status.trailing_metadata))


class TestReasons:
    def test_are_those_of_the_api(self) -> None:
        names = {name.removeprefix("ERROR_REASON_") for name, _ in errors_pb2.ErrorReason.items()}
        assert names == set(ErrorReason)

    @pytest.mark.parametrize("reason", [reason for reason in ErrorReason if reason != "UNSPECIFIED"])
    def test_each_has_an_exception_and_the_code_that_the_api_documents(self, reason: ErrorReason) -> None:
        error = exception_for(CallError(code_of(reason), reason))
        assert type(error) is not CallboardError
        assert code_of(reason) in grpc.StatusCode.__members__
        back = travelled(error)
        assert type(back) is type(error)
        assert back.error == error.error

    def test_only_unavailable_is_worth_a_retry(self) -> None:
        retryable = {reason for reason in ErrorReason if code_of(reason) == "UNAVAILABLE"}
        assert retryable == {ErrorReason.STORE_FAILED, ErrorReason.STOPPING, ErrorReason.NOT_LEADER}


class TestTheTableOfRefusals:
    """``UPDATE_DOCS=1`` writes it anew."""

    PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

    @staticmethod
    def row(kind: type[CallboardError]) -> str:
        reasons = ", ".join(f"`{reason}`" for reason in kind.reasons if reason != "UNSPECIFIED")
        meaning = re.sub(r"``([^`]+)``|:class:`([^`]+)`", r"`\1\2`", " ".join((kind.__doc__ or "").split()))
        return f"| {reasons} | `{kind.__name__}` | `{kind.code}` | {meaning.rstrip('.')} |"

    def test_is_what_the_classes_declare(self) -> None:
        rows = [self.row(kind) for kind in KINDS]
        table = "\n".join(["| reason | exception | status | meaning |", "|---|---|---|---|", *rows])
        page = self.PAGE.read_text()
        head, rest = page.split("<!-- refusals: written by tests/wire/test_errors.py -->\n")
        written, tail = rest.split("<!-- end -->", 1)
        if os.environ.get("UPDATE_DOCS"):
            self.PAGE.write_text(page.replace(f"{rest}", f"{table}\n<!-- end -->{tail}"))
            return
        assert head
        assert written == f"{table}\n", "run with UPDATE_DOCS=1"

    def test_every_reason_of_the_scheduler_is_one_of_the_api(self) -> None:
        assert {code.value for code in RefusalCode} <= {reason.value for kind in KINDS for reason in kind.reasons}


class TestTravel:
    def test_faults_keep_their_fields(self) -> None:
        faults = (Fault("spec.name", "'%s' is not a name"), Fault("spec.components[0].workers", "0 is out of bounds"))
        error = InvalidRequest.of(InvalidInput(faults))
        assert str(error) == "spec.name: '%s' is not a name (and 1 more)"
        back = travelled(error)
        assert isinstance(back, InvalidRequest)
        assert back.faults == faults

    def test_quotas_and_metadata_too(self) -> None:
        quota = (QuotaViolation("pools/rlhf", "cpu: asks 8, at most 6"),)
        back = travelled(QuotaExceeded("too much", quota=quota, metadata={"pool": "rlhf"}))
        assert isinstance(back, QuotaExceeded)
        assert (back.error.quota, back.error.metadata) == (quota, {"pool": "rlhf"})

    def test_a_reason_of_its_own_and_its_family(self) -> None:
        back = travelled(exception_for(CallError("FAILED_PRECONDITION", ErrorReason.POOL_IN_USE, "busy")))
        assert isinstance(back, WrongState)
        assert back.error.reason is ErrorReason.POOL_IN_USE

    @pytest.mark.parametrize("message", ["x" * 10_000, "é" * 10_000, "\ud800", ""])
    def test_trailers_stay_below_what_peers_cut_off(self, message: str) -> None:
        faults = tuple(Fault(f"spec.components[{i}].name", message) for i in range(500))
        quota = tuple(QuotaViolation(f"pools/p{i}", message) for i in range(500))
        metadata = {f"k{i}": message for i in range(100)}
        status = status_of(InvalidRequest(message, faults=faults, quota=quota, metadata=metadata))
        size_bytes = len(status.trailing_metadata[0][1]) * 4 // 3 + 3 * len(status.message.encode())
        assert size_bytes < 8_000
        read = parse_error(Failed(status.code, status.message, status.trailing_metadata))
        assert read.reason is ErrorReason.INVALID_FIELD
        assert read.faults[0].field in ("spec.components[0].name", "")
        if len(read.faults) < 500:
            assert read.faults[-1].message == f"and {500 - len(read.faults) + 1} more"


class TestReading:
    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            ("UNAVAILABLE", Unavailable),
            ("DEADLINE_EXCEEDED", DeadlineExceeded),
            ("RESOURCE_EXHAUSTED", LimitReached),
            ("FAILED_PRECONDITION", WrongState),
            ("NOT_FOUND", NotFound),
            ("OUT_OF_RANGE", RevisionCompacted),
            ("UNIMPLEMENTED", CallboardError),
            ("CANCELLED", CallboardError),
        ],
    )
    def test_a_status_that_is_not_ours_goes_by_its_code(self, code: str, kind: type[CallboardError]) -> None:
        error = error_from_rpc(Failed(grpc.StatusCode[code], "words", None))
        assert type(error) is kind
        assert error.error == CallError(code, ErrorReason.UNSPECIFIED, "words")

    @pytest.mark.parametrize("trailer", [b"\xff\xff", b"", "text", b"\x1a\x05\x0a\x03abc"])
    def test_a_broken_trailer_is_no_trailer(self, trailer: Any) -> None:
        error = error_from_rpc(Failed(grpc.StatusCode.NOT_FOUND, "gone", ((DETAILS_KEY, trailer),)))
        assert type(error) is NotFound
        assert error.error.reason is ErrorReason.UNSPECIFIED

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            ("Socket closed", "closed the connection: it asks for TLS"),
            ("Tls handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER: Invalid", "does not speak TLS"),
            ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "is of no authority"),
            ("Peer name a.example is not in peer certificate", "is for other addresses"),
        ],
    )
    def test_tls_on_one_side_only_or_of_another_authority_is_told_in_words(self, said: str, words: str) -> None:
        details = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7700: {said}"
        told = why_lost(grpc.StatusCode.UNAVAILABLE, details)
        assert words in told
        assert "ipv4" not in told

    def test_nothing_at_all(self) -> None:
        assert parse_error(Failed(None, None)) == CallError("UNKNOWN")


class TestOverARealConnection:
    @pytest.fixture
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        async def refuse(request: empty_pb2.Empty, context: grpc.aio.ServicerContext[Any, Any]) -> empty_pb2.Empty:
            faults = tuple(Fault(f"spec.f{i}", "é" * 200) for i in range(300))
            status = status_of(Unschedulable("é" * 5000, metadata={"job": "j"}, faults=faults))
            await context.abort(status.code, status.message, status.trailing_metadata)

        handler = grpc.unary_unary_rpc_method_handler(
            refuse,
            request_deserializer=empty_pb2.Empty.FromString,
            response_serializer=empty_pb2.Empty.SerializeToString,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.T", {"Refuse": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        await server.stop(None)

    async def test_the_largest_error_arrives_whole(self, channel: grpc.aio.Channel) -> None:
        call = channel.unary_unary(
            "/t.T/Refuse",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=empty_pb2.Empty.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(empty_pb2.Empty(), timeout=10)
        error = error_from_rpc(caught.value)
        assert isinstance(error, Unschedulable)
        assert error.error.metadata == {"job": "j"}
        assert error.faults[0].field == "spec.f0"
