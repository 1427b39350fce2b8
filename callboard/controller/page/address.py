"""The address of the page: where it listens, before what serves it is loaded."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from callboard.controller.options import ControllerOptions, split_address
from callboard.model.frozen import dataclass

NEEDED = ("starlette", "uvicorn")
"""Packages of the extra ``callboard[page]``."""

SILENT_MS = 30_000
"""How long a browser may leave unacknowledged what it was sent before the kernel drops the connection."""


class PageUnavailable(Exception):
    """The page can't be served; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class PageAddress:
    """A port that listens: browsers that come early wait for an answer.

    Attributes:
        url: what to open: ``http://127.0.0.1:8780``.
    """

    listening: socket.socket
    url: str

    @property
    def port(self) -> int:
        port: int = self.listening.getsockname()[1]
        return port


def missing_package() -> str:
    """The first of the packages that the page needs and this installation lacks; empty: none."""
    return next((name for name in NEEDED if find_spec(name) is None), "")


def listen(options: ControllerOptions) -> PageAddress:
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
        scheme = "https" if options.secure else "http"
        host = f"[{host}]" if ":" in host else host
        return PageAddress(listening, f"{scheme}://{host}:{listening.getsockname()[1]}")
    raise PageUnavailable(
        f"{options.page} is in use or can't be listened on. Choose another address for the page with --page, or none."
    )
