"""Python environments of jobs on this node: built once of what a job brings along, or found by their name.

One is named by the hash of what it is built of and of the Python that it is for. It is whole once its marker is there,
which comes last: what breaks off is no environment, and the next start builds it again. All workers that want one
wait for the same build, and nobody builds on when nobody waits.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import sysconfig
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from callboard.agents.runtime import HostError
from callboard.agents.supplies.build_failures import first_error, reason_of
from callboard.agents.supplies.package_cache import Packages
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import ask
from callboard.model.log import structlog
from callboard.model.specs import ENVIRONMENT_MS
from callboard.security.processes import ProcessId, identify, marked, process_table

_log = structlog.get_logger(__name__)

KEPT_BYTES = 32 << 30
"""Of environments on a node; the longest unused goes first, and none that a process runs in."""

_YOUNG_S = 600.0
"""One that was wanted so recently may be about to be used."""

_MAX_LOG_BYTES = 16 << 10
_LOG_LINE_CHARACTERS = 500
"""pip lists every version that there is in one line."""

_KILL_S = 10.0
_TOLD_FIRST_S = 5.0
"""Until the second time that somebody who waits is told; then ever longer."""

BASE_VARIABLE = "CALLBOARD_BASE"
"""Variable with folders whose packages a worker host may use behind those of its environment: Ray, callboard."""

_FOLDERS = f"filter(None, os.environ.get('{BASE_VARIABLE}', '').split(os.pathsep))"
_PTH = f"import os, site; list(map(site.addsitedir, {_FOLDERS}))"
"""Without a comprehension: it would look for what this line imports where it isn't."""

_BUILD_VARIABLE = "CALLBOARD_BUILD"
"""Variable by which everything that a build started is found."""

_MARKER = "callboard.json"


class EnvironmentFailed(HostError):
    """An environment can't be had; `log` is the end of what its build printed."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


@dataclass(frozen=True)
class Environment:
    """A Python environment that is there."""

    folder: Path
    variable: str
    """By which programs know that they run in it: VIRTUAL_ENV or CONDA_PREFIX."""

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def variables(self) -> dict[str, str]:
        """What a program in it finds in its environment."""
        return {self.variable: str(self.folder)}

    @property
    def base(self) -> dict[str, str]:
        """What lets a host of workers find Ray and callboard in it, behind everything else."""
        folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        return {BASE_VARIABLE: os.pathsep.join(folders)}


@dataclass
class _Build:
    """One that is under way."""

    task: asyncio.Task[Environment]
    began_s: float
    waiting: int = 0
    given_up: bool = False
    """Nobody waited any more: it is ending."""
    log: deque[bytes] = field(default_factory=deque)
    at: str = "begins"
    """What it is at."""

    def note(self, chunk: bytes) -> None:
        """Keep the end of what it prints."""
        self.log.append(chunk)
        size = sum(map(len, self.log))
        while size - len(self.log[0]) >= _MAX_LOG_BYTES:
            size -= len(self.log.popleft())

    def tail(self) -> str:
        """What it printed last."""
        return b"".join(self.log)[-_MAX_LOG_BYTES:].decode(errors="replace").strip()


@dataclass(eq=False)
class Environments:
    """The environments of one node.

    Attributes:
        timeout_s: bound of one build.
    """

    folder: Path
    packages: Packages
    processes: Processes
    variables: Mapping[str, str]
    timeout_s: float = ENVIRONMENT_MS / 1000
    kept_bytes: int = KEPT_BYTES
    _builds: dict[str, _Build] = field(default_factory=dict)

    async def get(self, wanted: str, tell: Callable[[str], None]) -> Environment:
        """The environment that a job asks for, as its spec names it.

        Args:
            wanted: `requirements:` or `uv:` and a package, or `conda:` and a name.

        Raises:
            EnvironmentFailed: it can't be built or isn't there.
        """
        kind, _, what = wanted.partition(":")
        if kind == "conda":
            return await self._conda(what)
        python = f"{sys.executable} {platform.python_version()} {platform.machine()}"
        key = hashlib.sha256(f"{kind} {what} {python}".encode()).hexdigest()[:32]
        there = Environment(self.folder / key / "venv", "VIRTUAL_ENV")
        while (ending := self._builds.get(key)) is not None and ending.given_up:
            await asyncio.wait([ending.task])
        if key not in self._builds and (marker := self.folder / key / _MARKER).exists():
            os.utime(marker)
            return there
        build = self._builds.get(key)
        if build is None:
            task = asyncio.create_task(self._build(key, kind, what, there), name=f"environment {key}")
            build = self._builds[key] = _Build(task, time.monotonic())
            task.add_done_callback(lambda _: self._builds.pop(key))
        build.waiting += 1
        try:
            await self._wait(build, tell)
            return build.task.result()
        finally:
            build.waiting -= 1
            if not build.waiting and not build.task.done():
                build.given_up = True
                build.task.cancel()

    async def _wait(self, build: _Build, tell: Callable[[str], None]) -> None:
        pause_s = _TOLD_FIRST_S
        while not build.task.done():
            last = first_error(build.tail())
            seconds = round(time.monotonic() - build.began_s)
            tell(f"builds the environment, {seconds} s: {build.at}" + (f": {last}" if last else ""))
            await asyncio.wait([build.task], timeout=pause_s)
            pause_s = min(2 * pause_s, 60.0)

    async def _build(self, key: str, kind: str, package: str, made: Environment) -> Environment:
        folder = self.folder / key
        await asyncio.sleep(0)  # until it is listed
        build = self._builds[key]
        build.at = "fetches its files"
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                source = folder / "source"
                await self.packages.unpack(package, source)
                for command, variables in _steps(kind, source, made.folder, shutil.which("uv", path=self._path)):
                    await self._run(build, command, source, variables)
                (site,) = made.folder.glob("lib/python*/site-packages")
                (site / "callboard_base.pth").write_text(_PTH)
                size = await asyncio.to_thread(_size_of, folder)
                part = folder / f"{_MARKER}.part"
                part.write_text(json.dumps({"bytes": size}))
                part.replace(folder / _MARKER)
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
            if isinstance(error, TimeoutError):
                why = (
                    f"it was not done after {self.timeout_s:g} s: {build.at}; name an index that is nearer, or "
                    "versions that have wheels"
                )
            elif isinstance(error, EnvironmentFailed):
                raise
            elif isinstance(error, (OSError, ValueError)):
                why = reason_of(str(error), platform.python_version()) or str(error)
            else:
                raise
            raise _failed(build, why) from error
        _log.info("environment_built", key=key, bytes=size, s=round(time.monotonic() - build.began_s, 1))
        try:
            await self._make_room(key)
        except OSError as error:
            _log.warning("no_room_made_for_environments", why=str(error))
        return made

    @property
    def _path(self) -> str:
        return self.variables.get("PATH", os.defpath)

    async def _run(self, build: _Build, command: list[str], folder: Path, variables: Mapping[str, str]) -> None:
        build.at = " ".join(Path(part).name if part.startswith("/") else part for part in command[:4])
        build.note(f"$ {' '.join(command)}\n".encode())
        marker = f"{_BUILD_VARIABLE}={folder}"
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env={**self.variables, **variables, _BUILD_VARIABLE: str(folder)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        )
        try:
            # Not cancelled itself: a process that is there and that nobody knows would be ended by nobody.
            process = await asyncio.shield(starting)
            assert process.stdout is not None
            while chunk := await process.stdout.read(1 << 16):
                build.note(chunk)
            code = await process.wait()
        finally:
            # With all that it started, to the end: what is left would write into the next build.
            await asyncio.shield(self._end(starting, marker))
        if code:
            log = build.tail()
            how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
            raise _failed(
                build,
                reason_of(log, platform.python_version())
                or f"`{build.at} …` {how}: {first_error(log)}".removesuffix(": "),
            )

    async def _end(self, starting: asyncio.Task[asyncio.subprocess.Process], marker: str) -> None:
        await asyncio.wait([starting])
        if starting.exception() is not None:
            return
        process = starting.result()
        leader = identify(process.pid) or ProcessId(process.pid, 0)
        await self.processes.end(leader, marker=marker, budget_s=_KILL_S)
        await process.wait()
        assert process.stdout is not None
        while await process.stdout.read(1 << 16):
            pass

    async def _make_room(self, but: str) -> None:
        """Delete what was not wanted for longest and nobody runs in."""
        there = [
            (marker.stat().st_mtime, json.loads(marker.read_text())["bytes"], marker.parent)
            for marker in self.folder.glob(f"*/{_MARKER}")
        ]
        held = sum(size for _, size, _ in there)
        for used, size, folder in sorted(there):
            if held <= self.kept_bytes:
                return
            inside = functools.partial(_is_used, folder / "venv")
            if folder.name == but or time.time() - used < _YOUNG_S or await asyncio.to_thread(inside):
                continue
            (folder / _MARKER).unlink()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            held -= size
            _log.info("environment_deleted", key=folder.name, bytes=size)

    async def _conda(self, name: str) -> Environment:
        tools = ("conda", "mamba", "micromamba")
        tool = next((place for each in tools if (place := shutil.which(each, path=self._path))), None)
        if tool is None:
            raise EnvironmentFailed(
                f"env: conda: {name}: this node has no conda: neither {', '.join(tools[:-1])} nor {tools[-1]} is in "
                f"the PATH of its agent, {self._path}. Install one there, or write env: {{requirements: …}}"
            )
        listed = await self._asked(tool, "env", "list")
        try:
            folders = [Path(each) for each in listed["envs"]]
            if name == "base":  # the list is sorted: it may stand anywhere
                told = await self._asked(tool, "info")
                found = [Path(told.get("root_prefix") or told["base environment"])]  # as conda says, and micromamba
            else:
                found = [each for each in folders if each.name == name]
        except (AttributeError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"{tool} told nothing of its environments: {error!r}; try `{tool} env list --json` on the node"
            ) from error
        if not found or not os.access(found[0] / "bin" / "python", os.X_OK):
            known = ", ".join(each.name for each in folders[:20]) or "none"
            raise EnvironmentFailed(
                f"env: conda: {name} is not an environment with Python on this node; it has {known}. Name one of "
                f"these, create it there (`{Path(tool).name} create -n {name} python={platform.python_version()}`), or "
                "choose other nodes with node_selector"
            )
        return Environment(found[0], "CONDA_PREFIX")

    async def _asked(self, tool: str, *words: str) -> Any:
        """What conda says."""
        command = [tool, *words, "--json"]
        try:
            return json.loads((await ask(command, self.variables, within_s=30)).output)
        except (TimeoutError, ValueError) as error:
            raise EnvironmentFailed(
                f"`{' '.join(command)}` gave no answer that can be read: {error!r}; try that command on the node"
            ) from error


def _failed(build: _Build, why: str) -> EnvironmentFailed:
    lines = [
        line if len(line) <= _LOG_LINE_CHARACTERS else f"{line[:_LOG_LINE_CHARACTERS]}…"
        for line in build.tail().splitlines()
    ]
    return EnvironmentFailed(f"the environment can't be built on this node: {why}", "\n".join(lines))


def _steps(kind: str, source: Path, made: Path, uv: str | None) -> list[tuple[list[str], dict[str, str]]]:
    """Commands that make an environment, with further variables."""
    python = str(made / "bin" / "python")
    if uv is not None:
        venv = ([uv, "venv", "--python", sys.executable, str(made)], dict[str, str]())
        if kind == "uv":
            frozen = ["--frozen"] if (source / "uv.lock").exists() else []
            sync = [uv, "sync", "--no-install-project", "--no-dev", "--python", python, *frozen]
            return [venv, (sync, {"UV_PROJECT_ENVIRONMENT": str(made)})]
        return [venv, ([uv, "pip", "install", "--python", python, "-r", "callboard-requirements.txt"], {})]
    if kind == "uv":
        _write_requirements(source)
    # The node's own pip, where it has one: half of the time of a small build is the copy of another.
    own = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip", "--python", python] if own else [python, "-m", "pip"]
    create = [sys.executable, "-m", "venv", *(["--without-pip"] if own else []), str(made)]
    install = [*pip, "install", "--disable-pip-version-check", "-r", "callboard-requirements.txt"]
    return [(create, {}), (install, {})]


def _write_requirements(source: Path) -> None:
    """What a project depends on as requirements for pip, in the versions of its lock file."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked, here = project.get("requires-python", ""), platform.python_version()
    if not SpecifierSet(str(asked)).contains(here, prereleases=True):
        raise ValueError(f"{here} is not in the project's Python requirement: `{asked}`")  # in uv's words
    versions: dict[str, set[str]] = {}
    if (lock := source / "uv.lock").exists():
        try:
            for each in tomllib.loads(lock.read_text(encoding="utf-8")).get("package", []):
                if "registry" in each.get("source", {}):
                    versions.setdefault(each["name"], set()).add(each["version"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"uv.lock can't be read: {error!r}; `uv lock` writes a new one") from error
    pins = [f"{name}=={version}" for name, found in versions.items() if len(found) == 1 for version in found]
    (source / "callboard-constraints.txt").write_text("\n".join(pins))
    lines = [*project.get("dependencies", ()), "-c callboard-constraints.txt"]
    (source / "callboard-requirements.txt").write_text("\n".join(lines))


def _size_of(folder: Path) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        size += sum(os.lstat(os.path.join(path, name)).st_size for name in files)  # noqa: PTH118
    return size


def _is_used(folder: Path) -> bool:
    return bool(marked(f"VIRTUAL_ENV={folder}", process_table()))
