"""Command lines on this machine, as a person would type them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from callboard.agents.ray.ray_command import free_port
from callboard.agents.system.process_tree import send_signal
from callboard.cli.local.taking_down import AGENT_MARK
from callboard.cli.main import app
from callboard.client.clusters import ClusterRecord, recorded_clusters
from callboard.security.processes import ProcessId, descendants, marked, process_table

ROOT = Path(__file__).parents[2]

_OF_PROGRAMS = ("up", "down", "add-worker", "remove-worker")
"""Verbs whose own process matters: it is the parent of what it starts, and ends while that runs on."""


class Machine:
    """Command lines on this machine, with a run directory of the test's own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts `callboard …`."""
        process = subprocess.Popen(
            [sys.executable, "-m", "callboard.cli", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `callboard …` to its end: in this process, unless it starts or ends programs."""
        if arguments[0] not in _OF_PROGRAMS:
            shown = CliRunner().invoke(app, arguments)
            if shown.exception is not None and not isinstance(shown.exception, SystemExit):
                raise shown.exception
            return subprocess.CompletedProcess(arguments, shown.exit_code, shown.stdout, shown.stderr)
        return subprocess.run(
            [sys.executable, "-m", "callboard.cli", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts a small cluster of plain processes and waits until it says that it is ready."""
        process = self.start("up", "--runtime", "process", "--agents", "2", "--port", str(free_port()), *arguments)
        wait_for_line(process, "is ready")
        return process

    def clusters(self) -> list[ClusterRecord]:
        """What is recorded."""
        return recorded_clusters(self.run_dir)

    def clear(self) -> None:
        """Ends what a failed test left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()
        for record in self.clusters():
            # With what descends from them and what lost its parent: an agent that is killed while it ends a worker
            # leaves that one stopped, and nobody else would end it.
            recorded = [entry.process for entry in record.processes]
            table = process_table()
            for left in descendants(recorded, table) | marked(f"{AGENT_MARK}={record.directory}/", table, prefix=True):
                send_signal(left, signal.SIGKILL)


def wait_for_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} did not come: {''.join(seen)}")


def wait_gone(processes: list[ProcessId], within_s: float) -> None:
    """Waits on pidfds, as the program itself does."""
    deadline = time.monotonic() + within_s
    for process in processes:
        if not process.is_running():
            continue
        try:
            fd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], max(deadline - time.monotonic(), 0))
        os.close(fd)
    assert [process for process in processes if process.is_running()] == []


def programs(record: ClusterRecord) -> list[ProcessId]:
    return [entry.process for entry in record.processes if entry.role != "up"]
