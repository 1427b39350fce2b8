"""Trees of control groups for tests: made-up ones in a folder."""

from __future__ import annotations

from pathlib import Path

from callboard.agents.cgroups import Cgroups

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
