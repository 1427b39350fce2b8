"""`callboard login` and `callboard context`: the controllers that this account logged in to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from callboard.cli.cluster.tokens import printed
from callboard.cli.options import TlsCaOption, TlsCertOption, TlsKeyOption, keep_tls, takes, wishes
from callboard.cli.show import screen
from callboard.cli.show.failing import BAD_INPUT, CommandFailed, Failure
from callboard.cli.show.session import failing_in_words, with_client
from callboard.client.client import Client
from callboard.client.clusters import with_port
from callboard.security import contexts
from callboard.security.contexts import (
    CONTEXT_VARIABLE,
    NO_CONTEXT,
    BadContext,
    Context,
    current_context,
    log_in,
    read_contexts,
)
from callboard.security.places import UnsafeRunDirectory
from callboard.security.tls import TlsFiles
from callboard.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, find_tls, read_token

app = typer.Typer()
context_verbs = typer.Typer(help="Show, choose and forget controllers that you logged in to.", no_args_is_help=True)
app.add_typer(context_verbs, name="context")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.")]


@app.command(
    "login",
    epilog="Example: callboard login ray-head.lab.example:7701 --name lab --tls-ca ca.pem --token-file alice.token",
    short_help="Keep the address and credentials of a controller.",
)
@takes("output")
def login(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the controller.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the context. Default: the host.")] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            help="Private file with a token; -: the standard input. Default: $CALLBOARD_TOKEN_FILE, $CALLBOARD_TOKEN.",
            allow_dash=True,
        ),
    ] = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Check credentials at a controller and keep copies of them (mode 0600). Every command uses it from then on."""
    full = with_port(address)
    keep_tls(tls_ca, tls_cert, tls_key)
    os.environ[CONTEXT_VARIABLE] = NO_CONTEXT  # what is kept so far must not answer for what is new
    with failing_in_words():
        token = _token(token_file)
        tls = find_tls(full) if TlsFiles.stated() is not None else None
    if token:
        os.environ.pop(TOKEN_FILE_VARIABLE, None)
        os.environ[TOKEN_VARIABLE] = token
    wishes.controller = full

    async def check(client: Client) -> None:
        await client.stats()

    with_client(check)
    with changing():
        made = log_in(name or _host(full), full, token, tls)
    if not printed({"name": made.name, "address": made.address}):
        screen.stdout().print(f"Logged in: context {made.name} is in use, controller {made.address}.")


@context_verbs.command("list", epilog="Example: callboard context list")
@takes("output")
def list_contexts() -> None:
    """List the contexts; the star marks the one in use."""
    with changing():
        found, current = read_contexts(), current_context()
    if not printed([_plain(each) | {"current": each == current} for each in found.known.values()]):
        rows = [
            ["*" if each == current else "", each.name, each.address, _credentials(each)]
            for each in found.known.values()
        ]
        screen.stdout().print(screen.table(["", "NAME", "CONTROLLER", "CREDENTIALS"], rows))


@context_verbs.command("show", epilog="Example: callboard context show")
@takes("output")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="Default: the one in use.")] = "") -> None:
    """Show one context, without its secrets."""
    with changing():
        found = read_contexts().known.get(name) if name else current_context()
        if found is None:
            what = f"there is no context {name}" if name else "no context is in use"
            raise BadContext(f"{what}; `callboard context list` shows those there are, and `callboard login` makes one")
    if not printed(_plain(found)):
        screen.stdout().print(
            f"{found.name}: {found.address}, {_credentials(found)}, in {found.folder}", soft_wrap=True
        )


@context_verbs.command("use", epilog="Example: callboard context use lab")
@takes("output")
def use(name: Annotated[str, typer.Argument(metavar="NAME", help=f"Name of the context; {NO_CONTEXT}: none.")]) -> None:
    """Use a context from now on."""
    with changing():
        contexts.use(name)
    if not printed({"current": name}):
        screen.stdout().print("No context is in use." if name == NO_CONTEXT else f"Context {name} is in use.")


@context_verbs.command("remove", epilog="Example: callboard context remove lab")
@takes("output")
def remove(name: NameArgument) -> None:
    """Forget a context and its credentials on this machine; the controller still takes them."""
    with changing():
        contexts.remove(name)
    if not printed({"name": name, "removed": True}):
        screen.stdout().print(f"Context {name} is forgotten.")


@contextmanager
def changing() -> Iterator[None]:
    """Tells in words what can be wrong with contexts."""
    with failing_in_words():
        try:
            yield
        except (BadContext, UnsafeRunDirectory, OSError) as error:
            raise CommandFailed(
                Failure("The contexts were left as they are.", f"{error}.", "Correct it and try again.", BAD_INPUT)
            ) from error


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
