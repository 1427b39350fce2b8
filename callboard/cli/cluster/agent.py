"""What `callboard agent` does: check the options, find the controller, run the program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import typer

from callboard.agents.agent import run_agent
from callboard.agents.options import MAX_HARDWARE, AgentOptions
from callboard.cli.local.ports import usable_port
from callboard.cli.options import Stated, read_stated, reading
from callboard.cli.show import consoles
from callboard.cli.show.exits import FAILED, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words
from callboard.client.clusters import find_controller
from callboard.model.names import is_name
from callboard.model.options import OptionError, option_of
from callboard.model.quantities import parse_milli
from callboard.security.joining import AgentCredentials, JoinToken
from callboard.security.places import UnsafeFile, UnsafeRunDirectory
from callboard.security.tls import TlsFiles
from callboard.security.tokens import BadToken, read_token


def run(stated: Stated, *, controller: str, token_file: Path | None, join_token_file: Path | None) -> None:
    """Runs the agent until it is told to end.

    Args:
        controller: address of the controller; empty: as for every program.
        token_file: file with the token; None: where it is found.
        join_token_file: file with a token to exchange for credentials of its own.
    """
    with failing_in_words():
        address = find_controller(controller or None).address
        node_id = stated["node_id"] or _own_node_id()
        token_file = token_file or _joined(stated["cluster"], node_id, address, join_token_file)
    wanted = read_stated(AgentOptions, stated) | {
        "node_id": node_id,
        "controller": address,
        "token_file": _token_file(token_file),
        "labels": _pairs(stated["labels"] or [], "--label"),
        "hardware": tuple(piece for text in stated["hardware"] or [] for piece in _hardware(text)),
        "dashboard_port": usable_port(stated["dashboard_port"], starts_head=stated["ray_head"], tell=_tell),
        "exit_with": _process(stated["exit_with"]),
        "log_format": _log_format(stated["log_format"]),
        "log_level": stated["log_level"].upper(),
    }
    try:
        resources = _pairs(stated["custom_milli"] or [], "--resource")
        with reading("--resource"):
            wanted["custom_milli"] = {name: parse_milli(amount) for name, amount in resources.items()}
        options = AgentOptions(**wanted)
    except OptionError as error:
        raise typer.BadParameter(error.why, param_hint=option_of(AgentOptions, error.option)) from error
    raise typer.Exit(asyncio.run(_run_with_its_certificate(options)))


async def _run_with_its_certificate(options: AgentOptions) -> int:
    """Runs the agent, and keeps the certificate that it joined with from ending, if it has one."""
    own = AgentCredentials(options.cluster, options.node_id)
    if not own.environment() or not own.environment().items() <= os.environ.items():
        return await run_agent(options)
    renewing = asyncio.create_task(own.keep_renewed(options.controller, options.node_id))
    try:
        return await run_agent(options)
    finally:
        renewing.cancel()


def _tell(text: str) -> None:
    consoles.stderr().print(text, soft_wrap=True)


def _own_node_id() -> str:
    """The host name, made to fit the pattern of names."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:56]
    return name if name[:1].isalpha() else f"node-{name}"


def _pair(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"{text!r} reads KEY=VALUE", param_hint=option)
    return key, value


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for key, value in (_pair(text, option) for text in texts):
        if pairs.setdefault(key, value) != value:
            raise typer.BadParameter(f"{key} is {pairs[key]} and {value}", param_hint=option)
    return pairs


def _process(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    pid, colon, ticks = text.partition(":")
    if not (colon and pid.isdigit() and ticks.isdigit()):
        raise typer.BadParameter(f"{text!r} reads PID:TICKS", param_hint="--exit-with")
    return int(pid), int(ticks)


def _hardware(text: str) -> list[tuple[str, str]]:
    """``Franka=2`` is two of a type, ``Franka={…}`` one with its settings."""
    kind, stated = _pair(text, "--hardware")
    if stated.isascii() and stated.isdigit() and 1 <= int(stated) <= MAX_HARDWARE:
        return [(kind, "")] * int(stated)
    try:
        settings = json.loads(stated)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"{text!r} reads TYPE=N or TYPE={{…}}, a JSON object", param_hint="--hardware")
    return [(kind, stated)]


def _token_file(path: Path | None) -> str:
    """The file with the token, if it can be used: it is read anew with every session, so that a rotation is followed.
    A token is never an option, because every user of the machine can read a command line."""
    if path is None:
        return ""
    try:
        read_token(path)
    except BadToken as error:
        raise typer.BadParameter(str(error), param_hint="--token-file") from error
    return str(path.absolute())


def _joined(cluster: str, node_id: str, controller: str, join_token_file: Path | None) -> Path | None:
    """Credentials of the agent's own, if it has joined; returns the file with its token, if it has one."""
    if TlsFiles.stated() is not None or not (is_name(cluster) and is_name(node_id)):
        return None  # something else is stated, or will be refused
    own = AgentCredentials(cluster, node_id)
    # A unit goes on to name a token that was used up, and perhaps deleted.
    if join_token_file is not None and (join_token_file.exists() or not own.exist()):
        try:
            joining = JoinToken.read(join_token_file)
            if not own.come_from(joining):
                asyncio.run(own.obtain(controller, joining, node_id))
        except (grpc.aio.AioRpcError, BadToken, UnsafeFile, UnsafeRunDirectory, OSError) as error:
            why = f"{error.details()}." if isinstance(error, grpc.aio.AioRpcError) else str(error)
            if own.exist():
                _tell(
                    f"The agent can't join with {join_token_file}, and goes on with what it joined with before. {why}"
                )
            elif isinstance(error, grpc.aio.AioRpcError):
                raise CommandFailed("The agent can't join.", why, "Make another join token.", FAILED) from error
            else:
                raise typer.BadParameter(why, param_hint="--join-token-file") from error
    os.environ.update(own.environment())
    return own.token_file if own.token_file.exists() else None


def _log_format(stated: str) -> str:
    if stated == "auto":
        return "console" if os.isatty(2) else "json"
    return stated
