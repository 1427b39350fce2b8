"""The server of the page: listens beside gRPC, on the same event loop. Needs the extra ``callboard[page]``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn

from callboard._version import __version__
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.event_log import EventLog
from callboard.controller.options import ControllerOptions
from callboard.controller.page.address import PageAddress
from callboard.controller.page.app import Page
from callboard.controller.page.board import Boards
from callboard.controller.page.calls import Calls
from callboard.controller.page.login import Hosts, Logins
from callboard.model.log import structlog
from callboard.security.access import Access
from callboard.security.tls import ServerTls
from callboard.wire.refusals import CallboardError

log = structlog.get_logger(__name__)

STOP_S = 2
"""How long answers may take to be sent when the controller stops."""

MOST_CONNECTIONS = 1_000
LONGEST_HEADERS = 32 << 10


class PageServer:
    """Serves the page, from :meth:`start` to :meth:`stop`."""

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

    async def start(self, at: PageAddress, tls: ServerTls | None, *, controller: str) -> None:
        """Answers.

        Args:
            at: where it listens already.
            tls: what to answer with; None: plain HTTP.
            controller: its address, which the page names.
        """
        page = Page(
            boards=self._boards,
            calls=self._calls,
            logins=Logins(self._access, is_open=self._options.page_open),
            hosts=Hosts(self._options.page_names),
            cookie=f"callboard_{at.port}",
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
        self._serving = asyncio.create_task(self._server.serve(sockets=[at.listening]))
        log.info("the page is served", address=at.url, open=self._options.page_open)

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
