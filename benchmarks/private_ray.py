"""How long does a job with `ray: true` take to its first tasks, and how long two `ray start` by hand on this machine?

Both run the same program on two nodes with a CPU and a device each, in turn, and leave nothing. By hand everything is
as early as it can be: the second node starts when the head listens, the program when both were told to.

    python benchmarks/private_ray.py --n 10
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.local import local_cluster
from callboard.agents.ray.ray_command import SETTINGS, RayNodeSpec, free_port, ray_start
from callboard.client.client import Client

PROGRAM = """
import sys, time
import ray

ray.init(address="auto", log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(0.02)
where = ray.remote(num_gpus=1, num_cpus=1)(lambda: (time.sleep(0.2), ray.util.get_node_ip_address())[1])
assert len(set(ray.get([where.remote(), where.remote()]))) == 2
open(sys.argv[1], "w").write(str(time.time()))
"""
_STORE_BYTES = 1 << 30
_LOOK_S = 0.01


async def ours(client: Client, folder: Path, number: int) -> float:
    """Seconds from the submit to the answers of both tasks."""
    told = folder / f"ours-{number}"
    component = {
        "name": "main",
        "command": ["python", "-c", PROGRAM, str(told)],
        "ray": True,
        "workers": 2,
        "resources": {"cpu": 1, "gpu": 1},
    }
    began = time.time()
    handle = await client.submit({"name": f"job-{number}", "pool": "bench", "components": [component]})
    ended = await handle.finished(timeout=300)
    assert told.exists(), ended
    return float(told.read_text()) - began


async def by_hand(folder: Path, number: int) -> float:
    """Seconds from the first `ray start` to the same."""
    told = folder / f"hand-{number}"
    head = f"127.9.{number}.1:{free_port(f'127.9.{number}.1')}"
    environment = {**os.environ, **SETTINGS, "RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": head, "PYTHONUNBUFFERED": "1"}
    nodes: list[asyncio.subprocess.Process] = []
    began = time.time()
    try:
        for rank in range(2):
            temp = folder / f"{number}-{rank}"
            line = ray_start(
                RayNodeSpec(
                    node_id=f"rank-{rank}",
                    gcs_address=head,
                    head=rank == 0,
                    node_ip=f"127.9.{number}.{rank + 1}",
                    cpu_milli=1000,
                    gpus=1,
                    memory_bytes=_STORE_BYTES,
                    custom_milli={},
                    object_store_bytes=_STORE_BYTES,
                    port_base=None,
                    dashboard_port=None,
                    temp_dir=temp,
                    log=temp,
                    environment=environment,
                )
            )
            quiet = asyncio.subprocess.DEVNULL
            nodes.append(await asyncio.create_subprocess_exec(*line, env=environment, stdout=quiet, stderr=quiet))
            while not rank and not await _listens(head):  # noqa: ASYNC110 - a port tells nobody
                await asyncio.sleep(_LOOK_S)
        program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(told), env=environment)
        assert await program.wait() == 0
        return float(told.read_text()) - began
    finally:
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            await node.wait()


async def _listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def main(count: int) -> None:
    """Measure in turn, and print."""
    took: dict[str, list[float]] = {"by hand": [], "callboard": []}
    with tempfile.TemporaryDirectory(prefix="cb", dir="/tmp") as name:
        folder = Path(name)
        async with local_cluster(runtime="process", gpus=2, warm_spares=0) as local:
            await local.client.ensure_pool("bench", nominal={"cpu": 8})
            for number in range(1, count + 1):
                took["by hand"].append(await by_hand(folder, number))
                took["callboard"].append(await ours(local.client, folder, number))
                last = ", ".join(f"{who} {each[-1]:.2f} s" for who, each in took.items())
                print(f"{number}: {last}; load {os.getloadavg()[0]:.1f}", flush=True)
    medians = {who: statistics.median(each) for who, each in took.items()}
    for who, each in took.items():
        print(f"{who}: median {medians[who]:.2f} s, {min(each):.2f} to {max(each):.2f} s")
    print(f"{medians['callboard'] / medians['by hand']:.2f} ×")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="clusters of each kind")
    asyncio.run(main(parser.parse_args().n))
