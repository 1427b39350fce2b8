"""What `callboard token` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from callboard.cli.options import reading, wishes
from callboard.cli.show import consoles, printing, tables
from callboard.cli.show.exits import BAD_INPUT, CommandFailed
from callboard.cli.show.verb_guard import unless_wrong
from callboard.client.clusters import running_clusters
from callboard.controller.options import default_state_dir
from callboard.model.durations import parse_duration_ms
from callboard.security import grants
from callboard.security.caller_roles import Role
from callboard.security.grants import BadGrant, read_grants
from callboard.security.joining import new_join_token
from callboard.security.places import CERTS_NAME, UnsafeFile, run_directory, write_private


def create(name: str, *, role: Role, file: Path | None, lasts: str, replace: bool, state_dir: Path | None) -> None:
    with reading("--lasts"):
        lasts_ms = parse_duration_ms(lasts) if lasts else 0
    with _of_controller(state_dir) as directory:
        if role is Role.JOINER:
            raise BadGrant("join tokens are made by `callboard node token create`")
        token = grants.grant(directory, name, role, lasts_ms=lasts_ms, replace=replace)
        if file is not None:
            write_private(file, token + "\n")
    where = {"token": token} if file is None else {"file": str(file)}
    if printed({"name": name, "role": str(role)} | where):
        return
    if file is None:
        typer.echo(token)
    else:
        consoles.stdout().print(f"Client {name}, role {role}. Its token is in {file}; name it in CALLBOARD_TOKEN_FILE.")


def create_join(*, lasts: str, node: str, file: Path, state_dir: Path | None) -> None:
    with reading("--ttl"):
        lasts_ms = parse_duration_ms(lasts)
    with _of_controller(state_dir) as directory:
        ca = directory / CERTS_NAME / "ca.pem"
        name, made = new_join_token(
            directory,
            lasts_ms=lasts_ms,
            node=node,
            port=_port_for_tokens(directory),
            authority=ca.read_text(encoding="ascii") if ca.exists() else "",
        )
        write_private(file, made.text() + "\n")
    if not printed({"name": name, "node": node, "file": str(file)}):
        consoles.stdout().print(
            f"Join token {name} is in {file}; it can be used once, within {lasts}. Take it to the node by a way "
            "that nobody "
            "reads, and start the agent there with --join-token-file."
        )


def _port_for_tokens(directory: Path) -> int:
    """Of the controller that runs there; 0: none says so."""
    try:
        found = json.loads((directory / "controller.json").read_text(encoding="utf-8"))
        return int(str(found["tokens_at"]).rpartition(":")[2])
    except (OSError, ValueError, KeyError):
        return 0


def show_list(*, state_dir: Path | None) -> None:
    with _of_controller(state_dir) as directory:
        found = sorted(read_grants(directory), key=lambda each: each.name)
    plain = [asdict(each) | {"role": str(each.role)} for each in found]
    if not printed([{key: value for key, value in each.items() if key != "sha256"} for each in plain]):
        rows = [[each.name, str(each.role), day(each.made_ms), day(each.expires_ms)] for each in found]
        consoles.stdout().print(tables.table(["NAME", "ROLE", "MADE", "EXPIRES"], rows))


def revoke(name: str, *, state_dir: Path | None) -> None:
    with _of_controller(state_dir) as directory:
        grants.revoke(directory, name)
    if not printed({"name": name, "revoked": True}):
        consoles.stdout().print(f"The token of {name} is no longer valid.")


def printed(value: Any) -> bool:
    if wishes.for_program:
        printing.print_data(value)
    return wishes.for_program


def state_directory(stated: Path | None) -> Path:
    """The state directory that is meant: as stated, else that of the only cluster here, else the usual one."""
    running = running_clusters(run_directory())
    local = [each.directory / "controller" for each in running if (each.directory / "controller").is_dir()]
    return stated or (local[0] if len(local) == 1 else default_state_dir())


@contextmanager
def _of_controller(state_dir: Path | None) -> Iterator[Path]:
    """The state directory that is meant; what can be wrong with it is told in words."""
    directory = state_directory(state_dir)
    with unless_wrong("clients", BadGrant, UnsafeFile, OSError):
        if not directory.is_dir():
            raise CommandFailed(
                "No state of a controller is there.",
                f"{directory} is not a directory.",
                "Start a controller first, or name the directory of its state with --state-dir.",
                BAD_INPUT,
            )
        yield directory


def day(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC") if at_ms else ""
