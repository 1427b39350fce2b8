"""What `callboard agent` does: check the options, find the controller, run the program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import typer

from callboard.agents.agent import run_agent
from callboard.agents.options import MAX_HARDWARE, AgentOptions, OptionError, option_of
from callboard.cli.local.dashboard import usable_port
from callboard.cli.show import screen
from callboard.cli.show.failing import FAILED, CommandFailed, Failure
from callboard.cli.show.session import failing_in_words
from callboard.client.clusters import find_controller
from callboard.model.durations import parse_duration_ms
from callboard.model.names import is_name
from callboard.model.quantities import QuantityError, parse_memory, parse_milli
from callboard.security.joining import AgentCredentials, JoinToken
from callboard.security.places import UnsafeFile, UnsafeRunDirectory
from callboard.security.tls import TlsFiles
from callboard.security.tokens import BadToken, read_token

Parsed = TypeVar("Parsed")


def run(
    *,
    controller: str,
    cluster: str,
    token_file: Path | None,
    join_token_file: Path | None,
    node_id: str,
    rank: int | None,
    cpus: str,
    memory: str,
    gpus: int | None,
    simulate_gpus: int | None,
    labels: Sequence[str],
    resources: Sequence[str],
    node_group: str,
    hardware: Sequence[str],
    interpreters: Sequence[str],
    object_store: str,
    output_per_worker: str,
    output_total: str,
    warm_spares: int,
    runtime: str,
    ray_head: bool,
    ray_address: str,
    ray_token_file: Path | None,
    ray_port: int | None,
    dashboard_port: int | None,
    port_base: int | None,
    node_ip: str,
    notice_command: str,
    notice_every: str,
    notice_timeout: str,
    notice_deadline: str,
    leave_hooks: str,
    leave_timeout: str,
    successor: str,
    http_proxy: bool,
    run_dir: Path | None,
    log_format: str,
    log_level: str,
    exit_with_parent: int | None,
    exit_with: str,
) -> None:
    """Runs the agent until it is told to end."""
    with failing_in_words():
        address = find_controller(controller or None).address
        node_id = node_id or _own_node_id()
        token_file = token_file or _joined(cluster, node_id, address, join_token_file)
    dashboard_port = usable_port(dashboard_port, starts_head=ray_head, tell=_tell)
    stated: dict[str, Any] = {"ray_port": ray_port} if ray_port is not None else {}
    choices: dict[str, Any] = {"runtime": runtime, "log_format": _log_format(log_format)}
    try:
        options = AgentOptions(
            node_id=node_id,
            controller=address,
            cluster=cluster,
            token_file=_token_file(token_file),
            rank=rank,
            labels=_pairs(labels, "--label"),
            node_group=node_group,
            hardware=tuple(piece for text in hardware for piece in _hardware(text)),
            interpreters=tuple(interpreters),
            object_store_bytes=_parsed(parse_memory, object_store, option_of("object_store_bytes")),
            output_worker_bytes=_parsed(parse_memory, output_per_worker, option_of("output_worker_bytes")) or 0,
            output_bytes=_parsed(parse_memory, output_total, option_of("output_bytes")) or 0,
            warm_spares=warm_spares,
            gpus=gpus,
            simulate_gpus=simulate_gpus,
            cpu_milli=_parsed(parse_milli, cpus, "--cpus"),
            memory_bytes=_parsed(parse_memory, memory, "--memory"),
            custom_milli={name: parse_milli(amount) for name, amount in _pairs(resources, "--resource").items()},
            ray_head=ray_head,
            ray_address=ray_address,
            ray_token_path=str(ray_token_file or ""),
            dashboard_port=dashboard_port,
            port_base=port_base,
            node_ip=node_ip,
            notice_command=notice_command,
            notice_every_s=_seconds(notice_every, "notice_every_s") or 0,
            notice_timeout_s=_seconds(notice_timeout, "notice_timeout_s") or 0,
            notice_within_ms=_parsed(parse_duration_ms, notice_deadline, "--notice-deadline") or 0,
            leave_hooks_s=_seconds(leave_hooks, "leave_hooks_s") or 0,
            leave_s=_seconds(leave_timeout, "leave_s") or 0,
            successor_s=_seconds(successor, "successor_s"),
            http_proxy=http_proxy,
            run_dir=str(run_dir or ""),
            log_level=log_level.upper(),
            exit_with_parent=exit_with_parent,
            exit_with=_process(exit_with),
            **choices,
            **stated,
        )
    except OptionError as error:
        raise typer.BadParameter(error.why, param_hint=option_of(error.option)) from error
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint="--resource") from error
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
    screen.stderr().print(text, markup=False, soft_wrap=True)


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


def _parsed(parse: Callable[[str], Parsed], text: str, option: str) -> Parsed | None:
    if not text:
        return None
    try:
        return parse(text)
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _seconds(text: str, field: str) -> float | None:
    milliseconds = _parsed(parse_duration_ms, text, option_of(field))
    return None if milliseconds is None else milliseconds / 1000


def _token_file(path: Path | None) -> str:
    """The file with the token, if it can be used: it is read anew with every session, so that a rotation is followed.
    A token is never an option, because every user of the machine can read a command line."""
    if path is None:
        return ""
    try:
        read_token(path)
    except BadToken as error:
        raise typer.BadParameter(str(error), param_hint=option_of("token_file")) from error
    return str(path.absolute())


def _joined(cluster: str, node_id: str, controller: str, join_token_file: Path | None) -> Path | None:
    """Credentials of the agent's own, if it has joined; returns the file with its token, if it has one."""
    if TlsFiles.stated() is not None or not (is_name(cluster) and is_name(node_id)):
        return None  # something else is stated, or will be refused
    own = AgentCredentials(cluster, node_id)
    if join_token_file is not None and not own.exist():
        try:
            asyncio.run(own.obtain(controller, JoinToken.read(join_token_file), node_id))
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(
                Failure("The agent can't join.", f"{error.details()}.", "Make another join token.", FAILED)
            ) from error
        except (BadToken, UnsafeFile, UnsafeRunDirectory, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="--join-token-file") from error
    os.environ.update(own.environment())
    return own.token_file if own.token_file.exists() else None


def _log_format(stated: str) -> str:
    if stated == "auto":
        return "console" if os.isatty(2) else "json"
    return stated
