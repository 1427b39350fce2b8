"""The clusters that run on this machine: one directory per cluster, under one run directory per user.

`<run directory>/<name>/cluster.json` names the controller's address and the processes that
make up the cluster. Whoever starts a cluster writes the record and removes it; everybody else only
reads it, and believes a record only as long as its controller runs (pid and start time, NJ-05).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from callboard.client.processes import ProcessId

RECORD_NAME = "cluster.json"
CONTROLLER_ROLE = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProcess:
    """One program of a cluster.

    Attributes:
        role: "controller", "agent node-0", or "up" for the program that watches over them.
        process: which process it is.
    """

    role: str
    process: ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecord:
    """One cluster of this machine, as its `cluster.json` describes it.

    Attributes:
        name: name of the cluster.
        controller: address of its controller, "host:port".
        directory: where its files are.
        processes: its programs, the controller first.
        block: which block of loopback addresses its nodes use; see `callboard.cli.local.plan`.
        ray_token_path: file with the token of its Ray; empty: Ray runs without one.
    """

    name: str
    controller: str
    directory: Path
    processes: tuple[ClusterProcess, ...] = ()
    block: int = 0
    ray_token_path: str = ""

    def is_running(self) -> bool:
        """Whether its controller still runs."""
        return any(entry.process.is_running() for entry in self.processes if entry.role == CONTROLLER_ROLE)

    def with_process(self, role: str, process: ProcessId) -> ClusterRecord:
        """The record with one more program."""
        return replace(self, processes=(*self.processes, ClusterProcess(role=role, process=process)))


def cluster_directory(name: str, base: Path) -> Path:
    """Where the cluster ``name`` keeps its files."""
    return base / name


def write_record(record: ClusterRecord) -> None:
    """Writes the record of a cluster; a reader sees the old one or the new one, nothing between."""
    plain = asdict(record) | {"directory": str(record.directory)}
    temporary = record.directory / f"{RECORD_NAME}.new"
    temporary.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    temporary.replace(record.directory / RECORD_NAME)


def read_record(directory: Path) -> ClusterRecord | None:
    """The record in ``directory``; None when there is none (yet, or any more)."""
    try:
        plain = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    processes = tuple(
        ClusterProcess(role=entry["role"], process=ProcessId(**entry["process"])) for entry in plain.pop("processes")
    )
    return ClusterRecord(**(plain | {"directory": directory, "processes": processes}))


def recorded_clusters(base: Path) -> list[ClusterRecord]:
    """Every cluster with a record below ``base``, by name, whether it runs or not."""
    if not base.is_dir():
        return []
    records = (read_record(directory) for directory in sorted(base.iterdir()))
    return [record for record in records if record is not None]


def running_clusters(base: Path) -> list[ClusterRecord]:
    """Every cluster below ``base`` whose controller runs, by name."""
    return [record for record in recorded_clusters(base) if record.is_running()]
