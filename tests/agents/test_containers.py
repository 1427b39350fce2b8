"""Does a command run in a container as it would without, and end with it? Podman is a stand-in that detaches its
container as podman does: through a monitor that forks twice."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from callboard.agents.runtime import HostError
from callboard.agents.supplies.containers import Containers
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone
from tests.agents.test_worker_program import ended, running, until_absent
from tests.agents.test_workers import LONG_MS, ready, stopped
from tests.support.fake_controller import FakeController

PODMAN = """#!{python}
import os, subprocess, sys
log = open({log!r}, "a")
arguments = sys.argv[1:]
print(*arguments, sep="\\n", file=log, flush=True)
if "rm" in arguments:
    again = os.path.exists(log.name + ".rm")
    open(log.name + ".rm", "w").close()
    sys.exit(0 if again else 125)  # as where its monitor was killed
value = lambda name: arguments[arguments.index(name) + 1]
if "none" in arguments:
    print("Error: none: image not known", file=sys.stderr)
    sys.exit(125)
place = arguments.index("--entrypoint")
program = [arguments[place + 1], *arguments[place + 3:]]
names = [each.removeprefix("--env=") for each in arguments if each.startswith("--env=")]
env = {{"PATH": "/usr/bin:/bin", "STORE": os.environ["CONTAINERS_STORAGE_CONF"], "IMAGE": arguments[place + 2]}}
for name, _, said in (each.partition("=") for each in names):
    if said or name in os.environ:
        env[name] = said or os.environ[name]
read, write = os.pipe()
if os.fork() == 0:  # conmon: a session of its own, and nobody's child
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(read)
    done = subprocess.run(program, env=env, cwd=value("--workdir") if "--workdir" in arguments else "/", check=False)
    os.write(write, bytes([done.returncode % 256]))
    os._exit(0)
os.close(write)
sys.exit(os.read(read, 1)[0])
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def podman(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/podman").write_text(PODMAN.format(python=sys.executable, log=str(log)))
    (tmp_path / "bin/podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", "/node/storage.conf")


def said(log: Path) -> list[str]:
    """Arguments of the runtime, of all its calls."""
    return log.read_text().splitlines()


@pytest.mark.usefixtures("podman")
async def test_it_sees_what_other_commands_see_and_its_exit_code_counts(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, log: Path
) -> None:
    await start_agent()
    told = f"echo $IMAGE $STORE $RANK $CUDA_VISIBLE_DEVICES $A $PATH > {tmp_path}/said"
    text = f"{told}; echo x > $CALLBOARD_CHECKPOINT_DIR/c; exit 3"
    start = running("/bin/sh", "-c", text, container="rl:1", devices=("0",), env={"A": "secret", "PATH": "/mine"})
    await ready(controller, start)
    end = await ended(controller)
    assert end.exit_code == 3, end
    assert end.traceback.startswith("`/bin/sh -c"), "and not of the runtime"
    assert (tmp_path / "said").read_text() == "rl:1 /node/storage.conf 0 0 secret /mine\n"
    asked = said(log)
    assert not [each for each in asked if "secret" in each or "HOME" in each]
    stop = await stopped(controller, start, checkpoint=True)
    assert stop.checkpoint.data
    while said(log).count("rm") < 2:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("podman")
async def test_one_that_ignores_sigterm_in_a_detached_container_is_killed_and_proved_gone(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path
) -> None:
    await start_agent()
    os.mkfifo(tmp_path / "so-far")
    text = f"trap '' TERM; (setsid sleep 1000 & echo $$ $! > {tmp_path}/so-far); while :; do sleep 1000; done"
    start = running("/bin/sh", "-c", text, container="rl:1", start_timeout_ms=LONG_MS)
    await ready(controller, start)
    pids = [int(each) for each in (await asyncio.to_thread((tmp_path / "so-far").read_text)).split()]
    stop = await stopped(controller, start, cancel_timeout_ms=100)
    assert stop.outcome == agent_pb2.STOP_OUTCOME_KILLED
    assert all(map(is_gone, pids))


@pytest.mark.usefixtures("podman")
async def test_an_image_that_isnt_there_is_told_with_what_podman_says(
    start_agent: StartAgent, controller: FakeController
) -> None:
    await start_agent()
    await ready(controller, running("true", container="none"))
    end = await ended(controller)
    assert end.traceback.startswith(
        "`true` could not be run in its container (exit code 125): what its runtime says is"
    )
    assert end.stderr_tail == "Error: none: image not known"


@pytest.mark.parametrize(
    ("runtime", "why"),
    [("", "neither podman nor apptainer is in the PATH of its agent"), ("docker", "docker's daemon starts containers")],
)
async def test_a_node_without_a_runtime_refuses_by_name(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, runtime: str, why: str
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("env", "sh", *([runtime] if runtime else [])):
        (tmp_path / "bin" / name).symlink_to(shutil.which("true") or "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}/bin")
        await start_agent()
    failed = (await controller.do(start_worker=running("true", container="rl:1"))).worker_start_failed
    assert failed.message.startswith("container: rl:1: this node has no runtime for containers: ")
    assert why in failed.message
    assert "Install podman there" in failed.message
    await until_absent(tmp_path / "n0/output", "*/*/code")


def test_apptainer_is_asked_where_there_is_no_podman(tmp_path: Path) -> None:
    (tmp_path / "apptainer").touch(0o755)
    start = running("python", "train.py", container="docker://rl:1")
    plan = {"args": [["python", "train.py"]], "working_dir": "/run/code", "output": "/run", "env": {}}
    asked = Containers({"PATH": str(tmp_path)}).command(start, plan, "CALLBOARD_WORKER=x")
    assert asked == [
        f"{tmp_path}/apptainer", "exec", "--bind", "/run", "--pwd", "/run/code", "docker://rl:1", "python", "train.py",
    ]  # fmt: skip
    with pytest.raises(HostError, match="no runtime for containers"):
        Containers({"PATH": "/nowhere"}).command(start, plan, "CALLBOARD_WORKER=x")
