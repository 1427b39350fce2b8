"""What `callboard page` does: ask the controller where its page is, and make a link that logs in once."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
import webbrowser
from typing import Any
from urllib.parse import urlsplit

from callboard.cli.options import wishes
from callboard.cli.show import consoles
from callboard.cli.show.exits import FAILED, CommandFailed
from callboard.cli.show.printing import show_result
from callboard.cli.show.verb_guard import connected
from callboard.client.client import Client
from callboard.security.tokens import find_tls, find_token

_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - to be recognised
_WAIT_S = 10.0


@connected
async def show(client: Client, *, opens: bool) -> None:
    """Prints the page's address, with a code that logs in whoever opens it first; or opens it."""
    address = _reachable((await client.stats()).page_address, client.address)
    if not address:
        raise CommandFailed(
            "The controller serves no web page.",
            f"{client.address} was started with --page none, or without callboard[page].",
            "Install it there with pip install 'callboard[page]' and start the controller with --page 8780.",
            FAILED,
        )
    token = find_token(client.address)
    code = await asyncio.to_thread(_code, address, client.address, token) if token else ""
    link = f"{address}/#login={code}" if code else address
    if opens and not wishes.for_program and await asyncio.to_thread(webbrowser.open, link):
        consoles.stdout().print(f"Opened {address} in the browser.", soft_wrap=True)
        return
    show_result({"address": address, "link": link}, lambda _: link)
    if code and not wishes.for_program and not wishes.quiet:
        consoles.stderr().print("The link logs in once, within two minutes.")


def _reachable(page: str, controller: str) -> str:
    """The page's address as this machine calls it: one that listens everywhere is where the controller is."""
    found = urlsplit(page)
    if found.hostname not in _ANYWHERE:
        return page
    host = controller.rpartition(":")[0]
    return f"{found.scheme}://{host}:{found.port}"


def _code(address: str, controller: str, token: str) -> str:
    """A code for whoever has a token.

    Raises:
        CommandFailed: the page does not give one.
    """
    parts = find_tls(controller)
    context = None
    if address.startswith("https:"):
        context = ssl.create_default_context(cadata=parts.ca.decode() if parts is not None and parts.ca else None)
    # http_proxy in the environment is meant for the web, not for the cluster (GC-10).
    handlers: list[Any] = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    headers = {"Authorization": f"Bearer {token}", "X-Callboard-Page": "1"}
    request = urllib.request.Request(f"{address}/api/link", data=b"{}", headers=headers)  # noqa: S310 - http or https
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_WAIT_S) as answer:
            return str(json.load(answer)["code"])
    except urllib.error.HTTPError as error:
        why = json.loads(error.read() or b"{}").get("why", str(error))
    except (OSError, ValueError, KeyError) as error:
        why = f"{address} could not be asked: {error}"
    raise CommandFailed(
        "The web page gave no link.", f"{why[:1].upper()}{why[1:]}.", f"Open {address} and log in there.", FAILED
    )
