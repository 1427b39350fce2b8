"""A network that is cut, in namespaces of its own: between an agent and its controller, a leader and its database, or a
leader and a standby.

    unshare --net python -m tests.recovery.partition FOLDER agent|database|standby up|down|both

Run in a new network namespace, which only this program uses. It makes another one, for the node ``far``, the leader or
the standby, and cables between the two; all others are on this side. A cable is cut by sending to an address that
nobody has: packets vanish, and nobody is told, in the one direction, the other, or both.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio

from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.security.dialing import open_channel
from callboard.v1 import pool_pb2_grpc
from callboard.v1.job_pb2 import JobState, Worker, WorkerState
from callboard.v1.node_pb2 import NodeState
from callboard.wire.errors import parse_error
from tests.controller.support import pool
from tests.recovery.programs import DOWN, UP, Agent
from tests.support.controller_process import ControllerProcess
from tests.support.members import LEASE_MS, Members, more_than, until, writers
from tests.support.postgres import Postgres

HERE, THERE = "10.99.0.1", "10.99.0.2"
HERE_TOO, THERE_TOO = "10.99.1.1", "10.99.1.2"
NOBODY = "02:00:00:00:00:99"
WAIT_S = 90.0


def ip(*arguments: str, of: int | None = None) -> str:
    """Runs `ip`, in the namespace of a process or in this one."""
    where = () if of is None else ("nsenter", "--net", f"--target={of}")
    return subprocess.run([*where, "ip", *arguments], check=True, capture_output=True, text=True).stdout


class Far:
    """The other side, as a process that does nothing there."""

    def __init__(self) -> None:
        ip("link", "set", "lo", "up")
        self._process = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{self.pid}/ns/net").readlink() == own:
            time.sleep(0.005)  # Until it has left ours, which it tells nobody.
        ip("link", "set", "lo", "up", of=self.pid)

    @property
    def pid(self) -> int:
        """Of that process."""
        return self._process.pid

    @property
    def within(self) -> tuple[str, ...]:
        """The command that becomes a program of that side."""
        return ("nsenter", "--net", f"--target={self.pid}")

    def end(self) -> None:
        """Ends that side, and its cables."""
        self._process.kill()
        self._process.communicate()


class Cable:
    """One between the two sides."""

    def __init__(self, far: Far, here: str = HERE, there: str = THERE) -> None:
        self._far, self._here, self._there = far.pid, here, there
        self._name = f"cable{here.split('.')[2]}"
        ip("link", "add", self._name, "type", "veth", "peer", "name", self._name, "netns", str(far.pid))
        for of, address in ((None, here), (far.pid, there)):
            ip("address", "add", f"{address}/30", "dev", self._name, of=of)
            ip("link", "set", self._name, "up", of=of)

    def cut(self, *directions: str) -> None:
        """Lets packets vanish; "up" is from the far side to this one."""
        for direction, to, of in ((UP, self._here, self._far), (DOWN, self._there, None)):
            if direction in directions:
                ip("neigh", "replace", to, "lladdr", NOBODY, "dev", self._name, "nud", "permanent", of=of)

    def mend(self) -> None:
        """Lets packets through again."""
        for to, of in ((self._here, self._far), (self._there, None)):
            ip("neigh", "flush", "to", to, "dev", self._name, "nud", "permanent", of=of)


def ready(job: JobHandle) -> Worker:
    """Its only worker that is ready."""
    (worker,) = [each for each in job.job.workers if each.state == WorkerState.WORKER_STATE_READY]
    return worker


def lives(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def submitted(client: Client, folder: Path, name: str) -> JobHandle:
    """A job that is on the far node, and would go to the near one."""
    spec: dict[str, Any] = {
        "name": name,
        "pool": "p",
        "components": [_part(folder) | {"node_selector": {"side": "far"}, "node_selector_soft": True}],
        "restart": {"max_restarts": 20},
        "fencing": "strict",
        "wait_for_nodes": "1h",
    }
    job = await client.submit(spec)
    await job.running(WAIT_S)
    assert ready(job).allocation.node_id == "far", ready(job)
    return job


async def until_node(client: Client, node: str, *states: NodeState.ValueType) -> None:
    """Waits until a node is in one of these states."""
    async for event in client.watch(start_revision=1, types=["node."]):
        if event.subject == f"nodes/{node}" and (await client.get_node(node)).state in states:
            return


async def agent(folder: Path, far: Far, directions: tuple[str, ...]) -> None:
    """A job of a node that is cut off recovers elsewhere once its old copy has stopped, and the node heals."""
    (folder / "devices").mkdir(parents=True)
    cable = Cable(far)
    options = ("--insecure", "--lease-ms=2000", "--heartbeat-ms=500", "--reconcile-grace-ms=3000")
    controller = ControllerProcess(folder / "state", *options, listen=f"{HERE}:7700")
    agents = [
        Agent(folder, node, None, f"{HERE}:7700", {"labels": {"side": node}}, within=within)
        for node, within in (("far", far.within), ("near", ()))
    ]
    try:
        async with controller, Client(f"{HERE}:7700") as client:
            for agent in agents:
                agent.wanted = True
                await agent.ensure()
                await until_node(client, agent.node, NodeState.NODE_STATE_READY)
            await client.set_policy({"cancel_timeout": 0.3, "kill_timeout": 1})
            await client.ensure_pool("p", pg_pool={"max_dynamic": 8})
            job = await submitted(client, folder, "strict")
            before = ready(job)
            cable.cut(*directions)
            await until_node(client, "far", NodeState.NODE_STATE_LOST)
            await job.until(
                lambda found: found.attempt > 1 and found.state == JobState.JOB_STATE_RUNNING, "its recovery", WAIT_S
            )
            after = ready(job)
            assert after.allocation.node_id == "near", after
            assert not lives(before.pid), "the old copy stopped itself before the new one started"
            assert after.generation > before.generation
            other = await client.submit({"name": "other", "pool": "p", "components": [_part(folder)]})
            await other.running(WAIT_S)
            cable.mend()
            await until_node(client, "far", NodeState.NODE_STATE_READY)
            await job.refresh()
            assert ready(job).pid == after.pid, "what recovered stays where it is"
            third = await submitted(client, folder, "third")
            assert not (folder / "taken_twice").exists()
            for each in (job, other, third):
                await each.cancel()
                await each.finished(WAIT_S)
            for agent in agents:
                await agent.leave()
                assert not agent.processes()
    finally:
        for agent in agents:
            await agent.kill()


def _part(folder: Path) -> dict[str, Any]:
    return {
        "name": "w",
        "actor": "tests.support.actors:Holder",
        "entry": "run",
        "kwargs": {"folder": str(folder)},
        "resources": {"cpu": 1, "gpu": 1},
    }


def controller(folder: Path, url: str, listen: str, within: tuple[str, ...] = ()) -> ControllerProcess:
    """One of several on a database."""
    options = ("--insecure", "--store", url, "--store-lease-ms", str(LEASE_MS), "--advertise", listen)
    return ControllerProcess(folder, *options, listen=listen, within=within)


async def started(leader: ControllerProcess, standby: ControllerProcess) -> None:
    """Starts both."""
    await leader.start()
    await leader.said("term begins")
    standby.state_dir.mkdir(mode=0o700)
    shutil.copy(leader.state_dir / "secrets.key", standby.state_dir)
    await standby.start()
    await standby.said("follows")


async def ended(leader: ControllerProcess, standby: ControllerProcess, server: Postgres) -> None:
    """Ends everything."""
    for each in (leader, standby):
        await each.__aexit__(None, None, None)
    server.close()


async def pools(at: str) -> set[str]:
    """Names of pools, as one controller says."""
    async with Client(at) as client:
        return {pool.name.removeprefix("pools/") for pool in await client.list_pools()}


async def database(folder: Path, far: Far, directions: tuple[str, ...]) -> None:
    """A leader that is cut off from its database stops before another one starts; no acknowledged write is lost."""
    cable = Cable(far)
    server = Postgres(HERE)
    url = server.url(server.new_database())
    leader = controller(folder / "leader", url, f"{THERE}:7700", far.within)
    standby = controller(folder / "standby", url, f"{HERE}:7700")
    try:
        await started(leader, standby)
        async with writers(f"{leader.address},{standby.address}", 4) as acknowledged:
            await more_than(acknowledged, 20)
            cable.cut(*directions)
            stopped = await leader.said("the journal failed; nothing is accepted until it works")
            began = await standby.said("term begins")
            assert stopped["timestamp"] < began["timestamp"], (stopped, began)
            await more_than(acknowledged, 20)
            leader.lines.clear()
            cable.mend()
            await leader.said("follows")
            before = set(acknowledged)
            assert before <= await pools(standby.address)

            async def knows() -> bool:
                return before <= await pools(leader.address)

            await until(knows)
            assert (await Members.stats_of(leader)).standby
    finally:
        await ended(leader, standby, server)


async def standby(folder: Path, far: Far, directions: tuple[str, ...]) -> None:
    """A standby that is cut off from the leader alone knows all the same what it writes; one that is cut off from the
    database, too, serves what it knew, with its age, and the leader leads on. Healed, it knows everything."""
    to_leader, to_database = Cable(far), Cable(far, HERE_TOO, THERE_TOO)
    server = Postgres(HERE_TOO)
    url = server.url(server.new_database())
    leads = controller(folder / "leader", url, f"{HERE}:7700")
    follows = controller(folder / "standby", url, f"{THERE_TOO}:7700", far.within)

    async def until_told(pools: list[str], oldest_ms: int = 0) -> None:
        """Until a program of the far side is told of these pools, and where to write."""
        while True:
            found = await asked(far, follows.address)
            assert (found["standby"], found["leader"]) == (True, leads.address), found
            if found["pools"] == pools and found["age_ms"] >= oldest_ms:
                return

    try:
        await started(leads, follows)
        async with Client(leads.address) as client:
            to_leader.cut(*directions)
            await client.create_pool({"name": "a"})
            await until_told(["a"])
            to_database.cut(*directions)
            await client.create_pool({"name": "b"})
            await until_told(["a"], LEASE_MS)
            to_database.mend()
            to_leader.mend()
            await until_told(["a", "b"])

            async def both_known() -> bool:
                stats = await client.stats()
                assert stats.term == 1
                return [each.leads for each in stats.controllers] == [True, False]

            await until(both_known)
    finally:
        await ended(leads, follows, server)


async def asked(far: Far, address: str) -> dict[str, Any]:
    """What a controller says to a program of the far side."""
    asking = await asyncio.create_subprocess_exec(
        *(*far.within, sys.executable, "-m", "tests.recovery.partition", "--ask", address), stdout=subprocess.PIPE
    )
    said, _ = await asking.communicate()
    found: dict[str, Any] = json.loads(said)
    return found


async def ask(address: str) -> None:
    """Says what a controller says."""
    async with open_channel(address) as channel, Client(address) as client:
        stats, pools = await client.stats(), await client.list_pools()
        leader = ""
        try:
            await pool_pb2_grpc.PoolServiceStub(channel).CreatePool(pool("never"))
        except grpc.aio.AioRpcError as refused:
            leader = parse_error(refused).metadata["leader"]
        names = sorted(each.name.removeprefix("pools/") for each in pools)
        found = {"standby": stats.standby, "age_ms": stats.age_ms, "pools": names, "leader": leader}
        sys.stdout.write(json.dumps(found))


async def main(folder: Path, story: str, directions: tuple[str, ...]) -> None:
    """One story: cut, wait, heal."""
    far = Far()
    try:
        await {"agent": agent, "database": database, "standby": standby}[story](folder, far, directions)
    finally:
        far.end()


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        asyncio.run(ask(sys.argv[2]))
        sys.exit()
    Path(sys.argv[1]).mkdir(exist_ok=True)
    cut = {"up": (UP,), "down": (DOWN,), "both": (UP, DOWN)}[sys.argv[3]]
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], cut))
