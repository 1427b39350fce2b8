"""How many nodes are wanted, when are they added and removed, and does it hold on this machine?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from callboard.cli.autoscale.loop import Autoscaler, Limits, ProviderFailed
from callboard.cli.autoscale.providers import CommandProvider
from callboard.cli.autoscale.sizing import Room, size
from callboard.client.client import Client
from callboard.client.errors import Unreachable
from callboard.model.quantities import Resources
from callboard.v1.common_pb2 import Device
from callboard.v1.job_pb2 import JobState, WorkerState
from callboard.v1.node_pb2 import DeviceUse, Node, NodeState
from callboard.v1.scheduler_pb2 import Demand
from callboard.wire.amounts import resources_to_proto
from tests.cli.cluster import ROOT, RealCluster, job, verb
from tests.cli.machine import Machine, wait_for_line


def amounts(**stated: Any) -> Resources:
    return Resources.parse(stated)


def node(
    name: str, *, used_gpus: int = 0, state: NodeState.ValueType = NodeState.NODE_STATE_READY, **labels: str
) -> Node:
    """A node of 4 CPUs and 2 GPUs."""
    return Node(
        name=f"nodes/{name}",
        state=state,
        labels=labels,
        capacity=resources_to_proto(amounts(cpu=4, gpu=2)),
        used=resources_to_proto(amounts(gpu=used_gpus)) if used_gpus else None,
        devices=[
            DeviceUse(device=Device(index=index), used_milli=1000 if index < used_gpus else 0) for index in range(2)
        ],
    )


def want(
    count: int, optional: int = 0, *, blocked: bool = False, selector: dict[str, str] | None = None, **ask: Any
) -> Demand:
    return Demand(
        pool="p",
        shape=resources_to_proto(amounts(**ask)),
        count=count,
        optional_count=optional,
        quota_blocked=blocked,
        node_selector=selector or {},
        jobs=["a"],
    )


def new() -> Room:
    return Room.whole(amounts(cpu=4, gpu=2), {})


def nodes_for(demands: Sequence[Demand], nodes: Sequence[Node] = (), **fields: Any) -> int:
    return size(demands, nodes, new(), **{"coming": 0, "most": 100, **fields}).nodes


class TestSizing:
    def test_free_room_is_used_before_nodes_are_added(self) -> None:
        assert nodes_for([want(2, gpu=1)], [node("a")]) == 0
        assert nodes_for([want(3, gpu=1)], [node("a")]) == 1
        assert nodes_for([want(3, gpu=1)], [node("a", used_gpus=2)]) == 2
        assert nodes_for([want(3, gpu=1)], [node("a", state=NodeState.NODE_STATE_DRAINING)]) == 2

    def test_nodes_on_their_way_count(self) -> None:
        assert nodes_for([want(4, gpu=1)], coming=1) == 1
        assert nodes_for([want(4, gpu=1)], coming=2) == 0

    def test_whole_devices_are_not_made_of_parts(self) -> None:
        assert nodes_for([want(2, gpu="0.5"), want(1, gpu=2)]) == 2
        assert nodes_for([want(4, gpu="0.5")]) == 1, "parts share a device, and both devices of a node"

    def test_the_largest_are_packed_first(self) -> None:
        assert nodes_for([want(2, cpu=1), want(2, cpu=3)]) == 2

    def test_no_more_than_the_limit(self) -> None:
        assert nodes_for([want(1000, gpu=1)], most=3) == 3

    def test_what_a_quota_holds_or_a_job_does_without_adds_nothing(self) -> None:
        assert nodes_for([want(4, gpu=1, blocked=True), want(4, 4, gpu=1)]) == 0
        assert nodes_for([want(4, 4, gpu=1)], grow_elastic=True) == 2

    def test_what_no_new_node_could_hold_is_said(self) -> None:
        sizing = size([want(1, gpu=3)], [], new(), coming=0, most=5)
        assert sizing.nodes == 0
        assert "no new node could hold" in sizing.hopeless[0]
        assert "a wants in pool p" in sizing.hopeless[0]

    def test_who_waits_for_what_no_node_brings_keeps_no_idle_node(self) -> None:
        def waiting(*demands: Demand, nodes: Sequence[Node] = ()) -> bool:
            return size(demands, nodes, new(), coming=0, most=0).waiting

        for useless in (want(1, gpu=3), want(4, gpu=1, blocked=True), want(4, 4, gpu=1)):
            assert not waiting(useless)
            assert waiting(useless, want(1, gpu=1))
        assert waiting(want(1, gpu=1), nodes=[node("a")]), "it is about to start there"

    def test_where_no_node_shows_what_another_would_be_the_first_is_added_to_know(self) -> None:
        for coming, wanted in ((0, 1), (1, 0)):
            sizing = size([want(9, gpu=1)], [], None, coming=coming, most=5)
            assert (sizing.nodes, sizing.hopeless, sizing.waiting) == (wanted, (), True)
        assert size([want(9, gpu=1)], [], None, coming=0, most=0).nodes == 0

    def test_memory_and_model_of_gpus_bind(self) -> None:
        def node_of(name: str, model: str, gib: int, promised: int = 0) -> Node:
            card = Device(index=0, model=model, memory_bytes=gib << 30)
            use = DeviceUse(device=card, used_milli=100 if promised else 0, promised_memory_bytes=promised << 30)
            has = resources_to_proto(amounts(cpu=4, gpu=1, gpu_memory=gib << 30))
            return Node(name=f"nodes/{name}", state=NodeState.NODE_STATE_READY, capacity=has, devices=[use])

        def asked(count: int, memory: str = "0", model: str = "", least: int = 0) -> Demand:
            found = want(count, gpu="0.1", gpu_memory=memory)
            found.shape.gpu_model, found.shape.gpu_memory_min_bytes = model, least << 30
            return found

        here = node_of("a", "NVIDIA H200", 140, promised=100)
        again = Room.whole(amounts(cpu=4, gpu=1), {}, like=here)
        for demand, nodes in (
            (asked(1, "40GiB"), 0),
            (asked(2, "40GiB"), 1),
            (asked(7, "40GiB"), 2),
            (asked(3, "10GiB", "H200", 100), 0),
            (asked(5, "10GiB", "H200"), 1),
        ):
            assert size([demand], [here], again, coming=0, most=9).nodes == nodes, demand
        for never in (asked(1, "150GiB"), asked(1, model="A100"), asked(1, least=200)):
            sizing = size([never], [here], again, coming=0, most=9)
            assert (sizing.nodes, len(sizing.hopeless)) == (0, 1), "more of the same would not help"
        first = Room.whole(amounts(cpu=4, gpu=1), {})
        assert size([asked(1, "150GiB", "A100", 200)], [], first, coming=0, most=9).nodes == 1, "nobody knows yet"

    def test_labels_bind(self) -> None:
        asked = want(1, gpu=1, selector={"gpu": "h100"})
        assert size([asked], [node("a", gpu="h100")], new(), coming=0, most=5).nodes == 0
        assert size([asked], [node("a")], new(), coming=0, most=5).hopeless

    def test_custom_resources_bind(self) -> None:
        room = Room.whole(amounts(cpu=1, worker_unit=1), {})
        assert room.take(amounts(worker_unit=1), {})
        assert not room.take(amounts(worker_unit=1), {})


class Machines:
    """A provider whose nodes are agents of plain processes, started and ended by the test's cluster."""

    def __init__(self, cluster: RealCluster) -> None:
        self.cluster = cluster
        self.added: list[str] = []
        self.removed: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.waiting: set[object] = set()
        self.taken_back = 0

    def new_room(self, nodes: Sequence[Node]) -> Room:
        return new()

    def owns(self, node_id: str) -> bool:
        return node_id.startswith("more-")

    async def add(self) -> str:
        turn = object()
        self.waiting.add(turn)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.taken_back += 1
            raise
        finally:
            self.waiting.discard(turn)
        if self.fails:
            self.fails -= 1
            raise ProviderFailed("the shop is closed")
        node_id = f"more-{len(self.added)}"
        self.added.append(node_id)
        await self.cluster.add_node(node_id)
        return node_id

    async def remove(self, node_id: str) -> None:
        self.removed.append(node_id)
        await self.cluster.end_node(node_id)


class StopScaling(Exception):
    """The test has seen enough."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def scaler(cluster: RealCluster, machines: Machines, clock: Clock, said: list[str], **limits: Any) -> Autoscaler:
    kept = Limits(**{"least": 1, "most": 3, "idle_s": 60, "notice_s": 5, **limits})
    return Autoscaler(cluster.client, machines, kept, said.append, clock)


class TestLoop:
    @pytest.mark.timeout(300)
    async def test_it_grows_with_what_waits_and_shrinks_with_what_is_idle(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        loop = scaler(cluster, machines, clock, said)
        first = await cluster.client.submit(job("a"))
        await first.running(30)
        waiting = [
            await cluster.client.submit(job(name, resources={"cpu": 1, "gpu": 1}) | {"wait_for_nodes": "60s"})
            for name in ("b", "c", "d")
        ]
        machines.gate.clear()
        await loop.look()
        await loop.look()
        machines.gate.set()
        await loop.added()
        assert machines.added == ["more-0", "more-1"], "asked twice while they come, added once"
        for handle in waiting:
            await handle.running(30)
        clock.now += 1000
        await loop.look()
        assert machines.removed == [], "somebody runs on each"
        for handle in waiting:
            await handle.complete()
            await handle.finished(30)
        await loop.look()
        clock.now += 59
        await loop.look()
        assert machines.removed == [], "not idle for long enough"
        clock.now += 1
        highest = max(await cluster.client.list_nodes(), key=lambda node: node.rank)
        await loop.look()
        assert machines.removed == [highest.name.removeprefix("nodes/")], "the highest rank of equals, one at a look"
        await loop.look()
        assert sorted(machines.removed) == ["more-0", "more-1"]
        assert [node.name for node in await cluster.client.list_nodes()] == ["nodes/n0"], "and they are forgotten"
        clock.now += 1000
        await loop.look()
        assert first.state == "RUNNING"
        assert any("adding 2 nodes for b, c, d" in line for line in said), said

    async def test_a_failure_is_told_and_not_repeated_at_once(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        loop = scaler(cluster, machines, clock, said, least=2)
        machines.fails = 1
        await loop.look()
        await loop.added()
        assert any("could not be added: the shop is closed" in line for line in said)
        await loop.look()
        assert machines.added == []
        clock.now += 30
        await loop.look()
        await loop.added()
        assert machines.added == ["more-0"]

    @pytest.mark.parametrize("state", [NodeState.NODE_STATE_JOINING, NodeState.NODE_STATE_READY])
    async def test_ft_g3_a_node_that_is_long_in_joining_is_counted_once(
        self, cluster: RealCluster, state: NodeState.ValueType
    ) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        loop = scaler(cluster, machines, clock, said, least=2)
        machines.gate.clear()
        there = cluster.client.list_nodes
        await loop.look()

        async def with_one_that_joins() -> list[Node]:
            return [*await there(), node("more-0", state=state)]

        cluster.client.list_nodes = with_one_that_joins  # type: ignore[method-assign]
        for _ in range(4):
            clock.now += 100
            await loop.look()
        assert (len(machines.waiting), machines.taken_back) == (1, 0), "it is neither too many nor too few"
        cluster.client.list_nodes = there  # type: ignore[method-assign]
        machines.gate.set()
        await loop.added()
        for _ in range(4):
            clock.now += 100
            await loop.look()
        assert (machines.added, machines.removed) == (["more-0"], [])
        assert [line for line in said if "adding" in line] == ["adding 1 node to have the fewest"]

    async def test_a_controller_that_is_away_is_waited_for_once_it_was_there(self, cluster: RealCluster) -> None:
        machines, said = Machines(cluster), list[str]()
        loop = scaler(cluster, machines, Clock(), said)
        there, away = cluster.client.list_nodes, Unreachable(address="here", detail="refused")
        turns = [there, away, away, there, away, StopAsyncIteration]

        async def nodes() -> list[Node]:
            turn = turns.pop(0)
            if isinstance(turn, Unreachable):
                raise turn
            return await there()

        async def pause() -> None:
            if turns[0] is StopAsyncIteration:
                raise StopScaling

        cluster.client.list_nodes = nodes  # type: ignore[method-assign]
        with pytest.raises(StopScaling):
            await loop.run(pause)
        assert said == ["no controller answers at here: refused; nothing is changed until it does"] * 2
        turns[:] = [away]
        with pytest.raises(Unreachable):
            await loop.run(pause)

    async def test_nodes_on_their_way_that_nobody_waits_for_any_more_are_taken_back(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        loop = scaler(cluster, machines, clock, said)
        machines.gate.clear()
        await (await cluster.client.submit(job("a"))).running(30)
        waiting = [await cluster.client.submit(job(name) | {"wait_for_nodes": "60s"}) for name in ("b", "c")]
        await loop.look()
        clock.now += 1000
        await loop.look()
        assert len(machines.waiting) == 2, "both are waited for"
        await waiting[0].cancel()
        await waiting[0].finished(30)
        for _ in range(2):
            await loop.look()
            clock.now += 59
        assert len(machines.waiting) == 2, "not for long enough"
        clock.now += 1
        await loop.look()
        assert (len(machines.waiting), machines.taken_back) == (1, 1), "one is waited for still"
        await waiting[1].cancel()
        await waiting[1].finished(30)
        for _ in range(2):
            await loop.look()
            clock.now += 60
        assert (len(machines.waiting), machines.taken_back) == (0, 2)
        assert sum("taking back 1 node on the way" in line for line in said) == 2

    async def test_the_fewest_stay_and_those_of_others(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        await cluster.add_node("stranger")
        await machines.add()
        for _ in range(3):
            await scaler(cluster, machines, clock, said, least=3).look()
            clock.now += 1000
        assert machines.removed == []
        loop = scaler(cluster, machines, clock, said, least=1)
        for _ in range(4):
            await loop.look()
            clock.now += 1000
        assert machines.removed == ["more-0"], "n0 and the stranger are not its own"

    async def test_nj_10_a_job_that_is_faster_than_the_removal_keeps_its_node(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        holder = await cluster.client.submit(job("holder"))
        await holder.running(30)
        await machines.add()
        loop = scaler(cluster, machines, clock, said)
        await loop.look()
        clock.now += 1000
        cordon = cluster.client.cordon_node

        async def beaten(node_id: str) -> Node:
            late = await cluster.client.submit(job("late"))
            await late.running(30)
            return await cordon(node_id)

        cluster.client.cordon_node = beaten  # type: ignore[method-assign]
        await loop.look()
        assert machines.removed == []
        found = await cluster.client.get_job("late")
        assert found.job.workers[0].allocation.node_id == "more-0"
        assert (await cluster.client.get_node("more-0")).state == NodeState.NODE_STATE_READY, "the cordon is taken back"

    async def test_a_node_with_a_reserved_group_stays(self, cluster: RealCluster) -> None:
        machines, clock, said = Machines(cluster), Clock(), list[str]()
        await machines.add()
        revision = (await cluster.client.stats()).revision
        await cluster.client.create_pool(
            {"name": "kept", "pg_pool": {"reserved": [{"gpu": 2}, {"gpu": 2}], "max_dynamic": 1}}
        )
        async for _ in cluster.client.watch(start_revision=revision + 1):
            groups = await cluster.client.list_placement_groups(pool="kept")
            if {bundle.node_id for group in groups for bundle in group.bundles} == {"n0", "more-0"}:
                break
        loop = scaler(cluster, machines, clock, said)
        for _ in range(3):
            await loop.look()
            clock.now += 1000
        assert machines.removed == []


class TestVerbs:
    async def test_demand_is_shown(self, cluster: RealCluster) -> None:
        nothing = await verb(cluster, "demand")
        assert "Nothing is wanted" in nothing.stderr
        await (await cluster.client.submit(job("a"))).running(30)
        await cluster.client.submit(job("b"))
        shown = await verb(cluster, "demand", "-o", "json")
        (entry,) = json.loads(shown.stdout)
        assert (entry["pool"], entry["count"], entry["jobs"], entry["quota_blocked"]) == ("rlhf", 1, ["b"], False)
        assert (entry["shape"]["gpu_milli"], entry["shape"]["cpu_milli"]) == (2000, 1000)
        assert entry["since_time"].endswith("Z")
        assert "rlhf" in (await verb(cluster, "demand")).stdout

    async def test_a_node_is_emptied_ended_and_removed(self, cluster: RealCluster) -> None:
        await (await cluster.client.submit(job("a"))).running(30)
        refused = await verb(cluster, "node", "remove", "n0")
        assert refused.exit_code == 1
        assert "can't be removed" in refused.stderr
        drained = await verb(cluster, "node", "drain", "n0", "--deadline", "5s")
        assert drained.exit_code == 0, drained.output
        assert "in use by a" in drained.stderr
        assert "Nothing runs on n0 any more" in drained.stderr
        await cluster.end_node("n0")
        assert (await verb(cluster, "node", "remove", "n0")).exit_code == 0
        assert await cluster.client.list_nodes() == []
        assert (await verb(cluster, "node", "remove", "n0")).exit_code == 1

    async def test_the_deadline_of_a_drain_shortens_a_stop_that_would_take_longer(self, cluster: RealCluster) -> None:
        await cluster.client.set_policy({"cancel_timeout": 600, "kill_timeout": 5})
        hanging = job("hangs", "tests.support.actors:Hanging", kwargs={"how": "sleep"}, entry="run")
        handle = await cluster.client.submit(hanging)
        await handle.running(30)
        async with asyncio.timeout(90):  # Far below the 600 s that it has by the policy.
            drained = await verb(cluster, "node", "drain", "n0", "--deadline", "1s", "--reason", "a fan")
        assert drained.exit_code == 0, drained.output
        assert "Nothing runs on n0 any more" in drained.stderr
        assert cluster.processes() == []
        assert (await handle.refresh()).state == JobState.JOB_STATE_PENDING

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--min", "3", "--max", "2"),
            ("--idle", "soon"),
            ("--provider", "command"),
            ("--provider", "command", "--up", "true"),
            ("--up", "true", "--down", "true"),
            ("--node", "gpu=lots"),
        ],
    )
    async def test_what_can_not_be_meant_is_refused(self, bare: RealCluster, arguments: tuple[str, ...]) -> None:
        assert (await verb(bare, "autoscale", *arguments)).exit_code == 2


class TestCommands:
    async def test_two_commands_add_and_remove_a_node(self, bare: RealCluster, tmp_path: Path) -> None:
        agent = (
            f"{sys.executable} -m callboard.cli agent --controller $CALLBOARD_CONTROLLER --node-id $CALLBOARD_NODE"
            f" --runtime process --cpus 2 --memory 1GiB --simulate-gpus 1 --run-dir {tmp_path}/$CALLBOARD_NODE"
        )
        up = f"cd {ROOT}; nohup {agent} >/dev/null 2>&1 & echo $! > {tmp_path}/pid"
        provider = CommandProvider(bare.client, up, f"kill $(cat {tmp_path}/pid)", None)
        assert provider.new_room([]) is None
        async with asyncio.timeout(90):
            node_id = await provider.add()
        nodes = await bare.client.list_nodes()
        assert [node.name for node in nodes] == [f"nodes/{node_id}"]
        assert provider.owns(node_id)
        room = provider.new_room(nodes)
        assert room is not None
        assert (room.cpu_milli, [card.milli for card in room.devices]) == (2000, [1000])
        revision = (await bare.client.stats()).revision
        await provider.remove(node_id)
        async for event in bare.client.watch(start_revision=revision + 1, types=["node."]):
            if event.state == "LEFT":
                break

    async def test_a_command_that_fails_says_its_last_words(self, bare: RealCluster) -> None:
        provider = CommandProvider(bare.client, "echo queue is full >&2; exit 3", "true", None)
        with pytest.raises(ProviderFailed, match="ended with 3: queue is full"):
            await provider.add()

    async def test_what_a_command_leaves_behind_does_not_keep_it_from_ending(
        self, bare: RealCluster, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        provider = CommandProvider(bare.client, "true", f"cat {gate} >&2 & seq 100000 >&2; echo no >&2; exit 3", None)
        with pytest.raises(ProviderFailed, match="ended with 3: no"):
            await provider.remove("auto-1")
        await asyncio.to_thread(gate.write_text, "it lives on, and may write")

    async def test_what_waits_in_a_queue_is_taken_out_when_nobody_waits_for_it(
        self, bare: RealCluster, tmp_path: Path
    ) -> None:
        queue, log = tmp_path / "queue", tmp_path / "log"
        os.mkfifo(queue)
        provider = CommandProvider(
            bare.client, f"echo $CALLBOARD_NODE > {queue}", f"echo $CALLBOARD_NODE >> {log}", None
        )
        adding = asyncio.create_task(provider.add())
        handed_in = (await asyncio.to_thread(queue.read_text)).strip()
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert log.read_text().split() == [handed_in]

    async def test_what_handed_nothing_in_is_not_taken_back(self, bare: RealCluster, tmp_path: Path) -> None:
        log = tmp_path / "log"
        provider = CommandProvider(bare.client, "false", f"echo > {log}", None)
        with pytest.raises(ProviderFailed):
            await provider.add()
        assert not log.exists()


@pytest.mark.timeout(300)
def test_the_local_provider_follows_a_job_up_and_down(machine: Machine, tmp_path: Path) -> None:
    """The whole programs: `up`, `autoscale`, a job that needs three nodes, and back to one."""
    up = machine.up("--agents", "1", "--machine-gpus", "4", "--gpus-per-node", "1")
    scaling = machine.start(
        *("autoscale", "--min", "1", "--max", "3", "--idle", "1s", "--every", "200ms", "--notice", "5s")
    )
    wait_for_line(scaling, "keeping 1 to 3 nodes")
    assert machine.run("pool", "create", "p").returncode == 0
    file = tmp_path / "job.json"
    component = {"name": "w", "actor": "tests.support.actors:Plain", "workers": 3, "resources": {"gpu": 1}}
    file.write_text(json.dumps({"name": "wide", "pool": "p", "components": [component], "wait_for_nodes": "60s"}))
    assert machine.run("job", "submit", str(file)).returncode == 0
    assert "for wide" in wait_for_line(scaling, "adding 2 nodes")
    for _ in range(2):
        wait_for_line(scaling, "takes work")
    assert nodes_of_running(machine) == {"node-0", "node-1", "node-2"}
    assert machine.run("job", "cancel", "wide").returncode == 0
    # In the order in which they were seen idle, which is that of two looks.
    gone = {wait_for_line(scaling, " is gone").partition(" is gone")[0].rpartition("node-")[2] for _ in range(2)}
    assert gone == {"1", "2"}
    assert [node["name"] for node in json.loads(machine.run("node", "list", "-o", "json").stdout)] == ["nodes/node-0"]
    scaling.send_signal(signal.SIGINT)
    said, _ = scaling.communicate(timeout=120)
    assert "the nodes stay as they are" in said
    assert scaling.returncode == 0
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=120)
    assert not machine.run_dir.exists()


def nodes_of_running(machine: Machine) -> set[str]:
    (record,) = machine.clusters()

    async def look() -> set[str]:
        async with Client(record.controller) as client:
            handle = await client.get_job("wide")
            found = await handle.until(lambda job: job.state == JobState.JOB_STATE_RUNNING, "RUNNING", 30)
            ready = [worker for worker in found.workers if worker.state == WorkerState.WORKER_STATE_READY]
            return {worker.allocation.node_id for worker in ready}

    return asyncio.run(look())
