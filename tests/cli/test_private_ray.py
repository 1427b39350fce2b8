"""Has a job with `ray: true` a Ray cluster of its own, with its devices and nothing left? Real Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from callboard.client import LogLine
from callboard.client.jobs import JobHandle, exec_session
from callboard.v1.job_pb2 import JobState, Worker, WorkerState
from tests.cli.cluster import RealCluster, real_cluster
from tests.cli.test_exec import Ended, at_terminal
from tests.cli.test_running import ran, started, until_line

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


class Held:
    """What the workers of a cluster hold on this machine, to be looked for when they have ended."""

    def __init__(self) -> None:
        self.processes: dict[psutil.Process, str] = {}
        self.ports: set[str] = set()
        self.files: set[Path] = set()
        self.sockets: set[Path] = set()
        self._before = _of_ray()

    def look(self, cluster: RealCluster) -> None:
        """Add what they hold now."""
        listening = _listening()
        for pid in cluster.processes():
            # A process that ends meanwhile holds nothing.
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                process, folder = psutil.Process(pid), Path(f"/proc/{pid}")
                self.processes[process] = " ".join(process.cmdline())
                opened = {str(each.readlink()) for each in (folder / "fd").iterdir()}
                self.ports |= {listening[each] for each in opened if each in listening}
                mapped = {line[line.index("/") :] for line in _lines(folder / "maps") if "/" in line}
                self.files |= {
                    Path(each) for each in opened | mapped if each.startswith(("/tmp/callboard-", "/dev/shm"))
                }
        for folder in _of_ray() - self._before:
            self.files |= {folder, *folder.rglob("*")}
        self.files = {each for each in self.files if each.exists()}
        self.sockets |= {each for each in self.files if each.is_socket()}

    def left(self) -> list[str]:
        """What is still there."""
        files = {each for each in self.files if each.exists()} | (_of_ray() - self._before)
        running = [line for process, line in self.processes.items() if process.is_running()]
        return [*running, *sorted(self.ports & set(_listening().values())), *sorted(map(str, files))]

    async def gone(self) -> None:
        """Until nothing of it is left: an agent deletes folders beside everything else."""
        assert any("gcs_server" in each for each in self.processes.values())
        assert self.ports
        assert self.sockets, "seen while they were there"
        while await asyncio.to_thread(self.left):  # noqa: ASYNC110 - a process table tells nobody
            await asyncio.sleep(0.05)


def _of_ray() -> set[Path]:
    """Folders of private clusters, what Ray makes where nobody says where, and its shared memory."""
    names = (
        ("/tmp", "callboard-????????????????????"),
        ("/tmp", "ray*"),
        ("/dev/shm", "*plasma*"),
        ("/dev/shm", "ray*"),
    )
    return {path for folder, name in names for path in Path(folder).glob(name)}


def _listening() -> dict[str, str]:
    """Ports of this machine with the number of their socket, which no other gets, by what a descriptor is called."""
    found = {}
    for kind in ("tcp", "tcp6"):
        for line in _lines(Path("/proc/net") / kind)[1:]:
            _, address, _, state, *_ = words = line.split()
            if state == "0A":
                found[f"socket:[{words[9]}]"] = f"{kind} {address} {words[9]}"
    return found


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()


GROWS = """
import os, signal, sys, time
import ray

ray.init(address="auto", log_to_driver=False)
double = ray.remote(lambda x: 2 * x)
file = os.environ["CALLBOARD_CHECKPOINT_DIR"] + "/state"
if os.path.exists(file):
    print("goes on at", open(file).read())
    sys.exit(0)

def save(*_):
    open(file, "w").write(str(ray.get(double.remote(21))))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
seen = 0
while True:
    there = sum(each["Alive"] for each in ray.nodes())
    if there != seen:
        print("with", there, flush=True)
    seen = there
    time.sleep(0.1)
"""


async def test_an_elastic_cluster_grows_shrinks_and_is_stopped_while_its_ray_lives_and_leaves_nothing(
    cluster: RealCluster,
) -> None:
    await cluster.add_node("n1")
    held = Held()
    line = ("--nodes", "1:2", "--gpus-per-node", "1", "--ray", "--detach", "--name", "grows")
    assert (await ran(cluster, *line, "--", "python", "-c", GROWS)).exit_code == 0
    handle = await cluster.client.get_job("grows")
    lines = handle.logs(follow=True)
    await until_said(lines, "with 2")
    await asyncio.to_thread(held.look, cluster)
    await handle.scale("main", 1)
    await until_said(lines, "with 1")
    # A program beside it is in the same cluster, also with a terminal.
    joins = "import ray; ray.init(address='auto', log_to_driver=False); print(ray.get(ray.remote(lambda: 7).remote()))"
    done = await handle.exec(["python", "-c", joins])
    assert (done.exit_code, done.stdout) == (0, b"7\n"), done
    terminal = await at_terminal(
        cluster, "exec", handle.name, "-it", "--", "sh", "-c", 'test -n "$RAY_ADDRESS" && stty size && exit 3'
    )
    assert (await terminal.ended())[0] == 3
    script = "trap 'exit 5' TERM HUP; echo up; while :; do sleep 0.05; done"
    beside = exec_session(handle, ["bash", "-c", script], component="main")
    ended = Ended(beside)
    assert await ended.first == b"up\n"
    await handle.preempt(reason="for the test")
    await until_said(lines, "goes on at 42")
    done = await ended
    assert (done.exit_code, done.reason) == (5, "its worker is being stopped"), "asked before it is killed"
    await handle.finished(timeout=100)
    assert handle.state == "SUCCEEDED"
    await held.gone()


MOVES = """
import sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

ray.init(address="auto", log_to_driver=False)
known = {ray.get_runtime_context().get_node_id()}

@ray.remote(num_cpus=0)
def hold(up, go):
    open(up, "w").close()
    return open(go).read()

@ray.remote(num_cpus=0)
def where():
    return ray.get_runtime_context().get_node_id()

def newcomer():
    while not (found := {each["NodeID"] for each in ray.nodes() if each["Alive"]} - known):
        time.sleep(0.1)
    (node,) = found
    known.add(node)
    return At(node, soft=False)

print(ray.get(hold.options(scheduling_strategy=newcomer()).remote(*sys.argv[1:])), flush=True)
for turn in ("first", "second"):
    ray.get(where.options(scheduling_strategy=newcomer()).remote())
    print("works on the", turn, "replacement", flush=True)
"""


async def test_a_busy_node_that_is_drained_ends_its_work_and_is_replaced_as_a_lost_one_is(tmp_path: Path) -> None:
    for name in ("up", "go"):
        os.mkfifo(tmp_path / name)
    async with real_cluster(tmp_path, "n0", "n1", "n2", lease_ms=5_000, heartbeat_ms=1_000) as cluster:
        await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})
        await cluster.client.set_policy({"cancel_timeout": "10m", "kill_timeout": "1s"})
        line = ("--nodes", "1:2", "--gpus-per-node", "1", "--ray", "--detach", "--name", "moves")
        gates = (str(tmp_path / "up"), str(tmp_path / "go"))
        assert (await ran(cluster, *line, "--", "python", "-c", MOVES, *gates)).exit_code == 0
        handle = await cluster.client.get_job("moves")
        lines = handle.logs(follow=True)
        await asyncio.to_thread((tmp_path / "up").read_text)

        drained = (await second_of(handle)).allocation.node_id
        await cluster.client.drain_node(drained, reason="for the test")
        stopping = WorkerState.WORKER_STATE_STOPPING
        await handle.until(lambda job: stopping in {each.state for each in job.workers}, "a stop")
        await asyncio.to_thread((tmp_path / "go").write_text, "ended in peace")
        await until_said(lines, "ended in peace")
        await until_said(lines, "works on the first replacement")
        await cluster.client.uncordon_node(drained)
        lost = (await second_of(handle)).allocation.node_id
        assert lost != drained
        await cluster.kill_node(lost)
        await until_said(lines, "works on the second replacement")
        assert (await handle.finished(timeout=60)).attempt == 1
        assert handle.state == "SUCCEEDED"


async def second_of(handle: JobHandle) -> Worker:
    """The worker that is not the head."""
    return next(each for each in (await handle.refresh()).workers if each.key.rank == 1)


async def until_said(lines: AsyncIterator[LogLine], text: str) -> None:
    async for line in lines:
        if line.text == text:
            return
    raise AssertionError(f"it never said {text!r}")


COUNTS = """
import os, signal, sys
import ray

ray.init(address="auto", log_to_driver=False)

@ray.remote(num_gpus=1, num_cpus=0)
def device():
    return ray.util.get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]

gpus = int(ray.cluster_resources()["GPU"])
seen = set(ray.get([device.remote() for _ in range(gpus)]))
file = os.path.join(os.environ["CALLBOARD_CHECKPOINT_DIR"], "step")
step = int(open(file).read()) if os.path.exists(file) else 0
print("from", step, "on", len(ray.nodes()), "with", gpus, sorted({each for _, each in seen}), flush=True)
if step or sys.argv[1] == "once":
    sys.exit(0)

def save(*_):
    open(file, "w").write("7")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
while True:
    signal.pause()
"""


@pytest.mark.timeout(600)  # five private clusters start in it: 92 s alone, 350 s beside four other suites
async def test_of_two_clusters_each_sees_its_devices_one_yields_to_a_third_and_goes_on_and_a_lost_node_ends_the_other(
    tmp_path: Path,
) -> None:
    held = Held()
    async with real_cluster(tmp_path, "n0", "n1", lease_ms=5_000, heartbeat_ms=1_000) as cluster:
        await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})
        line = ("--nodes", "2", "--ray", "--gpus-per-node", "1", "--priority")
        program = ("--", "python", "-c", COUNTS)
        stays, yields = [
            await started(cluster, *line, priority, "--name", name, *program, "on")
            for name, priority in (("stays", "5"), ("yields", "4"))
        ]
        first = await asyncio.gather(*(until_line(each.stdout, "from") for each in (stays, yields)))
        assert sorted(first) == [f"from 0 on 2 with 2 ['{device}']\n" for device in "01"]
        await asyncio.to_thread(held.look, cluster)
        urgent = await ran(cluster, *line, "9", "--name", "urgent", *program, "once")
        assert (urgent.exit_code, urgent.stdout) == (0, first[1]), "on the devices of the one that yielded"
        again = await until_line(yields.stdout, "from")
        assert again == first[1].replace("from 0", "from 7"), "on the same devices, from where it had stopped"
        assert await yields.wait() == 0
        handle = await cluster.client.get_job("yields")
        assert (handle.job.attempt, handle.job.preemptions) == (2, 1)

        other = await cluster.client.get_job("stays")
        lost = (await second_of(other)).allocation.node_id
        await cluster.kill_node(lost)
        await other.until(lambda job: job.state == JobState.JOB_STATE_PENDING, "the end of the attempt")
        assert lost in other.job.state_reason
        await cluster.add_node(lost)
        again = await until_line(stays.stdout, " on 2 with ")  # Ray warns of its dead node on standard output, too
        seen = [f"from 7 on 2 with 2 ['{device}']\n" for device in "01"]  # on either: the other cluster is gone
        assert again in seen, "a new cluster on both, and from where it had stopped"
        assert await stays.wait() == 0
        assert (await other.refresh()).attempt == 2
        await held.gone()
