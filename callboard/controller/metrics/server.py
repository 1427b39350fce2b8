"""The metrics port: ``http://127.0.0.1:8080/metrics``, served from a thread that asks the driver's loop.

prometheus-client writes the format and serves it. Only GET, and nothing here changes anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as LateError
from inspect import isawaitable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from callboard.model.log import structlog
from callboard.security.access import bearer_of
from callboard.security.tls import ServerTls

READ_S = 5.0
"""How long a scrape waits for the loop; a stuck controller is told by a failed scrape."""

log = structlog.get_logger(__name__)

Build = Callable[[], Any]
"""Makes something, or what is awaited for it."""


class LoopCollector(Collector):
    """Metrics that are asked of the loop whenever they are asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, build: Build) -> None:
        self._loop = loop
        self._build = build

    def collect(self) -> Iterator[Metric]:
        yield from on_loop(self._loop, self._build)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known once there is something to show."""
        return iter(())


def on_loop(loop: asyncio.AbstractEventLoop, build: Build) -> Any:
    """What ``build`` returns on the loop, for another thread.

    Raises:
        TimeoutError: the loop didn't answer within :data:`READ_S`.
    """

    async def built() -> Any:
        found = build()
        return await found if isawaitable(found) else found

    asked = asyncio.run_coroutine_threadsafe(built(), loop)
    try:
        return asked.result(READ_S)
    except LateError:
        asked.cancel()
        raise TimeoutError("the controller is busy; ask again later") from None


class MetricsServer:
    """Serves ``/metrics`` and further pages of JSON."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        loop: asyncio.AbstractEventLoop,
        pages: Mapping[str, Build],
        *,
        admits: Callable[[str], bool] | None,
        tls: ServerTls | None = None,
    ) -> None:
        """Listens from now on.

        Args:
            host: address to listen on.
            port: port; 0: a free one.
            registry: what ``/metrics`` shows.
            loop: where the state may be read.
            pages: path → what makes its JSON, called on the loop.
            tls: what to listen with; None: plain HTTP.
            admits: whether a bearer token may read; None: everybody may. Figures carry names of jobs.

        Raises:
            OSError: the address can't be listened on.
        """
        self._metrics = make_wsgi_app(registry)
        self._loop = loop
        self._pages = pages
        self._admits = admits
        # It answers from now on: with nothing, until it asks for the token.
        files: dict[str, Any] = (
            {"certfile": str(tls.files.cert), "keyfile": str(tls.files.key)} if tls is not None else {}
        )
        self._server, self._thread = start_http_server(port, host, CollectorRegistry(), **files)
        if tls is not None:
            socket: Any = self._server.socket
            tls.keep_renewed(socket.context)
        self._server.RequestHandlerClass = _Patient
        self._server.set_app(self._answer)
        self.port = self._server.server_port

    def close(self) -> None:
        """Stops listening. Not to be called on the loop, which a scrape may be waiting for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _plain(start_response, "405 Method Not Allowed", "only GET is allowed\n")
        if self._admits is not None and not self._admits(bearer_of(environ.get("HTTP_AUTHORIZATION", ""))):
            return _plain(
                start_response,
                "401 Unauthorized",
                "the figures are for callers with the controller's token (Authorization: Bearer TOKEN); "
                "start the controller with --metrics-open to show them to everybody\n",
                ("WWW-Authenticate", "Bearer"),
            )
        try:
            if path == "/metrics":
                answer: Iterable[bytes] = self._metrics(environ, start_response)
                return answer
            if path in self._pages:
                body = json.dumps(on_loop(self._loop, self._pages[path])).encode()
                start_response("200 OK", [("Content-Type", "application/json")])
                return [body]
        except TimeoutError as late:
            return _plain(start_response, "503 Service Unavailable", f"{late}\n")
        listed = ", ".join(["/metrics", *self._pages])
        return _plain(start_response, "404 Not Found", f"there are {listed}\n")


class _Patient(WSGIRequestHandler):
    """A handler that leaves requests out of the log and gives up on peers that say nothing: each holds a thread."""

    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Scrapes are not worth a line each."""
        log.debug("scraped", request=format % args)


def _plain(start_response: Callable[..., Any], status: str, text: str, *more: tuple[str, str]) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *more])
    return [text.encode()]
