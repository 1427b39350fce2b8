"""The records of clusters on this machine: where each keeps its files, and who may have the place."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from callboard.cli.show.exits import CommandFailed
from callboard.client.clusters import ClusterRecord, read_record
from callboard.security.places import make_private
from callboard.security.tokens import tidy

UP_ROLE = "up"
"""Role of the program that watches over a cluster."""


class AlreadyUp(CommandFailed):
    """A cluster of that name runs on this machine."""

    def __init__(self, record: ClusterRecord) -> None:
        super().__init__(
            f"Cluster {record.name} is up already.",
            f"Its controller is at {record.controller}."
            if record.is_running()
            else f"Its controller, at {record.controller}, has ended; the rest of it may still run.",
            f"End it with `callboard down {record.name}`, or start another with --name and --port.",
        )


def check_free(directory: Path) -> None:
    """
    Raises:
        AlreadyUp: a cluster of that name runs.
    """
    record = read_record(directory) if directory.is_dir() else None
    if record is not None and any(entry.process.is_running() for entry in record.processes):
        raise AlreadyUp(record)


def claim_directory(directory: Path) -> None:
    """Makes the directory of a cluster; what a dead cluster of that name left is removed first.

    Raises:
        AlreadyUp: a cluster of that name runs.
    """
    while True:
        make_private(directory.parent)
        check_free(directory)
        if directory.exists():
            shutil.rmtree(directory)
        # A `down` of the last other cluster removes the run directory at any time.
        with suppress(FileNotFoundError):
            directory.mkdir(mode=0o700)
            return


def remove_directory(directory: Path) -> None:
    """Removes the directory of a cluster, and the run directory if it is empty now."""
    if directory.exists():
        shutil.rmtree(directory)
    tidy(directory.parent)
    # Not empty: another cluster's. Gone: another `down` was faster.
    with suppress(OSError):
        directory.parent.rmdir()
