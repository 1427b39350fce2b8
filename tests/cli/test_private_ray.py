"""Has a job with `ray: true` a Ray cluster of its own, with its devices and nothing left? Real Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tests.cli.cluster import RealCluster
from tests.cli.test_running import ran, started, until_line

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SEES = """
import ray, os, sys, time
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_gpus=1, num_cpus=0)
def device():
    time.sleep(0.5)
    return ray.util.get_node_ip_address(), os.environ["CUDA_VISIBLE_DEVICES"]

count = int(sys.argv[1])
print(len(ray.nodes()), int(ray.cluster_resources()["GPU"]), len(set(ray.get([device.remote() for _ in range(count)]))))
print(sorted(seen for _, seen in ray.get([device.remote() for _ in range(count)])))
"""


def left() -> list[str]:
    """Folders of private clusters, and processes of Ray in them."""
    folders = [str(path) for path in Path("/tmp").glob("callboard-????????????????????")]
    running = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    return folders + [" ".join(line) for line in running if line and any("/tmp/callboard-" in part for part in line)]


async def until_left(before: list[str]) -> None:
    """Until nothing more is left than before: an agent deletes folders beside everything else."""
    while set(await asyncio.to_thread(left)) - set(before):  # noqa: ASYNC110 - a process table tells nobody
        await asyncio.sleep(0.05)


async def test_two_clusters_at_once_on_the_same_nodes_see_only_their_devices(cluster: RealCluster) -> None:
    await cluster.add_node("n1")
    before = left()
    program = ("--nodes", "2", "--gpus-per-node", "1", "--ray")
    first, second = await asyncio.gather(
        *(ran(cluster, *program, "--name", name, "--", "python", "-c", SEES, "2") for name in ("first", "second"))
    )
    for done in (first, second):
        assert done.exit_code == 0, done
        assert done.stdout.splitlines()[0] == "2 2 2"
    assert {first.stdout.splitlines()[1], second.stdout.splitlines()[1]} == {"['0', '0']", "['1', '1']"}
    await until_left(before)


async def test_a_stop_reaches_the_command_while_its_ray_lives_and_leaves_nothing(
    cluster: RealCluster, tmp_path: Path
) -> None:
    before = left()
    saves = (
        "import ray, os, signal, sys\n"
        "ray.init(address='auto', log_to_driver=False)\n"
        "double = ray.remote(lambda x: 2 * x)\n"
        "file = os.environ['CALLBOARD_CHECKPOINT_DIR'] + '/state'\n"
        "step = int(open(file).read()) if os.path.exists(file) else 0\n"
        "if step: print('goes on at', step); sys.exit(0)\n"
        "def save(*_):\n"
        "    open(file, 'w').write(str(ray.get(double.remote(21)))); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('up', flush=True)\n"
        "while True: signal.pause()\n"
    )
    running = await started(cluster, "--ray", "--name", "saves", "--", "python", "-c", saves)
    await until_line(running.stdout, "up")
    handle = await cluster.client.get_job("saves")
    await handle.preempt(reason="for the test")
    assert await until_line(running.stdout, "goes on") == "goes on at 42\n"
    assert await running.wait() == 0
    await until_left(before)
