"""What `callboard controller` does: check the options, register, run the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from callboard.cli.local.records import AlreadyUp, claim_directory, remove_directory
from callboard.cli.local_failures import in_words
from callboard.cli.session import failing_in_words
from callboard.client.clusters import CONTROLLER_ROLE, ClusterRecord, cluster_directory, run_directory, write_record
from callboard.client.processes import identify
from callboard.controller.options import BadOption, ControllerOptions
from callboard.controller.server import run_controller


def run(
    *,
    listen: str,
    state_dir: Path | None,
    run_dir: Path | None,
    insecure: bool,
    log_format: str,
    log_level: str,
    exit_with_parent: int | None,
) -> None:
    """Runs the controller until it is told to end."""
    stated: dict[str, Any] = {"state_dir": state_dir} if state_dir else {}
    choices: dict[str, Any] = {"log_format": log_format, "log_level": log_level}
    try:
        options = ControllerOptions(
            listen=listen,
            run_dir=run_dir,
            insecure=insecure,
            exit_with_parent=exit_with_parent is not None,
            **choices,
            **stated,
        )
    except BadOption as error:
        raise typer.BadParameter(error.why, param_hint=error.option) from error
    if run_dir is not None:
        # Whoever chose the run directory has registered the cluster.
        raise typer.Exit(run_controller(options))
    with failing_in_words(), _registered(listen):
        raise typer.Exit(run_controller(options))


@contextmanager
def _registered(listen: str) -> Iterator[None]:
    """Makes the controller known on this machine as long as it runs."""
    name = f"controller-{listen.rpartition(':')[2]}"
    directory = cluster_directory(name, run_directory())
    try:
        claim_directory(directory)
    except AlreadyUp as error:
        raise in_words(error) from error
    try:
        record = ClusterRecord(name=name, controller=listen, directory=directory)
        if (ourselves := identify(os.getpid())) is not None:
            record = record.with_process(CONTROLLER_ROLE, ourselves)
        write_record(record)
        yield
    finally:
        remove_directory(directory)
