"""What `callboard login` and `callboard context …` do."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from callboard.cli.cluster.tokens import printed
from callboard.cli.options import keep_tls, wishes
from callboard.cli.show import consoles, tables
from callboard.cli.show.verb_guard import failing_in_words, unless_wrong, with_client
from callboard.client.client import Client
from callboard.client.clusters import with_port
from callboard.security import contexts
from callboard.security.contexts import (
    CONTEXT_VARIABLE,
    BadContext,
    Context,
    current_context,
    log_in,
    read_contexts,
)
from callboard.security.places import NO_CONTEXT, UnsafeRunDirectory
from callboard.security.tls import TlsFiles
from callboard.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, find_tls, read_token


def login(
    address: str, *, name: str, token_file: Path | None, tls: tuple[Path | None, Path | None, Path | None]
) -> None:
    """Checks credentials at a controller and keeps them."""
    with failing_in_words():
        full = with_port(address)
    keep_tls(*tls)
    os.environ[CONTEXT_VARIABLE] = NO_CONTEXT  # what is kept so far must not answer for what is new
    with failing_in_words():
        token = _token(token_file)
        found = find_tls(full) if TlsFiles.stated() is not None else None
    if token:
        os.environ.pop(TOKEN_FILE_VARIABLE, None)
        os.environ[TOKEN_VARIABLE] = token
    wishes.controller = full

    async def check(client: Client) -> None:
        await client.stats()

    with_client(check)
    with _changing():
        made = log_in(name or _host(full), full, token, found)
    if not printed({"name": made.name, "address": made.address}):
        consoles.stdout().print(f"Logged in: context {made.name} is in use, controller {made.address}.")


def show_list() -> None:
    with _changing():
        found, current = read_contexts(), current_context()
    if not printed([_plain(each) | {"current": each == current} for each in found.known.values()]):
        rows = [
            ["*" if each == current else "", each.name, each.address, _credentials(each)]
            for each in found.known.values()
        ]
        consoles.stdout().print(tables.table(["", "NAME", "CONTROLLER", "CREDENTIALS"], rows))


def show(name: str) -> None:
    with _changing():
        found = read_contexts().known.get(name) if name else current_context()
        if found is None:
            what = f"there is no context {name}" if name else "no context is in use"
            raise BadContext(f"{what}; `callboard context list` shows those there are, and `callboard login` makes one")
    if not printed(_plain(found)):
        consoles.stdout().print(
            f"{found.name}: {found.address}, {_credentials(found)}, in {found.folder}", soft_wrap=True
        )


def use(name: str) -> None:
    with _changing():
        contexts.use(name)
    if not printed({"current": name}):
        consoles.stdout().print("No context is in use." if name == NO_CONTEXT else f"Context {name} is in use.")


def remove(name: str) -> None:
    with _changing():
        contexts.remove(name)
    if not printed({"name": name, "removed": True}):
        consoles.stdout().print(f"Context {name} is forgotten.")


def _changing() -> AbstractContextManager[None]:
    return unless_wrong("contexts", BadContext, UnsafeRunDirectory, OSError)


def _plain(found: Context) -> dict[str, Any]:
    return {
        "name": found.name,
        "address": found.address,
        "token": found.token_file is not None,
        "certificate": found.tls is not None and found.tls.cert is not None,
        "tls": found.tls is not None,
        "folder": str(found.folder),
    }


def _credentials(found: Context) -> str:
    plain = _plain(found)
    has = [what for what in ("certificate", "token") if plain[what]]
    return (" and ".join(has) or "those of this account") + (" over TLS" if plain["tls"] else "")


def _token(file: Path | None) -> str:
    if file is not None and str(file) == "-":
        return sys.stdin.readline().strip()
    stated = file or (Path(os.environ[TOKEN_FILE_VARIABLE]) if os.environ.get(TOKEN_FILE_VARIABLE) else None)
    return read_token(stated) if stated is not None else os.environ.get(TOKEN_VARIABLE, "").strip()


def _host(address: str) -> str:
    """The host, made to fit the pattern of names."""
    host = address.rpartition(":")[0].strip("[]").replace(":", "-")
    return host if host[:1].isalpha() else f"at-{host}"
