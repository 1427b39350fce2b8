"""Does a command or an actor run in a container as it would without, and end with it? Podman is a stand-in that
detaches its container as podman does, through a monitor that forks twice; where the real one works, it is asked, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.runtime import HostError
from callboard.agents.supplies.containers import Containers
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, until_gone
from tests.agents.test_adoption import Lineage, node
from tests.agents.test_package_cache import package
from tests.agents.test_worker_program import ended, running, until_absent
from tests.agents.test_workers import LONG_MS, ready, starting, stopped
from tests.support import images
from tests.support.fake_controller import FakeController

__all__ = ["node"]

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
if "bare" in arguments:
    print("Error: crun: executable file `python3` not found in $PATH", file=sys.stderr)
    sys.exit(127)
if "none" in arguments[arguments.index("--entrypoint"):]:
    print("Error: none: image not known", file=sys.stderr)
    sys.exit(125)
place = arguments.index("--entrypoint")
program = [arguments[place + 1], *arguments[place + 3:]]
if program[0] == "python3":
    program[0] = {python!r}
for each in (arguments[at + 1] for at, word in enumerate(arguments) if word == "--volume"):
    there, here = each.split(":")[:2]
    program = [there + word[len(here):] if word.startswith(here + "/") else word for word in program]
names = [each.removeprefix("--env=") for each in arguments if each.startswith("--env=")]
env = {{"PATH": "/usr/bin:/bin", "OF_IMAGE": "yes", "IMAGE": arguments[place + 2]}}
env["STORE"] = os.environ["CONTAINERS_STORAGE_CONF"]
for name, _, said in (each.partition("=") for each in names):
    if said or name in os.environ:
        env[name] = said or os.environ[name]
    elif name.endswith("*"):
        env |= {{each: os.environ[each] for each in os.environ if each.startswith(name[:-1])}}
read, write = os.pipe()
if os.fork() == 0:  # conmon: a session of its own, and nobody's child
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(read)
    done = subprocess.run(program, env=env, cwd=value("--workdir") if "--workdir" in arguments else "/", check=False,
                          pass_fds=[3] if "--preserve-fds" in arguments else [], start_new_session=True)
    os.write(write, bytes([done.returncode if done.returncode >= 0 else 128 - done.returncode]))
    os._exit(0)
os.close(write)
sys.exit(os.read(read, 1)[0])
"""


def stand_in(folder: Path, log: Path) -> None:
    """Put one into a folder."""
    folder.mkdir()
    (folder / "podman").write_text(PODMAN.format(python=sys.executable, log=str(log)))
    (folder / "podman").chmod(0o755)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def podman(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "bin", log)
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
    asked = Containers({"PATH": str(tmp_path)}, tmp_path).command(start, plan, "CALLBOARD_WORKER=x")
    assert asked == [
        f"{tmp_path}/apptainer", "exec", "--bind", "/run:/run", "--pwd", "/run/code", "docker://rl:1",
        "python", "train.py",
    ]  # fmt: skip
    with pytest.raises(HostError, match="no runtime for containers"):
        Containers({"PATH": "/nowhere"}, tmp_path).command(start, plan, "CALLBOARD_WORKER=x")


ACTOR = """
import json, os, subprocess, sys, threading, time
class Actor:
    def __init__(self, *args):
        self.args = args
    def setup(self, ctx):
        self.devices = ctx.devices
    def run(self):
        print(json.dumps([self.args, self.devices, dict(os.environ), os.getpid(), sys.path]), flush=True)
        threading.Event().wait()
    def seen(self):
        import ray
        return os.environ["OF_IMAGE"], os.getpid(), ray.get_gpu_ids()
    def checkpoint(self):
        return b"step 7"
class Stubborn:
    def __init__(self):
        self.child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; (sleep 1000 & echo $! $$); sleep 1000"],
                                      start_new_session=True)
    def run(self):
        threading.Event().wait()
    def cancel(self):
        time.sleep(1000)
class Dies:
    def run(self):
        print("no more", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def real_podman(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Its variables, where it works."""
    folder = tmp_path_factory.mktemp("podman")
    variables = images.settings(folder)
    if why := images.why_unusable(folder, variables):
        pytest.skip(why)
    return variables


@pytest.fixture(params=["stand-in", "real"])
def image(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image that has Python, for each podman."""
    if request.param == "stand-in":
        request.getfixturevalue("podman")
        return "rl:1"
    for name, value in request.getfixturevalue("real_podman").items():
        monkeypatch.setenv(name, value)
    return images.PYTHON


def actor(controller: FakeController, name: str, image: str, *args: object, **fields: Any) -> agent_pb2.StartWorker:
    """The start of an actor in a container, whose code comes along."""
    module, data = package(**{"in_image.py": ACTOR})
    controller.packages[module] = data
    start = starting("", *args, container=image, py_modules=[module], entry="run", **fields)
    start.actor = f"in_image:{name}"
    return start


async def printed(folder: Path, name: str = "stdout") -> list[str]:
    """What the worker of a node has printed, once it has."""

    def look() -> list[str]:
        return [text for each in folder.glob(f"output/*/*/{name}") if (text := each.read_text())]

    while not (found := await asyncio.to_thread(look)):  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)
    return found[0].split("\n")


async def test_an_actor_sees_its_image_and_what_other_actors_see_and_leaves_its_checkpoint(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, image: str
) -> None:
    await start_agent()
    start = actor(controller, "Actor", image, 3, devices=("1",), env={"A": "secret", "PYTHONHASHSEED": "7"})
    told = await ready(controller, start)
    assert (told.visible_devices, told.cold_reason) == ("1", "it runs in a container")
    args, devices, seen, pid, path = json.loads((await printed(tmp_path / "n0"))[0])
    assert (args, devices) == ([3], ["1"])
    assert (seen["A"], seen["RANK"], seen["CUDA_VISIBLE_DEVICES"], seen["PYTHONHASHSEED"]) == ("secret", "0", "1", "7")
    assert seen["OF_IMAGE"] == "yes"
    assert ("/run/callboard" in path) is (image == images.PYTHON), "the node's callboard, and nothing else of the node"
    assert seen["PATH"] != os.environ["PATH"], "it is the image's"
    assert not is_gone(pid), "it is known by the same pid everywhere"
    stop = await stopped(controller, start, checkpoint=True)
    assert stop.checkpoint.data == b"step 7"
    assert is_gone(pid)
    assert is_gone(told.pid)


async def test_an_actor_whose_cancel_hangs_is_killed_with_all_that_it_started_in_its_container(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, image: str
) -> None:
    await start_agent()
    start = actor(controller, "Stubborn", image, start_timeout_ms=LONG_MS)
    told = await ready(controller, start)
    children = [int(each) for each in (await printed(tmp_path / "n0"))[0].split()]
    assert not any(map(is_gone, [told.pid, *children]))
    stop = await stopped(controller, start, cancel_timeout_ms=100)
    assert stop.outcome == agent_pb2.STOP_OUTCOME_KILLED
    assert all(map(is_gone, [told.pid, *children]))


async def test_an_actor_that_dies_in_its_container_is_told_as_one_and_may_start_again(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, image: str
) -> None:
    await start_agent()
    for generation in (1, 2):
        await ready(controller, actor(controller, "Dies", image, generation=generation))
        exited = await controller.said("worker_exited", generation)
        assert "exit code 137; as a shell says SIGKILL" in exited.message
        assert exited.stderr_tail == "no more"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [("none", "it can't be run on this node: "), ("bare", "it has no python3 in its PATH, which hosts the actor")],
)
async def test_an_image_that_cant_host_an_actor_is_refused_in_one_line(
    start_agent: StartAgent, controller: FakeController, image: str, wrong: str, why: str
) -> None:
    await start_agent()
    name = {"none": "localhost/none", "bare": images.BARE}[wrong] if image == images.PYTHON else wrong
    failed = (await controller.do(start_worker=actor(controller, "Actor", name))).worker_start_failed
    assert failed.message.startswith(f"container: {name}: {why}")
    assert "\n" not in failed.message
    assert failed.failure == agent_pb2.START_FAILURE_HOST


@pytest.mark.parametrize(
    ("has", "ray", "why"),
    [
        ("3 9 -", "", "its python3 is Python 3.9; callboard needs 3.11 or newer there"),
        ("3 11 -", "2.60.0", "it has Python 3.11 and no Ray, but an actor in this node's Ray needs Python "),
        ("3 11 2.9.0", "2.60.0", "it has Python 3.11 and Ray 2.9.0, but an actor in this node's Ray needs Python "),
    ],
)
async def test_an_image_with_another_python_or_ray_is_refused_with_what_it_has(
    tmp_path: Path, has: str, ray: str, why: str
) -> None:
    (tmp_path / "podman").write_text(f"#!/bin/sh\necho {has}\n")
    (tmp_path / "podman").chmod(0o755)
    containers = Containers({"PATH": f"{tmp_path}:/bin"}, tmp_path, ray)
    with pytest.raises(HostError) as refused:
        await containers.check("rl:1", lambda _: None)
    assert why in str(refused.value)


async def test_an_actor_in_its_container_goes_on_under_the_next_agent_and_ends_without_one(
    controller: FakeController, node: Lineage, image: str
) -> None:
    await node.begin(successor_s=2)
    start = actor(controller, "Actor", image)
    told = await ready(controller, start)
    pid = json.loads((await printed(node.run_dir))[0])[3]
    await node.kill()
    session = await node.begin(successor_s=2)
    assert [(each.generation, each.pid) for each in session.hello.workers] == [(1, told.pid)]
    await node.kill()
    await until_gone(pid)
    await until_gone(told.pid)
