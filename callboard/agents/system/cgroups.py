"""The control groups around this process: the files that say what it may use and what became of it, the own group's
first.

A container is often a group within a group (a pod, a slice, a job of a batch system), and the tightest limit of them
counts. In version 1 each controller has a tree of its own, in version 2 all share one; both may be there at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from callboard.model.frozen import dataclass
from callboard.security.processes import PROC


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Where this process's groups are found.

    Attributes:
        own: file that names the group of this process in each tree (cgroups(7)).
        mounts: file that says where the trees are (proc_pid_mountinfo(5)).
        root: what every mount point is below; not / in tests alone.
    """

    own: Path = PROC / "self" / "cgroup"
    mounts: Path = PROC / "self" / "mountinfo"
    root: Path = Path("/")

    def files(self, controller: str, unified: str, legacy: str) -> Iterator[Path]:
        """The files of one name in the groups around this process that are there, innermost group first.

        Args:
            controller: "cpu", "memory" or "cpuset".
            unified: name of the file in version 2.
            legacy: name of the file in version 1.
        """
        for controllers, path in self._groups():
            if controllers and controller not in controllers:
                continue  # of version 1, and of other controllers
            name = legacy if controllers else unified
            for mount, below in self._mounted(controller if controllers else ""):
                for group in _up(mount, _inside(path, below)):
                    if (file := group / name).is_file():
                        yield file

    def _groups(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Controllers (none: version 2) and path of each group that this process is in."""
        for line in _lines(self.own):
            _, controllers, path = line.split(":", 2)
            yield tuple(each for each in controllers.split(",") if each), path

    def _mounted(self, controller: str) -> Iterator[tuple[Path, str]]:
        """Where the tree of a controller is mounted, and which of its groups is the top there."""
        for line in _lines(self.mounts):
            before, _, after = line.partition(" - ")
            kind, _, options = after.split(" ", 2)
            wanted = kind == "cgroup" and controller in options.split(",") if controller else kind == "cgroup2"
            if wanted:
                fields = before.split(" ")
                yield self.root / fields[4].lstrip("/"), fields[3]


def _inside(path: str, top: str) -> str:
    """A group's path below the one that is mounted. In a container the path may be that of the host, of which nothing
    but the container's own group can be seen: then that is the mount itself."""
    own = PurePosixPath(path)
    if ".." in own.parts:
        return ""
    return str(own.relative_to(top)) if own.is_relative_to(top) else ""


def _up(mount: Path, below: str) -> Iterator[Path]:
    place = mount / below
    while not place.is_dir() and place != mount:
        place = place.parent
    yield place
    while place != mount:
        place = place.parent
        yield place


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
