"""The guard around every call: it ends with an answer or a status, in time, and is counted until its last line has run.

grpc.aio has five habits that this interceptor makes good for all services at once:

- A handler whose inner task was cancelled raises ``CancelledError`` and its caller never hears of it (GC-04): here it
  becomes a status.
- ``server.stop()`` returns before the handlers' ``finally`` blocks have run (GC-01): here each handler is counted, and
  :meth:`Guard.idle` waits for the last.
- A handler runs as long as it likes: here unary calls have a bound.
- Bytes that are no message of the method end as UNKNOWN with a traceback: here they are refused as any wrong input.
- A status can't be sent while a write is under way, and a cancelled write still is: the caller then waits for ever.
  Here each write of a stream is let end before its status follows.

It also asks who is calling, before it decodes anything that the caller sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from callboard.model.faults import Fault, InvalidInput
from callboard.model.log import structlog
from callboard.scheduler.records.refusals import Refusal, RefusalCode
from callboard.security.access import Credentials, credentials_in
from callboard.security.caller_roles import Identity, caller
from callboard.security.gate import Gate, changes
from callboard.wire.errors import status_of
from callboard.wire.refusals import (
    CallboardError,
    CallError,
    DeadlineExceeded,
    ErrorReason,
    InternalError,
    InvalidRequest,
    LimitReached,
    NotAuthenticated,
    QuotaViolation,
    Unavailable,
    code_of,
    exception_for,
)

Context = grpc.aio.ServicerContext[Any, Any]
Decode = Callable[[bytes], Any]
_Shown = tuple[Identity, Credentials, bytes]
"""Who opened a stream, by what metadata and what certificate; thousands of agents may show the same."""

STANDBY_KEY = "callboard-standby"
"""Trailer of what a standby answers: as of which revision, how old, and who leads."""

LOG_UNDECODABLE_S = 60.0
"""Shortest time between two lines about messages that can't be decoded: their sender may try again for ever."""

REFUSALS_LOGGED = 20
"""Lines about refusals of one method for one reason, in each span of :data:`LOG_UNDECODABLE_S`."""

log = structlog.get_logger(__name__)


class _NoMessage(InvalidRequest):
    """A message can't be decoded."""


class _Messages:
    """The messages of a stream, each read by a function that may raise in its place. No generator: that would have to
    be closed."""

    def __init__(self, messages: AsyncIterator[Any], read: Callable[[Any], Any], note: Callable[[str], None]) -> None:
        self._messages = messages
        self._read = read
        self.note = note
        self.name = ""
        """What the call is about, once that is known."""
        self.written = False
        """Whether it is in the audit log already that the call was let in."""

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        return self._read(await anext(self._messages))


def concerns(messages: AsyncIterator[Any], subject: str) -> None:
    """Says what a call with a stream of messages is about, for the audit log."""
    if isinstance(messages, _Messages):
        messages.name = subject


def begun(messages: AsyncIterator[Any]) -> None:
    """Writes down that a call was let in: now and not at its end, which may be days away."""
    if isinstance(messages, _Messages):
        messages.note(messages.name)
        messages.written = True


class _Writes:
    """The context of a stream. A write goes on when its caller is cancelled, because gRPC can't take it back, and
    :meth:`settled` waits for it: until its peer reads or is gone."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._writing: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        self._writing = asyncio.ensure_future(self._context.write(message))
        self._writing.add_done_callback(_note_end)
        await asyncio.shield(self._writing)

    async def settled(self) -> None:
        """Waits until a status can be sent."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})


class _RefusalLog:
    """Writes refusals to the log, and only so many of a kind: whoever is refused may try again at once and for ever."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], tuple[float, int]] = {}
        """Method and reason → when the span began, and how many refusals it has. The words are ours, so few."""

    def note(self, error: CallboardError, method: str, peer: str) -> None:
        """Notes one refusal."""
        known = error.error
        quiet = known.reason is ErrorReason.STOPPING or isinstance(error, _NoMessage) or not changes(method)
        more: dict[str, int] = {}
        if not quiet:
            now_s, kind = time.monotonic(), (method, known.reason.value)
            began_s, count = self._spans.get(kind, (now_s, 0))
            if now_s - began_s >= LOG_UNDECODABLE_S:
                more = {"left_out_before": count - REFUSALS_LOGGED} if count > REFUSALS_LOGGED else {}
                began_s, count = now_s, 0
            self._spans[kind] = (began_s, count + 1)
            quiet = count >= REFUSALS_LOGGED
        note = log.debug if quiet else log.info
        note("call", method=method, peer=peer, code=known.code, reason=known.reason.value, why=str(error), **more)


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    def __init__(
        self,
        *,
        gate: Gate,
        call_timeout_s: float,
        called: Callable[[str, str, float], None] = lambda _method, _code, _seconds: None,
        standby: Callable[[], str] = str,
        certified: bool = False,
    ) -> None:
        """
        Args:
            certified: whether callers may show certificates.
            standby: what answers of a standby are marked with; empty: they are not those of one.
            call_timeout_s: bound of a unary call in seconds, whatever deadline the caller set.
            called: is told the method, the status and the seconds of each unary call.
        """
        self._gate = gate
        self._call_timeout_s = call_timeout_s
        self._called = called
        self._standby = standby
        self._certified = certified
        self._running: set[asyncio.Task[Any]] = set()
        self._streams: dict[_Shown, set[asyncio.Task[Any]]] = {}
        """The open streams, by who opened them and what they showed."""
        self._ending: dict[asyncio.Task[Any], CallboardError] = {}
        self._refusals = _RefusalLog()
        self._undecodable = 0
        self._logged_undecodable_s = -LOG_UNDECODABLE_S

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call, guarded; None for an unknown method, as gRPC asks."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = str(handler_call_details.method)
        serializers = {
            "request_deserializer": None,  # the message comes as bytes, and is decoded once its sender is known
            "response_serializer": handler.response_serializer,
        }
        decode = handler.request_deserializer or (lambda message: message)
        if (unary := handler.unary_unary) is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(unary, method, decode), **serializers)
        if (streamed := handler.unary_stream) is not None:
            return grpc.unary_stream_rpc_method_handler(self._stream(streamed, method, decode), **serializers)
        if (streams := handler.stream_stream) is not None:
            return grpc.stream_stream_rpc_method_handler(self._stream(streams, method, decode), **serializers)
        return handler

    def review(self) -> None:
        """Ends the streams of those who may not call any more. To be called now and then."""
        for (who, metadata, certificate), tasks in list(self._streams.items()):
            try:
                self._gate.check_still(who, metadata, certificate)
            except NotAuthenticated as error:
                for task in tasks:
                    self._ending[task] = error
                    task.cancel()

    async def idle(self, within_s: float) -> bool:
        """Waits until no handler runs; False if some still do after ``within_s`` seconds."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)
        return not self._running

    def _unary(self, behaviour: Any, method: str, decode: Decode) -> Any:
        name = method.rpartition("/")[2]

        async def bounded(request: Any, context: Context) -> Any:
            async with asyncio.timeout(self._call_timeout_s) as bound:
                try:
                    return await behaviour(request, context)
                except asyncio.CancelledError:
                    if bound.expired():
                        raise DeadlineExceeded(f"{method} took longer than {self._call_timeout_s:.0f} s") from None
                    raise

        async def guarded(request: Any, context: Context, _certificate: bytes) -> Any:
            began, code = time.perf_counter(), "INTERNAL"
            try:
                answer = await bounded(request, context)
                code = "OK"
                if mark := self._standby():
                    context.set_trailing_metadata(((STANDBY_KEY, mark),))
            except asyncio.CancelledError:
                code = "CANCELLED"
                raise
            except (CallboardError, Refusal, InvalidInput) as error:
                code = (error if isinstance(error, CallboardError) else error_of(error)).error.code
                raise
            finally:
                self._called(name, code, time.perf_counter() - began)
            return answer

        return self._counted(guarded, method, decode, stream=False)

    def _stream(self, behaviour: Any, method: str, decode: Decode) -> Any:
        async def guarded(request: Any, context: Context, certificate: bytes) -> None:
            writes = _Writes(context)
            result = behaviour(request, writes)
            task = asyncio.current_task()
            assert task is not None
            shown = (caller(), credentials_in(context.invocation_metadata() or ()), certificate)
            self._streams.setdefault(shown, set()).add(task)
            try:
                if isinstance(result, AsyncIterator):
                    async for response in result:
                        await writes.write(response)
                else:
                    await result
            finally:
                self._streams[shown].discard(task)
                if not self._streams[shown]:
                    del self._streams[shown]
                await writes.settled()

        return self._counted(guarded, method, decode, stream=True)

    def _counted(
        self, behaviour: Callable[[Any, Context, bytes], Awaitable[Any]], method: str, decode: Decode, *, stream: bool
    ) -> Any:
        name = method.rpartition("/")[2]

        async def counted(request: Any, context: Context) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            who: Identity | None = None
            message: Any = None

            async def refuse(error: CallboardError) -> None:
                await self._refuse(error, who, method, _subject(message), context)

            try:
                certificate = _certificate(context) if self._certified else b""
                who = self._gate.identify(method, context.invocation_metadata(), certificate)
                message = self._readable(request, context, method, decode, who)
                with self._gate.passing(who, method, stream=stream):
                    answer = await behaviour(message, context, certificate)
            except asyncio.CancelledError:
                if (ended := self._why_cut_off(task)) is None:
                    raise
                await refuse(ended)
            except (CallboardError, Refusal, InvalidInput) as error:
                await refuse(error if isinstance(error, CallboardError) else error_of(error))
            except grpc.aio.AbortError:
                raise
            except Exception:
                if context.cancelled() or context.done():
                    return None  # it wrote to a stream that is gone
                log.exception("a defect: a handler failed", method=name)
                await refuse(InternalError(f"{name} met a defect in the controller; see its log"))
            else:
                if not getattr(message, "written", False) and not getattr(message, "validate_only", False):
                    self._gate.write_down(who, method, _subject(message), context.peer(), code="OK")
                if changes(name):
                    peer = context.peer()
                    log.info("call", method=name, subject=_subject(message), who=who.name, peer=peer, code="OK")
                return answer
            finally:
                self._running.discard(task)
                self._ending.pop(task, None)

        return counted

    async def _refuse(
        self, error: CallboardError, who: Identity | None, method: str, subject: str, context: Context
    ) -> None:
        """Ends a call with an error; one that cost its caller nothing and comes again and again, after a while."""
        self._gate.write_down(who, method, subject, context.peer(), code=error.error.code, why=str(error))
        self._refusals.note(error, method.rpartition("/")[2], context.peer())
        cheap = isinstance(error, InvalidRequest | NotAuthenticated | LimitReached)
        if cheap and (wait_s := self._gate.patience_s(who, context.peer())) > 0:
            await asyncio.sleep(wait_s)
        status = status_of(error)
        await context.abort(status.code, status.message, status.trailing_metadata)

    def _why_cut_off(self, task: asyncio.Task[Any]) -> CallboardError | None:
        """What to tell the caller of a call that was cancelled; None: it was the caller, who waits for no status."""
        if (error := self._ending.get(task)) is not None and task.cancelling() == 1:
            task.uncancel()
            return error
        return None if task.cancelling() else Unavailable("the call was cut off inside the controller; try again")

    def _readable(self, request: Any, context: Context, method: str, decode: Decode, who: Identity) -> Any:
        """The request; for a stream its messages."""

        def read(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError as error:
                why = " ".join(str(error).split())[:200]
            self._note_undecodable(method, context.peer(), why)
            raise _NoMessage(
                f"a message to {method} can't be decoded ({why}); its sender speaks another protocol or version. "
                "Install the same version of callboard on both machines, or call the port with a client of callboard"
            )

        def note(subject: str) -> None:
            self._gate.write_down(who, method, subject, context.peer(), code="OK")

        return _Messages(request, read, note) if isinstance(request, AsyncIterator) else read(request)

    def _note_undecodable(self, method: str, peer: str, why: str) -> None:
        self._undecodable += 1
        now_s = time.monotonic()
        if now_s - self._logged_undecodable_s >= LOG_UNDECODABLE_S:
            log.warning(
                "messages can't be decoded", newest=method, peer=peer, why=why, since_last_line=self._undecodable
            )
            self._logged_undecodable_s, self._undecodable = now_s, 0


def _note_end(writing: asyncio.Future[None]) -> None:
    """Its error may have nobody left to hear of it: whoever wrote was cancelled, and the peer is gone."""
    if not writing.cancelled():
        writing.exception()


def _certificate(context: Context) -> bytes:
    """The certificate that the caller showed, in PEM; empty: none."""
    shown = context.auth_context().get("x509_pem_cert")
    return next(iter(shown), b"") if shown else b""


def _subject(request: Any) -> str:
    """What a request is about, for the audit: its resource name, or the name of what it makes."""
    spec = getattr(request, "spec", None)
    stated = (getattr(request, field, "") for field in ("name", "pool_id", "node_id"))
    return next((str(text) for text in stated if text), str(getattr(spec, "name", "")))


MAX_REASONS = 8
"""Reasons that travel with an error; the whole account is what ExplainJob and validate_only are for."""


def error_of(error: Refusal | InvalidInput) -> CallboardError:
    """The error that says what ``error`` says."""
    if isinstance(error, InvalidInput):
        return InvalidRequest.of(error)
    reason = ErrorReason(error.code.value)
    metadata = {"subject": error.subject}
    for place, why in enumerate(error.reasons[:MAX_REASONS]):
        metadata[f"reason.{place}"] = f"{why.code} {why.message}"
    for place, change in enumerate(error.unblock[:MAX_REASONS]):
        metadata[f"unblock.{place}"] = change
    quota: tuple[QuotaViolation, ...] = ()
    if error.code is RefusalCode.QUOTA_EXCEEDED:
        short = [QuotaViolation(why.subject, why.message) for why in error.reasons if why.code == "QUOTA_SHORT"]
        quota = tuple(short) or (QuotaViolation(error.subject, error.message),)
    return exception_for(
        CallError(
            code_of(reason),
            reason,
            error.message,
            metadata,
            faults=(Fault(error.field, error.message),) if error.field else (),
            quota=quota,
        )
    )
