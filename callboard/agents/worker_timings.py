"""How long did it take? Seconds of a worker's blocks, written down where `callboard profile` finds them.

One file per worker and generation, a JSON object per line, in `logs/` of its agent's run directory. Standard library
only: this runs in every worker.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".timings.jsonl"
"""What the names of these files end with; they begin with the id of the job."""

_AGENT = "CALLBOARD_AGENT"


def timings_name(job_id: str, component: str, rank: int, generation: int) -> str:
    """Name of a worker's file."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{job_id}/{component}/{rank}/g{generation}") + SUFFIX


@contextmanager
def timed(name: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Append the seconds of the block, with `fields`, to the file of that name.

    A block that raises is not recorded: it did not do its work. Outside an agent there is nowhere to write to.
    """
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    run_dir = os.environ.get(_AGENT)
    if not run_dir:
        return
    try:
        # One write of a short line to a file opened for appending: threads don't mix theirs.
        with (Path(run_dir) / "logs" / name).open("ab", buffering=0) as file:
            file.write(json.dumps({"seconds": seconds, **fields}).encode() + b"\n")
    except OSError as error:
        # A full disk costs a measurement, never the worker.
        sys.stderr.write(f"callboard: a timing was not recorded: {error}\n")
