"""Are Python environments built once, whole or not at all, and does what runs in them see them?"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import platform
import sys
import tarfile
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.supplies.build_failures import reason_of
from callboard.agents.supplies.environments import EnvironmentFailed, Environments, _steps
from callboard.agents.supplies.package_cache import Packages, _name_of
from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.agents.system.processes import MachineProcesses
from callboard.client.packing import pack_project, pack_requirements
from callboard.security.processes import marked, process_table
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, until_gone
from tests.agents.test_worker_program import ended, shell, until_absent
from tests.agents.test_workers import ready, stopped
from tests.support.fake_controller import FakeController, start_worker
from tests.support.wheels import wheel

UV = """#!/bin/sh
# A stand-in for uv: makes an environment of links, and says and does what the requirements say.
if [ "$1" = venv ]; then
    mkdir -p "$4/bin" "$4/lib/python3.99/site-packages" && ln -s "$3" "$4/bin/python"
else
    echo "begun $$" >> {log}
    . ./callboard-requirements.txt
fi
"""
"""The stand-in's requirements are lines of a shell."""


class Files(Packages):
    """Packages that need no controller: what is unpacked is the requirements that are the name."""

    def __init__(self) -> None:
        """Nothing is kept."""

    async def unpack(self, package: str, target: Path) -> None:
        await asyncio.to_thread(target.mkdir, parents=True)
        (target / "callboard-requirements.txt").write_text(package)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
async def made(tmp_path: Path, log: Path) -> AsyncIterator[Callable[..., Environments]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV.format(log=log))
    (tmp_path / "bin/uv").chmod(0o755)
    marker = f"{AGENT_MARKER}={tmp_path}"
    processes = MachineProcesses(marker)
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", AGENT_MARKER: str(tmp_path)}

    def make(**bounds: Any) -> Environments:
        return Environments(tmp_path / "environments", Files(), processes, variables, **bounds)

    yield make
    processes.close()


def nobody(_: str) -> None:
    """Is told."""


def begun(log: Path) -> list[int]:
    """Pids of the builds."""
    return [int(line.split()[1]) for line in log.read_text().splitlines()] if log.exists() else []


async def until_begun(log: Path, count: int) -> list[int]:
    while len(pids := begun(log)) < count:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)
    return pids


async def test_all_who_want_one_at_a_time_wait_for_one_build_and_are_told_what_for(
    made: Callable[..., Environments], log: Path, tmp_path: Path
) -> None:
    environments = made()
    os.mkfifo(tmp_path / "go")
    told: list[str] = []
    waiting = [
        asyncio.create_task(environments.get(f"requirements:echo collecting; cat {tmp_path}/go", told.append))
        for _ in range(20)
    ]
    await until_begun(log, 1)
    waiting[0].cancel()
    await asyncio.to_thread((tmp_path / "go").write_text, "")
    built = await asyncio.gather(*waiting[1:])
    assert len({each.folder for each in built}) == len(begun(log)) == 1
    assert len(told) >= 20
    assert told[0].startswith("builds the environment, 0 s: ")
    await environments.get(f"requirements:echo collecting; cat {tmp_path}/go", told.append)
    assert len(begun(log)) == 1
    assert (built[0].folder / "lib/python3.99/site-packages/callboard_base.pth").exists()


async def test_a_build_that_fails_tells_its_end_and_the_next_one_begins_anew(
    made: Callable[..., Environments], log: Path, tmp_path: Path
) -> None:
    environments = made()
    text = f"seq 100000; echo 'ERROR: nobody knows why for nopkg'; test -e {tmp_path}/now"
    for turn in (1, 2):
        with pytest.raises(EnvironmentFailed, match="exit code 1: ERROR: nobody knows why") as caught:
            await environments.get(f"requirements:{text}", nobody)
        assert len(caught.value.log) <= 16 << 10
        assert caught.value.log.endswith("for nopkg")
        assert len(begun(log)) == turn
        assert list((tmp_path / "environments").iterdir()) == []
    (tmp_path / "now").touch()
    await environments.get(f"requirements:{text}", nobody)


@pytest.mark.parametrize("given_up", [True, False])
async def test_a_build_that_takes_too_long_or_that_nobody_waits_for_ends_with_all_it_started(
    made: Callable[..., Environments], log: Path, tmp_path: Path, given_up: bool
) -> None:
    environments = made(timeout_s=60.0 if given_up else 1.0)
    text = f"trap '' TERM; (setsid sleep 1000 & echo begun $! >> {log}); sleep 1000"
    waiting = asyncio.create_task(environments.get(f"requirements:{text}", nobody))
    pids = await until_begun(log, 2)
    if given_up:
        waiting.cancel()
        again = asyncio.create_task(environments.get(f"requirements:{text}", nobody))
        pids += (await until_begun(log, 4))[2:]
        assert not [pid for pid in pids[:2] if not is_gone(pid)], "the first has ended before the second begins"
        again.cancel()
    else:
        with pytest.raises(EnvironmentFailed, match="it was not done after 1 s: uv pip install"):
            await waiting
    for pid in pids:
        await until_gone(pid)
    await until_absent(tmp_path / "environments", "*")


async def test_what_an_agent_left_half_done_is_no_environment(
    made: Callable[..., Environments], log: Path, tmp_path: Path
) -> None:
    built = await made().get("requirements:true", nobody)
    (marker,) = (tmp_path / "environments").glob("*/callboard.json")
    marker.unlink()
    (built.folder / "half").touch()
    assert (await made().get("requirements:true", nobody)) == built
    assert len(begun(log)) == 2
    assert not (built.folder / "half").exists()


async def test_the_longest_unused_goes_first_and_none_that_a_process_runs_in(
    made: Callable[..., Environments], tmp_path: Path
) -> None:
    environments = made(kept_bytes=0)
    used, old, young = [await environments.get(f"requirements:true {each}", nobody) for each in "123"]
    for each in (used, old):
        os.utime(each.folder.parent / "callboard.json", (1, 1))
    living = await asyncio.create_subprocess_exec("/bin/sleep", "1000", env={"VIRTUAL_ENV": str(used.folder)})
    await environments.get("requirements:true 4", nobody)
    assert [each.folder.exists() for each in (used, old, young)] == [True, False, True]
    living.kill()
    await living.wait()


async def test_a_conda_environment_is_found_by_its_name_and_told_where_there_is_none(
    made: Callable[..., Environments], tmp_path: Path
) -> None:
    environments = made()
    with pytest.raises(EnvironmentFailed, match="env: conda: rl: this node has no conda: neither conda, mamba nor"):
        await environments.get("conda:rl", nobody)
    (tmp_path / "envs/rl/bin").mkdir(parents=True)
    (tmp_path / "envs/rl/bin/python").symlink_to(sys.executable)
    said = json.dumps({"envs": ["/a/another", f"{tmp_path}/envs/rl"]})
    (tmp_path / "bin/mamba").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "bin/mamba").chmod(0o755)
    found = await environments.get("conda:rl", nobody)
    assert (found.folder, found.variables) == (tmp_path / "envs/rl", {"CONDA_PREFIX": f"{tmp_path}/envs/rl"})
    with pytest.raises(
        EnvironmentFailed,
        match=r"other is not an .* it has another, rl\. Name one of these, create it there \(`mamba create -n other",
    ):
        await environments.get("conda:other", nobody)
    for key in ("root_prefix", "base environment"):  # conda's word and micromamba's
        info = json.dumps({key: f"{tmp_path}/envs/rl"})
        (tmp_path / "bin/mamba").write_text(f"#!/bin/sh\n[ $1 = info ] && echo '{info}' || echo '{said}'\n")
        assert (await environments.get("conda:base", nobody)).folder == tmp_path / "envs/rl", "lists are sorted"
    (tmp_path / "bin/mamba").write_text("#!/bin/sh\necho '{}'\n")
    for name in ("rl", "base"):
        with pytest.raises(EnvironmentFailed, match="mamba told nothing of its environments: KeyError"):
            await environments.get(f"conda:{name}", nobody)
    (tmp_path / "bin/mamba").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EnvironmentFailed, match="gave no answer that can be read"):
        await environments.get("conda:rl", nobody)


def requirements(folder: Path, *lines: str) -> tuple[str, bytes]:
    """The package of a requirements file, beside wheels."""
    (folder / "dev.txt").write_text("\n".join(("--no-index", "--find-links ./wheels", *lines)) + "\n")
    file = BytesIO()
    return pack_requirements(folder / "dev.txt", file, "env.requirements"), file.getvalue()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A project with two wheels beside it."""
    folder = tmp_path / "project"
    for version in ("1.0", "2.0"):
        wheel(folder / "wheels", "tool", version)
    (folder / "requirements.txt").write_text("tool<2 ; python_version > '3'\n")
    return folder


def test_what_requirements_name_travels_and_what_is_elsewhere_is_refused(here: Path) -> None:
    name, data = requirements(
        here, "-r requirements.txt", "numpy  # x", "a[b]==1 ; sys_platform == 'x'", "x @ https://e/x"
    )
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        assert archive.getnames() == [
            "callboard-requirements.txt", "requirements.txt", "wheels/tool-1.0-py3-none-any.whl",
            "wheels/tool-2.0-py3-none-any.whl",
        ]  # fmt: skip
    assert requirements(here, "-r requirements.txt", "numpy  # y")[0] != name
    for line, why in (
        ("-r ../other.txt", "is not below its folder"),
        ("-c none.txt", "isn't there"),
        ("./no", "isn't"),
    ):
        with pytest.raises(ValueError, match=why):
            requirements(here, line)
    project = (
        "[project]\nname = 'p'\n[tool.uv]\nfind-links = ['wheels']\nsources = {a = {path = 'PATH'}, b = {git = 'x'}}\n"
    )
    (here / "pyproject.toml").write_text(project.replace("PATH", "wheels"))
    file = BytesIO()
    pack_project(here, file, "env.uv")
    with tarfile.open(fileobj=BytesIO(file.getvalue())) as archive:
        assert [Path(name).parent.name for name in archive.getnames()] == ["", "wheels", "wheels"]
    for content, why in (
        (project.replace("PATH", "../a"), "isn't below its folder"),
        ("[tool]", "with a .project."),
        ("[", "toml"),
    ):
        (here / "pyproject.toml").write_text(content)
        with pytest.raises(ValueError, match=why):
            pack_project(here / "pyproject.toml", BytesIO(), "env.uv")


@pytest.mark.timeout(180)
async def test_commands_and_actors_run_in_the_environment_that_pip_builds(
    start_agent: StartAgent, controller: FakeController, here: Path, tmp_path: Path
) -> None:
    """The real pip, without an index. The second start waits for no build, and a command may take a spare."""
    await start_agent()
    name, data = requirements(here, "-r requirements.txt")
    controller.packages[name] = data
    text = f"(tool-says; command -v python; python -c 'import tool; print(tool.VERSION)') > {tmp_path}/said"
    start = shell(text, environment=f"requirements:{name}")
    await ready(controller, start)
    assert (await ended(controller)).succeeded
    said = (tmp_path / "said").read_text().splitlines()
    assert (said[0], said[2]) == ("tool 1.0", "1.0")
    assert "/environments/" in said[1]
    progress = [each.worker_progress.message for each in controller.reports if each.HasField("worker_progress")]
    assert progress[0].startswith("builds the environment, 0 s: ")
    await stopped(controller, start)
    actor = start_worker("Plain", generation=2, environment=f"requirements:{name}")
    told = await ready(controller, actor)
    assert told.cold_reason == "it has a Python environment of its own"
    assert len([each for each in controller.reports if each.HasField("worker_progress")]) == len(progress)
    (folder,) = (tmp_path / "n0/environments").iterdir()
    seen = marked(f"VIRTUAL_ENV={folder}/venv", process_table())
    assert told.pid in {each.pid for each in seen}
    await stopped(controller, actor)


@pytest.mark.timeout(120)
async def test_a_build_that_fails_is_the_reason_of_the_start_and_what_it_says_to_do_helps(
    start_agent: StartAgent, controller: FakeController, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real pip; the log travels along, and its place is named."""
    monkeypatch.setenv("PIP_RETRIES", "1")
    await start_agent()
    generations = itertools.count(1)

    def start(*lines: str) -> agent_pb2.StartWorker:
        (here / "wants.txt").write_text("\n".join(lines) + "\n")
        file = BytesIO()
        name = pack_requirements(here / "wants.txt", file, "env.requirements")
        controller.packages[name] = file.getvalue()
        return shell("true", generation=next(generations), environment=f"requirements:{name}")

    no_index = "--index-url http://127.0.0.1:9/simple --trusted-host 127.0.0.1"
    bring_wheels = ["--no-index", "--find-links ./wheels"]
    for lines, why, remedy in (
        ([no_index, "tool"], "http://127.0.0.1:9/simple can't be reached", "`--no-index` and `--find-links ./wheels`"),
        ([*bring_wheels, "tool==3"], "there is no tool==3: the last versions are 1.0, 2.0", "name one of these"),
    ):
        failed = (await controller.do(start_worker=start(*lines))).worker_start_failed
        assert failed.message.startswith(f"the environment can't be built on this node: {why}")
        assert remedy in failed.message
        assert failed.message.endswith(". The end of its log: `callboard job logs job-1`")
        assert "ERROR: " in failed.stderr_tail
    await ready(controller, start(*bring_wheels, "tool==2.0"))


@pytest.mark.timeout(120)
async def test_a_project_is_built_by_pip_in_the_versions_of_its_lock_where_there_is_no_uv(
    tmp_path: Path, here: Path
) -> None:
    (here / "pyproject.toml").write_text("[project]\nname = 'p'\nversion = '1'\ndependencies = ['tool']\n")
    (here / "uv.lock").write_text(
        "version = 1\n[[package]]\nname = 'tool'\nversion = '1.0'\nsource = { registry = 'x' }\n"
        "[[package]]\nname = 'p'\nversion = '1'\nsource = { virtual = '.' }\n"
    )
    file = BytesIO()
    name = pack_project(here, file, "env.uv")
    (tmp_path / "packages").mkdir()
    kept = tmp_path / "packages" / name.partition(":")[2]
    kept.write_bytes(file.getvalue())
    assert _name_of(kept) == name
    processes = MachineProcesses(f"{AGENT_MARKER}={tmp_path}")
    variables = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(here / "wheels")}
    no_network: Any = None
    packages = Packages(tmp_path / "packages", no_network)
    built = await Environments(tmp_path / "e", packages, processes, variables).get(f"uv:{name}", nobody)
    processes.close()
    asked = await asyncio.create_subprocess_exec(
        built.python, "-c", "import tool; print(tool.VERSION)", stdout=asyncio.subprocess.PIPE
    )
    assert (await asked.communicate())[0] == b"1.0\n"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (">=3.99", "the project needs Python >=3.99, and the node has "),
        ("<3", "the project needs Python <3, and the node has "),
        ("about 3", "Invalid specifier: 'about 3'"),
        (">=3.8,<4", ""),
    ],
)
async def test_a_project_for_another_python_is_refused_where_there_is_no_uv(
    tmp_path: Path, wanted: str, why: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'p'\nrequires-python = '{wanted}'\n")
    with pytest.raises(ValueError, match="3") if why else contextlib.nullcontext() as caught:
        _steps("uv", tmp_path, tmp_path / "venv", None)
    if caught is not None:
        said = str(caught.value)
        assert (reason_of(said, platform.python_version()) or said).startswith(why)


async def test_a_python_requirement_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'p'\nrequires-python = [3, 12]\n")
    with pytest.raises(ValueError, match="Invalid specifier"):
        _steps("uv", tmp_path, tmp_path / "venv", None)
