"""The server of the page: listens beside gRPC, on the same event loop. Needs the extra ``callboard[page]``."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn

from callboard._version import __version__
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog
from callboard.controller.options import ControllerOptions, split_address
from callboard.controller.page import PageUnavailable
from callboard.controller.page.app import Page
from callboard.controller.page.board import Boards
from callboard.controller.page.calls import Calls
from callboard.controller.page.login import Hosts, Logins
from callboard.security.access import Access
from callboard.security.tls import ServerTls
from callboard.wire.refusals import CallboardError

log = structlog.get_logger(__name__)

STOP_S = 2
"""How long answers may take to be sent when the controller stops."""

SILENT_MS = 30_000
"""How long a browser may leave unacknowledged what it was sent before the kernel drops the connection."""

MOST_CONNECTIONS = 1_000
LONGEST_HEADERS = 32 << 10


class PageServer:
    """Serves the page, from :meth:`start` to :meth:`stop`.

    Attributes:
        address: what to open: ``http://127.0.0.1:8780``.
    """

    def __init__(
        self, driver: Driver, events: EventLog, calls: Calls, access: Access, options: ControllerOptions
    ) -> None:
        """
        Args:
            access: knows who has which token; open already.
        """
        self._driver = driver
        self._calls = calls
        self._access = access
        self._options = options
        self._boards = Boards(driver, events, most_readers=options.limits.page_streams)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, tls: ServerTls | None, *, controller: str) -> None:
        """Listens.

        Args:
            tls: what to listen with; None: plain HTTP.

        Raises:
            PageUnavailable: the address can't be listened on.
        """
        listening = _socket(self._options)
        host, port = split_address(self._options.page, "--page")
        port = listening.getsockname()[1]
        self.address = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        page = Page(
            boards=self._boards,
            calls=self._calls,
            logins=Logins(self._access, is_open=self._options.page_open),
            hosts=Hosts(self._options.page_names),
            cookie=f"callboard_{port}",
            secure=tls is not None,
            facts={"controller": controller, "version": __version__, "open": self._options.page_open},
        )
        files: dict[str, Any] = {}
        if tls is not None:
            files = {"ssl_certfile": str(tls.files.cert), "ssl_keyfile": str(tls.files.key)}
        config = uvicorn.Config(
            page.app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=STOP_S,
            limit_concurrency=MOST_CONNECTIONS,
            h11_max_incomplete_event_size=LONGEST_HEADERS,
            **files,
        )
        config.load()
        if tls is not None and config.ssl is not None:
            tls.keep_renewed(config.ssl)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        log.info("the page is served", address=self.address, open=self._options.page_open)

    def close(self, why: CallboardError) -> None:
        """Ends every stream with ``why``, and accepts nothing more."""
        self._boards.close(why)
        if self._server is not None:
            self._server.should_exit = True

    async def stop(self) -> None:
        """Waits until nothing is served any more."""
        if self._serving is not None:
            await asyncio.wait({self._serving})
            if not self._serving.cancelled() and (error := self._serving.exception()) is not None:
                log.error("the server of the page ended by itself", error=repr(error))


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that it is a part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def _socket(options: ControllerOptions) -> socket.socket:
    """Listens where the options say; where that is only the usual place and somebody has it, at any free port.

    Raises:
        PageUnavailable: the address can't be listened on.
    """
    host, port = split_address(options.page, "--page")
    listening: socket.socket | None = None
    for wanted in [port] if options.page_required else [port, 0]:
        try:
            family, kind, number, _, place = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind, number)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # What is accepted inherits it.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            listening.bind(place)
            listening.listen(128)
            listening.setblocking(False)
        except OSError:
            if listening is not None:
                listening.close()
            continue
        return listening
    raise PageUnavailable(
        f"{options.page} is in use or can't be listened on. Choose another address for the page with --page, or none."
    )
