"""What a worker writes: its output, its timings and its result, into files of its own that stay small.

The worker writes straight to its files, so no reader, agent or network ever makes it wait. The files are bounded by
freeing their beginning (`fallocate` with a punched hole): what is left keeps its place in the file, so nothing is
copied, nothing is lost between two steps, and the first byte that is still there tells how much is gone. The agent does
that for every worker of its node; the worker's own host does it too, for the time that no agent is there. Standard
library only: this runs in every worker.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from callboard.agents.host.worker_process import MAX_MESSAGE_CHARACTERS
from callboard.agents.host.worker_secrets import hidden

STDOUT, STDERR, TIMINGS, RESULTS = "stdout", "stderr", "timings", "results"
"""Names of the files in the folder of a worker's output."""

MAX_RESULT_BYTES = 64 * 1024
"""Of what an entry method returns, as JSON: figures and paths. Larger things belong in a file of the job."""

CODE, MODULES, FILES = "code", "modules", "files"
"""Names of the folders beside them: the code and the modules that a job brought along, and the checkpoint that a
command leaves. They go when the worker is gone."""

_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE with FALLOC_FL_PUNCH_HOLE."""

_BLOCK = 64 * 1024
"""Holes begin and end at multiples of this: a multiple of the blocks of every file system."""

_LONGEST = 1 << 42
"""Below the longest file of any file system; a longer one begins again at its beginning."""

_LOOK_S = 1.0
"""Between looks of the worker's host at its files. Its agent looks more often, and after it (GIL-bound code may keep
this thread from looking)."""


def redirect(folder: str) -> None:
    """From now on this process and what it starts write to the files in `folder`.

    Raises:
        OSError: they can't be opened; output goes where it went before.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, number in ((STDOUT, 1), (STDERR, 2)):
        # Appending: what several processes write at one time lands one after the other.
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)  # noqa: PTH118
        getattr(sys, name).flush()
        os.dup2(file, number)
        os.close(file)
        # Line by line, or what a killed worker printed last would be lost in a buffer.
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def keep_bounded(limit_bytes: int) -> None:
    """Keep standard output and error of this process at about `limit_bytes` each, for as long as it lives."""

    def keep() -> None:
        while True:
            time.sleep(_LOOK_S)
            for number in (1, 2):
                # Whatever the user's code did to its descriptors is its own business.
                with suppress(OSError):
                    trim(number, limit_bytes)

    threading.Thread(target=keep, name="callboard-output", daemon=True).start()


def trim(file: int, keep_bytes: int) -> None:
    """Free all but the last `keep_bytes` of a file, a little later than to the byte so that it is seldom done.

    Args:
        file: descriptor that can be written to.
        keep_bytes: how much stays.

    Raises:
        OSError: it can't be looked at.
    """
    facts = os.fstat(file)
    # Some file systems count no blocks.
    held_bytes = facts.st_blocks * 512 or facts.st_size - first_kept(file)
    if held_bytes <= keep_bytes + keep_bytes // 8 and facts.st_size < _LONGEST:
        return
    end = (facts.st_size - keep_bytes) // _BLOCK * _BLOCK
    if not keep_bytes:
        end += _BLOCK  # Past its end: a part of a block would be emptied, but stay.
    if end <= 0:
        return
    freed = facts.st_size < _LONGEST and _fallocate()(file, _PUNCH_HOLE, 0, end) == 0
    if not freed:
        # A file system without holes. It is appended to, so the next write begins at the beginning.
        os.ftruncate(file, 0)


def first_kept(file: int) -> int:
    """Bytes at the beginning of a file that were freed."""
    try:
        return os.lseek(file, 0, os.SEEK_DATA)
    except OSError:  # ENXIO: nothing is left, or nothing was written.
        return os.fstat(file).st_size


@functools.cache
def _fallocate() -> Any:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def keep_result(folder: str, member: str, value: object, hide: Callable[[str], str]) -> None:
    """Keep what an entry method returned, for ``job.result()``; of a value that can't be kept, why.

    Args:
        folder: the folder of the worker's output; empty: nobody keeps it.
        member: member of the colocation group; empty: the worker is no group.
    """
    kept: dict[str, object]
    try:
        kept = {"value": hidden(value, hide)}
        if (size := len(json.dumps(kept["value"]))) > MAX_RESULT_BYTES:
            kept = {"problem": f"its result has {size} bytes as JSON; at most {MAX_RESULT_BYTES} are kept"}
    except (TypeError, ValueError, RecursionError) as error:
        kept = {"problem": f"its result can't be written as JSON: {hide(str(error))[:MAX_MESSAGE_CHARACTERS]}"}
    _append(folder, RESULTS, {"member": member, **kept}, "the result")


@contextmanager
def timed(folder: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Append the seconds of the block, with `fields`, to the timings in `folder`, for `callboard profile`.

    A block that raises is not recorded: it did not do its work. Outside an agent there is no folder to write to.
    """
    begun = time.perf_counter()
    yield
    _append(folder, TIMINGS, {"seconds": time.perf_counter() - begun, **fields}, "a timing")


def _append(folder: str, name: str, facts: Mapping[str, Any], what: str) -> None:
    """Add a line of JSON to a file; outside an agent there is no folder to write to."""
    if not folder:
        return
    try:
        # One write of a short line to a file opened for appending: threads don't mix theirs.
        with (Path(folder) / name).open("ab", buffering=0) as file:
            file.write(json.dumps(facts).encode() + b"\n")
    except OSError as error:
        # A full disk costs a measurement, never the worker.
        sys.stderr.write(f"callboard: {what} was not recorded: {error}\n")
