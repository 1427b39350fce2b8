"""What `callboard controller` does: check the options, register, run the program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Self

import typer

from callboard.cli.local.records import claim_directory, remove_directory
from callboard.cli.options import Stated, read_stated
from callboard.client.clusters import CONTROLLER_ROLE, ClusterRecord, cluster_directory, write_record
from callboard.controller.journal.database import STORE_VARIABLE, check_url
from callboard.controller.options import DEFAULT_METRICS, DEFAULT_PAGE, ControllerOptions, Limits, page_address
from callboard.controller.server import run_controller
from callboard.model.faults import InvalidInput
from callboard.model.inputs.role_file import read_role_file
from callboard.model.options import OptionError
from callboard.security.caller_roles import Role
from callboard.security.places import run_directory
from callboard.security.processes import identify
from callboard.security.signed_tokens import ROLES_OF_PEOPLE, SignedTokenRules
from callboard.security.tls import TlsFiles


def run(
    stated: Stated,
    *,
    roles: Path | None,
    tls: tuple[Path | None, Path | None, Path | None],
    jwt: tuple[Path | None, str, str, str, str, Sequence[str]],
    limits: Sequence[str],
    exit_with_parent: bool,
) -> None:
    """Runs the controller until it is told to end.

    Args:
        roles: file with presets.
        tls: authorities, certificate and key.
        jwt: keys, issuer, audience, claims with the name and the role, and roles of groups.
        limits: texts NAME=N.
        exit_with_parent: whether it ends with the program that started it.
    """
    metrics, page, run_dir = stated["metrics"], stated["page"], stated["run_dir"]
    wanted = read_stated(ControllerOptions, stated)
    if roles is not None:
        with _failing_in_words():
            wanted["roles"] = read_role_file(roles).presets
    wanted |= {
        "metrics": "" if metrics == "none" else metrics or DEFAULT_METRICS,
        "metrics_required": bool(metrics),
        "page": "" if page == "none" else page_address(page) or DEFAULT_PAGE,
        "page_required": bool(page),
        "tls": TlsFiles(*(path.absolute() if path else None for path in tls)),
        "exit_with_parent": exit_with_parent,
    }
    try:
        wanted |= {"store": _store(stated["store"]), "jwt": _jwt(*jwt), "limits": _limits(limits)}
        options = ControllerOptions(**wanted)
    except OptionError as error:
        raise typer.BadParameter(error.why, param_hint=error.option) from error
    if run_dir is not None:
        # Whoever chose the run directory has registered the cluster.
        raise typer.Exit(run_controller(options))
    with _failing_in_words(), _Registration() as registration:
        if not options.listen.endswith(":0"):
            # Before it starts: a controller of that port that runs already is named.
            registration.at(options.listen)
        raise typer.Exit(run_controller(options, registration.at))


@contextmanager
def _failing_in_words() -> Iterator[None]:
    """As :func:`callboard.cli.show.verb_guard.failing_in_words`, which a controller loads once something fails:
    it takes a tenth of the time of a start."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception:
        from callboard.cli.show.verb_guard import failing_in_words  # noqa: PLC0415

        with failing_in_words():
            raise


def _store(stated: str) -> str:
    """The URL of the journal's database: the option's, or that of the environment, which nobody else can read."""
    url = stated or os.environ.get(STORE_VARIABLE, "")
    if not url:
        return ""
    try:
        return check_url(url, from_command_line=bool(stated))
    except InvalidInput as error:
        raise OptionError("--store", f"{error.faults[0].message}.") from error


def _jwt(
    key: Path | None, issuer: str, audience: str, name_claim: str, role_claim: str, groups: Sequence[str]
) -> SignedTokenRules | None:
    if key is None:
        if issuer or audience or groups:
            raise OptionError("--jwt-key", "is missing: without keys no signed token counts.")
        return None
    if not issuer or not audience:
        raise OptionError("--jwt-key", "needs --jwt-issuer and --jwt-audience: tokens made for others must not count.")
    roles: dict[str, Role] = {}
    for text in groups:
        group, _, role = text.rpartition("=")
        if not group or role not in ROLES_OF_PEOPLE:
            raise OptionError("--jwt-role", f"{text!r} is not GROUP=ROLE with one of {', '.join(ROLES_OF_PEOPLE)}.")
        roles[group] = Role(role)
    return SignedTokenRules(
        key_file=key.absolute(),
        issuer=issuer,
        audience=audience,
        name_claim=name_claim,
        role_claim=role_claim,
        roles=roles,
    )


def _limits(stated: Sequence[str]) -> Limits:
    names = [field.name for field in fields(Limits)]
    found: dict[str, int] = {}
    for text in stated:
        name, _, number = text.partition("=")
        if name not in names:
            raise OptionError("--limit", f"{name!r} is not the name of a limit; there are {', '.join(names)}.")
        if not (number.isascii() and number.isdigit()):
            raise OptionError("--limit", f"{text!r} is not NAME=N, with a whole number N.")
        if name in found:
            raise OptionError("--limit", f"{text!r} states {name} again.")
        found[name] = int(number)
    return Limits(**found)


class _Registration:
    """Makes the controller known on this machine as long as the block runs."""

    def __init__(self) -> None:
        self._directory: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            remove_directory(self._directory)

    def at(self, address: str) -> None:
        """Registers its address; asked again, does nothing.

        Raises:
            CommandFailed: a controller of that port is registered and runs.
        """
        if self._directory is not None:
            return
        name = f"controller-{address.rpartition(':')[2]}"
        directory = cluster_directory(name, run_directory())
        claim_directory(directory)
        self._directory = directory
        record = ClusterRecord(name=name, controller=address, directory=directory)
        if (ourselves := identify(os.getpid())) is not None:
            record = record.with_process(CONTROLLER_ROLE, ourselves)
        write_record(record)
