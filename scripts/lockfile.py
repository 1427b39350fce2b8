"""Makes requirements.lock, and picks from it what some extras need.

The lock is one resolution of all extras for every supported Python. Each entry says in a line
`# for …` which extras need it ("base": everyone does). `scripts/lock` finds that out by resolving
every extra alone within the lock. The `# via` lines of the resolver would not do: `ray` and
`ray[default]` have one name there, and very different needs.

Standard library only: it runs before anything is installed.

    lockfile.py check-extras LOCK EXTRA…   fail unless the lock knows every extra
    lockfile.py select LOCK EXTRA…         print the entries that the extras need
    lockfile.py make LOCK UV [OPTION…]     resolve pyproject.toml anew with this uv
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "base"
UNLOCKED = frozenset({"torch"})
HEADER = "# Made by scripts/lock from pyproject.toml. Do not edit.\n"

_FOR = "    # for "


class LockError(Exception):
    """The lock cannot serve what was asked."""


@dataclass(frozen=True)
class Entry:
    """One pinned package: its requirement, hashes and comments as they stand in the file."""

    text: str

    @property
    def package(self) -> str:
        """The name and the marker: one name may be pinned twice, for different Pythons."""
        return package_of(self.text)

    @property
    def extras(self) -> frozenset[str]:
        """The extras that need the package."""
        found = re.search(rf"^{_FOR}(.*)$", self.text, re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()

    def needed_for(self, extras: Iterable[str]) -> "Entry":
        """The same entry, saying that these extras need it."""
        requirement, via, comment = self.text.partition("    # via")
        return Entry(f"{requirement}{_FOR}{' '.join(extras)}\n{via}{comment}")


def package_of(line: str) -> str:
    """The name and marker of a requirement line: `numpy ; python_full_version < '3.12'`."""
    requirement = re.split(r" \\|\n", line, maxsplit=1)[0]
    return re.sub(r"==[^\s;]+", "", requirement).strip()


def parse(text: str) -> list[Entry]:
    """The entries of a lock file, in its order."""
    return [Entry(block) for block in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]]


def known_extras(entries: Iterable[Entry]) -> frozenset[str]:
    """Every extra that the lock was made for."""
    return frozenset(extra for entry in entries for extra in entry.extras) - {BASE}


def check_extras(entries: Sequence[Entry], extras: Iterable[str]) -> None:
    """Raise LockError for an extra that the lock does not know."""
    known = known_extras(entries)
    for extra in extras:
        if extra in UNLOCKED:
            raise LockError(
                f"{extra} is not locked, because the right build depends on the machine: "
                f".venv/bin/python -m pip install {extra}"
            )
        if extra not in known:
            raise LockError(f"no extra {extra!r}; there are: {', '.join(sorted(known))}")


def select(entries: Iterable[Entry], extras: Iterable[str]) -> list[Entry]:
    """What the project with these extras needs."""
    wanted = {BASE, *extras}
    return [entry for entry in entries if entry.extras & wanted]


def make(lock: Path, uv: str, options: Sequence[str]) -> None:
    """Resolve pyproject.toml and write the lock. Pins that still fit stay."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = sorted(set(project["optional-dependencies"]) - UNLOCKED)
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch, "requirements.txt")
        if lock.exists():
            draft.write_text(lock.read_text())
        every_extra = [f"--extra={extra}" for extra in extras]
        _compile(uv, "--generate-hashes", f"--output-file={draft}", *every_extra, *options)
        entries = parse(draft.read_text())
        within = f"--constraint={draft}"
        base = _packages(_compile(uv, "--no-annotate", within))
        needed = {
            extra: _packages(_compile(uv, "--no-annotate", within, f"--extra={extra}")) - base for extra in extras
        }
    lock.write_text(HEADER + "".join(entry.text for entry in _annotated(entries, base, needed)))


def _annotated(entries: Iterable[Entry], base: frozenset[str], needed: dict[str, frozenset[str]]) -> list[Entry]:
    annotated = []
    for entry in entries:
        extras = [extra for extra, packages in needed.items() if entry.package in packages]
        if entry.package in base:
            extras = [BASE]
        if not extras:
            raise LockError(f"no extra needs {entry.package}")
        annotated.append(entry.needed_for(extras))
    return annotated


def _packages(compiled: str) -> frozenset[str]:
    return frozenset(package_of(line) for line in compiled.splitlines() if line)


def _compile(uv: str, *options: str) -> str:
    """Resolve the base, the setup group and what the options add; no index address is written."""
    command = [uv, "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--no-header"]
    command += ["--python-version=3.11", "--group=setup", "--no-emit-index-url", *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    match list(arguments):
        case ["check-extras", lock, *extras]:
            check_extras(parse(Path(lock).read_text()), extras)
        case ["select", lock, *extras]:
            chosen = select(parse(Path(lock).read_text()), extras)
            sys.stdout.write("".join(entry.text for entry in chosen))
        case ["make", lock, uv, *options]:
            make(Path(lock), uv, options)
        case _:
            raise LockError(__doc__ or "")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LockError as error:
        sys.exit(f"error: {error}")
