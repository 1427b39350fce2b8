"""The page over HTTP: its files, logins, calls, and the two streams that a browser follows (the board, a job's output).

Every answer has a strict content policy, and every request names us by a name that is ours. Streams are written as fast
as the browser takes them; one that takes nothing for a while is dropped, and goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import codecs
import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from callboard.controller.page.board import Boards
from callboard.controller.page.calls import CALLABLE, FOLLOW, OUTPUT, CallRefused, Calls, PageContext
from callboard.controller.page.login import LASTS_S, Hosts, Logins, is_foreign
from callboard.model.frozen import dataclass
from callboard.security.access import bearer_of
from callboard.security.caller_roles import ROLES, Identity, caller
from callboard.v1 import common_pb2, job_pb2
from callboard.wire.refusals import CallboardError, NotAuthenticated, invalid

LARGEST_BODY = 64 << 10
STALLED_S = 30.0
"""How long a browser may take nothing of a stream."""

TICK_S = 5.0
"""Longest silence of the board's stream: a browser that hears nothing for longer says since when."""

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
"""Of every answer."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in between is to pass events on at once
]

STATUSES = {
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 409,
    "ABORTED": 409,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP's words for the statuses of calls; 500 for the others."""


SendBytes = Callable[[bytes], Awaitable[None]]
WriteAll = Callable[[Request, SendBytes, PageContext], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _File:
    kind: str
    tag: str
    plain: bytes
    packed: bytes


class Page:
    """One controller's page as an ASGI application."""

    def __init__(
        self,
        *,
        boards: Boards,
        calls: Calls,
        logins: Logins,
        hosts: Hosts,
        cookie: str,
        secure: bool,
        facts: Mapping[str, Any],
    ) -> None:
        """
        Args:
            hosts: names by which it may be called.
            cookie: name of the cookie, which says the port: browsers don't keep those of ports apart.
            secure: whether it is served by TLS.
            facts: what the page says about the controller itself.
        """
        self._boards = boards
        self._calls = calls
        self._logins = logins
        self._cookie = cookie
        self._secure = secure
        self._facts = dict(facts)
        self._files = _files()
        routes = [
            Route("/", self._file, methods=["GET"]),
            Route("/static/{name}", self._file, methods=["GET"]),
            Route("/api/me", self._me, methods=["GET"]),
            Route("/api/login", self._log_in, methods=["POST"]),
            Route("/api/logout", self._log_out, methods=["POST"]),
            Route("/api/link", self._link, methods=["POST"]),
            Route("/api/board", self._board, methods=["GET"]),
            Route("/api/stream", self._streaming(self._follow), methods=["GET"]),
            Route("/api/output", self._streaming(self._output), methods=["GET"]),
            Route("/api/call/{service}/{method}", self._call, methods=["POST"]),
        ]
        handlers: Any = {CallboardError: _refused, CallRefused: _refused}
        self.app: ASGIApp = _Doorkeeper(Starlette(routes=routes, exception_handlers=handlers), hosts)

    # ---- files ----

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params.get("name", "index.html"))
        if found is None:
            return _said(404, "NOT_FOUND", "there is no such file")
        headers = {"content-type": found.kind, "etag": found.tag, "cache-control": "no-cache"}
        headers["vary"] = "accept-encoding"
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request):
            return Response(found.packed, headers=headers | {"content-encoding": "gzip"})
        return Response(found.plain, headers=headers)

    # ---- who reads ----

    async def _me(self, request: Request) -> Response:
        try:
            who = self._logins.who(self._shown(request))
        except NotAuthenticated as error:
            return JSONResponse({"name": "", "why": str(error)} | self._facts)
        return JSONResponse(self._about(who))

    async def _log_in(self, request: Request) -> Response:
        body = await _body(request)
        code, token = str(body.get("code", "")), str(body.get("token", "")).strip()
        cookie, who = self._logins.redeem(code) if code else self._logins.log_in(token)
        response = JSONResponse(self._about(who))
        if cookie:
            response.set_cookie(
                self._cookie, cookie, max_age=LASTS_S, path="/", secure=self._secure, httponly=True, samesite="strict"
            )
        return response

    async def _log_out(self, _: Request) -> Response:
        response = JSONResponse({})
        response.delete_cookie(self._cookie, path="/", secure=self._secure, httponly=True, samesite="strict")
        return response

    async def _link(self, request: Request) -> Response:
        """A code for whoever shows a token, as `callboard page` does."""
        return JSONResponse({"code": self._logins.new_code(bearer_of(request.headers.get("authorization", "")))})

    def _about(self, who: Identity) -> dict[str, Any]:
        allowed = [
            method.rpartition("/")[2]
            for method in (*CALLABLE, OUTPUT)
            if who.role is None or who.role in ROLES.get(method, ())
        ]
        return {"name": who.name, "role": who.role or "", "trainer": who.in_pools_only, "may": allowed} | self._facts

    # ---- what there is, and what is done ----

    async def _board(self, request: Request) -> Response:
        answer: list[bytes] = []

        async def whole(_: Any, __: Any) -> None:
            answer.append(await self._boards.of(caller()).whole())

        await self._calls.run_as(FOLLOW, whole, self._context(request))
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        if _takes_gzip(request) and len(answer[0]) > 4096:
            packed = await asyncio.to_thread(gzip.compress, answer[0], 1)
            return Response(packed, headers=headers | {"content-encoding": "gzip"})
        return Response(answer[0], headers=headers)

    async def _call(self, request: Request) -> Response:
        method = f"/callboard.v1.{request.path_params['service']}/{request.path_params['method']}"
        if method not in CALLABLE:
            return _said(404, "NOT_FOUND", f"the page does not call {method}")
        return JSONResponse(await self._calls.call(method, await _body(request), self._context(request)))

    async def _follow(self, request: Request, send: SendBytes, context: PageContext) -> None:
        board_id, _, seq = (request.headers.get("last-event-id") or request.query_params.get("from", "")).partition("-")

        async def follow(_: Any, __: Any) -> None:
            board = self._boards.of(caller())
            with self._boards.reading(board):
                await send(b"retry: 1000\n\n")
                async for message in board.follow(board_id, int(seq) if seq.isdecimal() else -1, tick_s=TICK_S):
                    await send(message)

        await self._calls.run_as(FOLLOW, follow, context)

    async def _output(self, request: Request, send: SendBytes, context: PageContext) -> None:
        asked = request.query_params
        selection = common_pb2.OutputSelection(
            component=asked.get("component", ""),
            rank=_number(asked, "rank"),
            tail_lines=_number(asked, "tail"),
            first_attempt=_number(asked, "attempt") or 0,
            last_attempt=_number(asked, "attempt") or 0,
        )
        wanted = job_pb2.ReadJobOutputRequest(name=f"jobs/{asked.get('job', '')}", selection=selection, follow=True)
        context.sends = _OutputWriter(send).write
        await self._calls.read_output(wanted, context)
        await send(b"event: end\ndata: {}\n\n")

    def _shown(self, request: Request) -> str:
        return request.cookies.get(self._cookie, "")

    def _context(self, request: Request) -> PageContext:
        """What the guard is told about a request, with the browser's address as gRPC writes it."""
        client, metadata = request.client, self._logins.metadata(self._shown(request))
        if client is None:
            return PageContext(metadata, "unknown")
        six = ":" in client.host
        return PageContext(
            metadata, f"ipv6:[{client.host}]:{client.port}" if six else f"ipv4:{client.host}:{client.port}"
        )

    def _streaming(self, write_all: WriteAll) -> ASGIApp:
        """An event stream: what ``write_all`` writes, until it ends or the browser goes away."""

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            context = self._context(request)
            begun = False

            async def out(data: bytes) -> None:
                nonlocal begun
                async with asyncio.timeout(STALLED_S):
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    await send({"type": "http.response.body", "body": data, "more_body": True})

            async def left() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass

            writing, leaving = asyncio.ensure_future(write_all(request, out, context)), asyncio.ensure_future(left())
            try:
                await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                context.gone = leaving.done()
                writing.cancel()
                leaving.cancel()
                await asyncio.wait({writing, leaving})
            if writing.cancelled() or context.gone:
                return
            error = writing.exception()
            if isinstance(error, TimeoutError):
                return  # it takes nothing: the connection is closed, and the browser goes on where it stopped
            if isinstance(error, CallboardError | CallRefused):
                refusal = await _refused(request, error)
                if not begun:
                    await refusal(scope, receive, send)
                    return
                await out(b"event: refused\ndata: %b\n\n" % bytes(refusal.body))
            elif error is not None:
                raise error
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        return _App(stream)


class _App:
    """A function as an ASGI application: Starlette would take the function for one that answers a request."""

    def __init__(self, run: ASGIApp) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


class _Doorkeeper:
    """Sees every request first, and every answer last."""

    def __init__(self, inner: ASGIApp, hosts: Hosts) -> None:
        self._inner = inner
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        refused = self._why_not(request)
        await (refused or self._inner)(scope, receive, with_headers)

    def _why_not(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._hosts.knows(host):
            why = f"this page is not called {host[:200]!r}; start the controller with --page-name NAME if it should be"
            return _said(421, "FAILED_PRECONDITION", why)
        changes = request.method not in ("GET", "HEAD")
        if request.url.path.startswith("/api/") and (why := is_foreign(request.headers, changes=changes)):
            return _said(403, "PERMISSION_DENIED", f"{why}; only the page itself may ask for this")
        return None


class _OutputWriter:
    """Writes what workers print as events, text by text: bytes of one character may come in two pieces."""

    def __init__(self, send: SendBytes) -> None:
        self._send = send
        self._decoders: dict[tuple[str, int, int, int], codecs.IncrementalDecoder] = {}

    async def write(self, response: job_pb2.ReadJobOutputResponse) -> None:
        """One message of ReadJobOutput."""
        what = response.WhichOneof("content")
        if what == "caught_up":
            await self._send(b"event: caught_up\ndata: {}\n\n")
        elif what == "gap":
            await self._say("gap", {"worker": response.gap.component, "why": response.gap.message})
        elif what == "chunk":
            chunk = response.chunk
            stream = (chunk.component, chunk.rank, chunk.generation, chunk.stream)
            if stream not in self._decoders:
                self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
            said: dict[str, Any] = {
                "worker": f"{chunk.component}/{chunk.rank}",
                "attempt": chunk.attempt,
                "text": self._decoders[stream].decode(chunk.data),
            }
            if chunk.stream == common_pb2.OUTPUT_STREAM_STDERR:
                said["error"] = True
            if chunk.discarded_bytes:
                said["discarded"] = chunk.discarded_bytes
            await self._say("message", said)

    async def _say(self, kind: str, plain: dict[str, Any]) -> None:
        await self._send(f"event: {kind}\ndata: {json.dumps(plain)}\n\n".encode())


def _files() -> dict[str, _File]:
    """The page's files by name, with type and tag, plain and packed."""
    found = {}
    for entry in resources.files("callboard.controller.page").joinpath("static").iterdir():
        kind = TYPES.get(f".{entry.name.rpartition('.')[2]}")
        if kind is not None:
            plain = entry.read_bytes()
            tag = f'"{hashlib.sha256(plain).hexdigest()[:20]}"'
            found[entry.name] = _File(f"{kind}; charset=utf-8", tag, plain, gzip.compress(plain, 9, mtime=0))
    return found


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
        InvalidRequest: it is none, or is too large.
    """
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_BODY:
            raise invalid("body", f"has more than {LARGEST_BODY} bytes")
    try:
        plain = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid("body", "is not JSON") from error
    if not isinstance(plain, dict):
        raise invalid("body", "is not a JSON object")
    return plain


def _number(asked: Mapping[str, str], name: str) -> int | None:
    text = asked.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid(name, f"{text[:40]!r} is not a number")
    return int(text)


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, CallRefused):
        code = error.code.name
    else:
        assert isinstance(error, CallboardError)
        code = error.error.code
    return _said(STATUSES.get(code, 500), code, str(error))


def _said(status: int, code: str, why: str) -> Response:
    return JSONResponse({"code": code, "why": why}, status_code=status)
