"""Trees of control groups for tests: made-up ones in a folder, and limited ones of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from callboard.agents.system.cgroups import Cgroups

_MOUNT = "31 23 0:28 {top} /{mount} rw,relatime shared:1 - {kind} {kind} {options}"


def made_up(folder: Path, own: str, mounts: dict[str, str], files: dict[str, str]) -> Cgroups:
    """A process's groups.

    Args:
        folder: where they are made.
        own: the text of /proc/self/cgroup.
        mounts: path of a mount → "cgroup2" or controllers of version 1; behind ":" the group on top.
        files: path → content.
    """
    (folder / "own").write_text(own)
    lines = []
    for mount, what in mounts.items():
        options, _, top = what.partition(":")
        kind = "cgroup2" if options == "cgroup2" else "cgroup"
        (folder / mount).mkdir(parents=True, exist_ok=True)
        lines.append(_MOUNT.format(top=top or "/", mount=mount, kind=kind, options=f"rw,{options}"))
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{content}\n")
    return Cgroups(folder / "own", folder / "mountinfo", folder)


@contextmanager
def limited(*, cpus: int, memory_bytes: int) -> Iterator[list[Path]]:
    """A group of this machine with these limits, and one below it without any, in each tree: the files that move a
    process into the inner ones. The test is skipped where none can be made."""
    quota = 100_000
    limits = {
        "cpu": {"cpu.cfs_quota_us": str(cpus * quota), "cpu.cfs_period_us": str(quota)},
        "memory": {"memory.limit_in_bytes": str(memory_bytes)},
        "": {"cpu.max": f"{cpus * quota} {quota}", "memory.max": str(memory_bytes)},
    }
    with ExitStack() as made:
        inner = []
        for tree, files in limits.items():
            top = Path("/sys/fs/cgroup") / tree
            outer = top / f"callboard-test-{os.getpid()}"
            if not (top / "cgroup.procs").is_file() or not os.access(top, os.W_OK):
                continue
            try:
                for group in (outer, outer / "inner"):
                    group.mkdir()
                    made.callback(_remove, group, top)
                for name, text in files.items():
                    (outer / name).write_text(text)
            except OSError as error:
                pytest.skip(f"control groups can't be limited here: {error}")
            inner.append(outer / "inner" / "cgroup.procs")
        if not inner:
            pytest.skip("no control groups can be made here")
        yield inner


def _remove(group: Path, top: Path) -> None:
    """Also with what a failed test left in it, which goes back to where it came from."""
    for pid in (group / "cgroup.procs").read_text().split():
        (top / "cgroup.procs").write_text(pid)
    group.rmdir()
