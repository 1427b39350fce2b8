"""The record of a running controller: a small file that says where it listens, as long as it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from callboard.controller.journal.state_dir import StoreFailed
from callboard.security.places import write_private


def write_record(path: Path, *, address: str, started_ms: int, term: int, tokens_at: str = "") -> None:
    """Writes ``controller.json``; a reader sees the old file or the new one, nothing between.

    Args:
        address: "host:port" that clients use.
        tokens_at: where clients without a certificate connect, if not there.
        started_ms: start of the term in milliseconds since 1970.

    Raises:
        StoreFailed: the directory can't be written.
    """
    plain = {"address": address, "pid": os.getpid(), "started_ms": started_ms, "term": term}
    plain |= {"tokens_at": tokens_at} if tokens_at else {}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(plain) + "\n", durable=False)
    except OSError as error:
        raise StoreFailed(path, f"can't be written ({error.strerror})", "Choose another --run-dir.") from error


def remove_record(path: Path) -> None:
    """Removes the file, unless another controller wrote it meanwhile."""
    try:
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink()
    except (OSError, ValueError, KeyError):
        return  # it is gone, or not ours to judge
