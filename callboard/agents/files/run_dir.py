"""The run directory of an agent: where it keeps its things, and what an earlier one left behind.

    {run_dir}/            mode 0700, ours alone
      agent.lock          held (flock) by the living agent; its pid inside
      processes.json      what was started: role, name, pid, start time, and what the next agent has to know of it
      ray-token           Ray's authentication token, mode 0600
      ray/                Ray's temp dir, unless its path would be too long for sockets
      sockets/            addresses of workers that are plain processes
      lease               when the controller was heard last (`lease_file`)
      checkpoints/        what workers left and the controller has not acknowledged (`checkpoints`)
      packages/           code that jobs brought along
      environments/       Python environments built for jobs
      logs/               agent's children: ray.log, driver.log, one file a worker

Everything the agent starts carries `CALLBOARD_AGENT={run_dir}` in its environment. An agent that was killed leaves
its children; the next one on the same directory goes on with what it can (`adoption`), and ends what else is recorded
or marked, before anything new.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from callboard.agents.files.lease_file import LEASE_FILE
from callboard.agents.host.framing import Json
from callboard.model.log import structlog
from callboard.security.places import Held, UnsafeRunDirectory, make_private, take_lock, write_private
from callboard.security.processes import ProcessId

_log = structlog.get_logger(__name__)

MAX_RAY_TEMP_DIR = 40
"""Unix socket paths hold 107 bytes; Ray adds `/session_{date}_{time}_{pid}/sockets/plasma_store_{n}`, up to 67."""

PACKAGES = "packages"
"""Folder with code that jobs brought along."""

ENVIRONMENTS = "environments"
"""Folder with Python environments that were built for jobs."""

_LOCK = "agent.lock"
_RECORDS = "processes.json"
_TRIES = 1000


class RunDirError(Exception):
    """The run directory can't be used; the text says why."""


@dataclass(frozen=True)
class Started:
    """Something that was started for this node, or is about to be."""

    role: str
    """"agent", "ray", "driver", "fence", "worker", "spare" or "checkpoint"."""
    process: ProcessId | None
    """None while it isn't known."""
    name: str = ""
    """Unique among those with its role."""
    facts: Mapping[str, Json] = field(default_factory=dict)
    """What the next agent has to know to go on with it. No secrets: no environment, no arguments of jobs."""

    @property
    def key(self) -> tuple[str, str]:
        """What it is recorded by."""
        return (self.role, self.name)


def default_run_dir(cluster: str, node_id: str) -> Path:
    """Below the user's runtime directory, or below /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "callboard" if runtime else Path(f"/tmp/callboard-{os.getuid()}")  # noqa: S108
    return base / cluster / node_id


class RunDir:
    """The run directory of one living agent."""

    def __init__(self, path: Path) -> None:
        """Take the directory.

        Raises:
            RunDirError: it belongs to somebody else, or a living agent has it.
        """
        self.path = path
        self._lock = _take(path)
        self.logs = path / "logs"
        self.logs.mkdir(exist_ok=True)
        self.ray_token = path / "ray-token"
        self.sockets = path / "sockets"
        self.sockets.mkdir(exist_ok=True)
        self.output = path / "output"
        self.output.mkdir(exist_ok=True)
        self.checkpoints = path / "checkpoints"
        self.checkpoints.mkdir(exist_ok=True)
        self._records = path / _RECORDS
        self._started = {each.key: each for each in read_records(path)}
        self.ray_temp = _ray_temp(path)

    def recorded(self) -> list[Started]:
        """What was started and isn't crossed out, at first by an earlier agent."""
        return list(self._started.values())

    def put(self, *started: Started) -> None:
        """Record what was started, in the place of what has the same role and name."""
        self._started |= {each.key: each for each in started}
        self._write()

    def drop(self, role: str, name: str = "") -> None:
        """Cross out what is gone."""
        if self._started.pop((role, name), None) is not None:
            self._write()

    def keep_only(self, kept: Iterable[Started]) -> None:
        """Cross out everything but these."""
        self._started = {each.key: each for each in kept}
        self._write()

    def _write(self) -> None:
        records = [
            {
                "role": each.role,
                "name": each.name,
                "pid": each.process.pid if each.process else 0,
                "start_ticks": each.process.start_ticks if each.process else 0,
                "facts": dict(each.facts),
            }
            for each in self._started.values()
        ]
        try:
            write_private(self._records, json.dumps(records), durable=False)
        except OSError as error:
            # A full disk must not end workers (R10). What isn't recorded is still marked, and found by that.
            _log.error("record_not_written", why=str(error))

    def write_checkpoint(self, name: str, text: bytes) -> None:
        """Keep what a worker left, where only this user reads it.

        Raises:
            OSError: it can't be written.
        """
        write_private(self._checkpoint(name), text, durable=False)

    def read_checkpoint(self, name: str) -> bytes | None:
        """What a worker left; None: nothing is kept."""
        try:
            return self._checkpoint(name).read_bytes()
        except FileNotFoundError:
            return None

    def remove_checkpoint(self, name: str) -> None:
        """Keep it no longer."""
        self._checkpoint(name).unlink(missing_ok=True)

    def _checkpoint(self, name: str) -> Path:
        # Worker names hold slashes and may be longer than a file name.
        return self.checkpoints / hashlib.sha256(name.encode()).hexdigest()[:32]

    def write_ray_token(self, token: str) -> None:
        """Keep Ray's token where only this user reads it."""
        write_private(self.ray_token, token, durable=False)

    def read_ray_token(self) -> str:
        """Ray's token, as it was kept; empty when it is not there."""
        return self.ray_token.read_text() if self.ray_token.exists() else ""

    def clear_ray(self) -> None:
        """Forget everything of a Ray node that is gone."""
        if self.ray_temp.exists():
            shutil.rmtree(self.ray_temp)
        self.ray_token.unlink(missing_ok=True)

    def close(self, *, keep: bool, keep_output: bool = False) -> None:
        """Give the directory up, and remove what we made in it.

        Args:
            keep: something is left for the next agent to find: leave everything.
            keep_output: leave the output of workers, if there is any.
        """
        if not keep:
            self.clear_ray()
            shutil.rmtree(self.logs)
            shutil.rmtree(self.sockets)
            shutil.rmtree(self.checkpoints)
            shutil.rmtree(self.path / PACKAGES, ignore_errors=True)
            shutil.rmtree(self.path / ENVIRONMENTS, ignore_errors=True)
            if not keep_output or not any(self.output.iterdir()):
                shutil.rmtree(self.output)
            for file in (self._records, *self.path.glob(".*.new")):  # an agent that was killed may have left drafts
                file.unlink(missing_ok=True)
            (self.path / LEASE_FILE).unlink(missing_ok=True)
            (self.path / _LOCK).unlink()
            _remove_while_empty(self.path, levels=3)
        os.close(self._lock)


def read_records(run_dir: Path) -> list[Started]:
    """What is recorded in a run directory, also by somebody who doesn't hold it."""
    try:
        entries = json.loads((run_dir / _RECORDS).read_text())
    except FileNotFoundError:
        return []
    return [
        Started(
            role=each["role"],
            process=ProcessId(each["pid"], each["start_ticks"]) if each["pid"] else None,
            name=each.get("name", ""),
            facts=each.get("facts", {}),
        )
        for each in entries
    ]


def _take(path: Path) -> int:
    """Make the directory ours: its lock, held, as a descriptor.

    Another agent that closes removes its lock and the directories above it while we look, so we look again when
    something was there and isn't any more.
    """
    for _ in range(_TRIES):
        try:
            make_private(path)
            return take_lock(path / _LOCK, str(os.getpid()))
        except FileNotFoundError:
            continue
        except UnsafeRunDirectory as error:
            raise RunDirError(f"{error}; give the agent a directory of its own") from error
        except Held as error:
            raise RunDirError(f"another agent of this node is running (pid {error.holder}, {path})") from error
    raise RunDirError(f"other agents make and remove {path} all the time; give the agent a directory of its own")


def _ray_temp(path: Path) -> Path:
    inside = path / "ray"
    if len(os.fsencode(inside)) <= MAX_RAY_TEMP_DIR:
        return inside
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    return Path(f"/tmp/cb-{os.getuid()}-{digest}")  # noqa: S108 - made private by whoever uses it


def _remove_while_empty(path: Path, *, levels: int) -> None:
    """Remove the directory and those above it, as far as they are empty: node, cluster, base.

    Others make and remove theirs at the same time, so only the kernel can say whether one is empty.
    """
    for folder in (path, *path.parents[: levels - 1]):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass  # Another agent that closes was faster; what is above may still be there.
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            return  # Others use it.
