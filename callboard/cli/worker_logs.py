"""Where does a worker's output go? Into files of the machine it runs on; there is no call that carries them.

A plain process writes to `logs/` in its agent's run directory, a Ray actor to `worker-*-{pid}.out|err` among the
logs of its Ray session. While it runs, its own descriptors name the files. Once it ended they are looked for where the
agents of this user keep theirs; an agent that leaves takes its run directory along. Of a job that ended the controller
knows no workers any more: then only plain processes are found, whose files are named after the job.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from callboard.v1.job_pb2 import Worker
from callboard.v1.node_pb2 import Node

_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLogs:
    """The output of one worker.

    Attributes:
        label: the worker for people, "component/rank".
        files: its files on this machine, stdout first.
        elsewhere: where to look when there are none, one sentence.
    """

    label: str
    files: tuple[Path, ...] = ()
    elsewhere: str = ""


def logs_of(worker: Worker, node: Node | None, base: Path) -> WorkerLogs:
    """The logs of a worker.

    Args:
        worker: which worker.
        node: its node; None: forgotten by the controller.
        base: where this user's clusters keep their files.
    """
    label = f"{worker.key.component}/{worker.key.rank}"
    if node is None:
        return WorkerLogs(label=label, elsewhere=f"its node {worker.allocation.node_id} is no longer known")
    where = f"worker-*-{worker.pid}.out and .err of its Ray session" if worker.actor_name else _process_log(worker)
    if node.hostname != socket.gethostname():
        node_id = worker.allocation.node_id
        return WorkerLogs(label=label, elsewhere=f"it runs on {node_id}, host {node.hostname}: look there for {where}")
    files = tuple(_open_files(worker.pid)) or tuple(_kept_files(worker, base))
    if files:
        return WorkerLogs(label=label, files=files)
    return WorkerLogs(label=label, elsewhere=f"no file of it is found on this machine: it would be {where}")


def logs_of_ended(uid: str, base: Path) -> list[WorkerLogs]:
    """What plain processes of an ended job left on this machine.

    Args:
        uid: id of the job.
        base: where this user's clusters keep their files.
    """
    return [
        WorkerLogs(label=file.stem.removeprefix(f"{uid}-"), files=(file,))
        for file in sorted(base.glob(f"*/*/logs/{uid}-*.log"))
    ]


def _process_log(worker: Worker) -> str:
    key = worker.key
    name = f"{key.job_id}/{key.component}/{key.rank}/g{worker.generation}"
    # As the agent names it (`agents/process_runtime`).
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name) + ".log"


def _open_files(pid: int) -> Iterator[Path]:
    """Files that a living process writes its output to, each once."""
    seen: set[Path] = set()
    for descriptor in (_STDOUT, _STDERR) if pid else ():
        try:
            path = Path(f"/proc/{pid}/fd/{descriptor}").readlink()
        except OSError:
            continue  # It ended, or belongs to somebody else.
        if path.suffix in {".log", ".out", ".err"} and path.is_file() and path not in seen:
            seen.add(path)
            yield path


def _kept_files(worker: Worker, base: Path) -> Iterator[Path]:
    """Files that an ended worker left in run directories of agents."""
    if not worker.actor_name:
        yield from sorted(base.glob(f"*/*/logs/{_process_log(worker)}"))
    elif worker.pid:
        for suffix in ("out", "err"):
            yield from sorted(base.glob(f"*/*/ray/session_latest/logs/worker-*-{worker.pid}.{suffix}"))
