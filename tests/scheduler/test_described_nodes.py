"""Does a plan for a described cluster say what the controller would do on it?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from callboard.model.cluster_text import parse_cluster
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec, Strategy, WorkerPlace
from callboard.scheduler.account.described_nodes import DescribedNode, JobPlan, described_state, nodes_of, plan_job
from callboard.scheduler.account.explain import explain_spec
from callboard.scheduler.machine import Scheduler
from callboard.scheduler.records.events import JobSubmitted, NodeJoined, PoolCreated


def part(name: str, workers: int, cpus: int, gpus: float = 0, **fields: object) -> ComponentSpec:
    return ComponentSpec(
        name=name,
        actor="a:B",
        min_workers=workers,
        max_workers=workers,
        resources=Resources(cpu_milli=cpus * 1000, gpu_milli=round(gpus * 1000)),
        **fields,  # type: ignore[arg-type]
    )


def plan(nodes: str, *parts: ComponentSpec, **fields: object) -> JobPlan:
    return plan_job(JobSpec(name="j", pool="p", components=parts, **fields), nodes_of(parse_cluster(nodes)))  # type: ignore[arg-type]


def test_what_fits_is_said_node_by_node() -> None:
    found = plan("2x(2gpu,8cpu)+(16cpu)", part("a", 4, 1, 1), part("b", 16, 1, node_selector=(("node_group", "cpu"),)))
    assert found.fits
    assert [dict(node.workers) for node in found.nodes] == [{"a": 2}, {"a": 2}, {"b": 16}]
    assert [node.left for node in found.nodes] == [Resources(cpu_milli=6000)] * 2 + [Resources()]


def test_what_the_text_does_not_state_is_no_limit_and_not_left() -> None:
    found = plan("8+8", part("a", 16, 60, 1))
    assert found.fits
    assert [node.left for node in found.nodes] == [Resources()] * 2


def test_what_does_not_fit_is_counted_with_what_it_lacks() -> None:
    found = plan("2x(2gpu,8cpu)", part("b", 9, 1), part("a", 4, 2, 1))
    assert not found.fits
    (rest,) = found.unplaced
    assert (rest.component, rest.workers) == ("b", 1)
    assert rest.why == ("one worker asks 1 cpu; of 2 nodes none has more than 0 left",)
    assert [node.workers["a"] for node in found.nodes] == [2, 2]


def test_a_worker_larger_than_any_node_is_said() -> None:
    (rest,) = plan("4+(2gpu,8cpu)", part("a", 1, 1, 8)).unplaced
    assert rest.why == ("one worker asks 8 gpu; of 2 nodes none has more than 4 left",)


def test_which_gpus_there_are_counts_and_their_memory_is_no_limit() -> None:
    nodes = [DescribedNode(node_id="node-0", rank=0, node_group="gpu", gpus=2, gpu_model="NVIDIA A100")]

    def planned(**ask: object) -> JobPlan:
        component = replace(part("a", 2, 1, 1), resources=Resources(gpu_milli=1000, **ask))  # type: ignore[arg-type]
        return plan_job(JobSpec(name="j", pool="p", components=(component,)), nodes)

    assert planned(gpu_model="A100").fits
    found = planned(gpu_memory_bytes=40 << 30, gpu_memory_min_bytes=80 << 30)
    assert (found.fits, found.nodes[0].left) == (True, Resources())
    (rest,) = planned(gpu_model="H100").unplaced
    assert "only H100 will do; its GPUs: 2 × NVIDIA A100" in rest.why[0]


def test_labels_that_no_node_has_are_said() -> None:
    (rest,) = plan("2x8", part("a", 1, 1, node_selector=(("node_group", "cpu"),))).unplaced
    assert rest.why == ("no node has node_group=cpu",)


def test_a_strategy_that_forbids_it_is_said() -> None:
    (rest,) = plan("(4cpu)+(4cpu)", part("a", 8, 1), placement=Strategy.STRICT_PACK).unplaced
    assert rest.workers == 4
    assert rest.why


@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_strategy_is_planned_as_asked(strategy: Strategy) -> None:
    found = plan("3x(4cpu)", part("a", 3, 1), placement=strategy)
    used = sum(1 for node in found.nodes if node.workers)
    assert used == (3 if strategy in (Strategy.SPREAD, Strategy.STRICT_SPREAD) else 1)


def test_each_pool_pays_its_part_and_both_share_the_nodes() -> None:
    found = plan("(8cpu)", part("a", 4, 1, pool="x"), part("b", 5, 1, pool="y"))
    (rest,) = found.unplaced
    assert rest.workers == 1


def test_it_is_asked_of_the_state_that_a_scheduler_would_have() -> None:
    text = "2x(2gpu:h100,8cpu,64gib)+(16cpu)"
    job = JobSpec(name="j", pool="p", components=(part("a", 1, 1, 1), part("b", 1, 1, pool="q")))
    made = described_state(job, nodes_of(parse_cluster(text)))
    scheduler = Scheduler()
    for pool in made.pools:
        scheduler.handle(PoolCreated(now_ms=0, spec=PoolSpec(name=pool)))
    for node in made.nodes.values():
        joined = NodeJoined(
            now_ms=0,
            node_id=node.node_id,
            instance="",
            rank=node.rank,
            node_group=node.node_group,
            capacity=node.capacity,
            devices=node.devices,
            simulated=True,
            runtime="process",
        )
        scheduler.handle(joined)
    known = scheduler.state
    assert list(made.pools) == ["p", "q"]
    assert {name: replace(pool, made_at=0, revision=0) for name, pool in known.pools.items()} == dict(made.pools)
    told = {name: replace(node, reason="", revision=0) for name, node in known.nodes.items()}
    assert told == dict(made.nodes)
    asked = scheduler.what_if(JobSubmitted(now_ms=0, uid="", spec=job))
    assert replace(asked, queue_position=0) == explain_spec(made, job, 0)


class TestPlaces:
    """Workers that must run where their job says."""

    NODES = "2x(2gpu,4cpu)"

    @staticmethod
    def placed(*places: tuple[str, tuple[tuple[int, int], ...]], cpus: int = 1, name: str = "a") -> ComponentSpec:
        found = tuple(WorkerPlace(node_id=node, devices=devices) for node, devices in places)
        return part(name, len(found), cpus, places=found)

    def test_are_kept(self) -> None:
        found = plan(self.NODES, self.placed(("node-1", ((1, 1000),)), ("node-0", ((0, 500),))))
        assert found.fits
        assert [dict(node.workers) for node in found.nodes] == [{"a": 1}, {"a": 1}]
        assert [node.used.gpu_milli for node in found.nodes] == [500, 1000]

    def test_that_find_no_room_are_told_node_by_node(self) -> None:
        placed = [("node-0", ((0, 1000),)), ("node-0", ((1, 1000),)), ("node-1", ()), ("nowhere", ())]
        found = plan(self.NODES, self.placed(*placed, cpus=3))
        (unplaced,) = found.unplaced
        assert (unplaced.component, unplaced.workers) == ("a", 2)
        assert unplaced.why == (
            "one worker asks 3 cpu; node-0, where it is placed, has 1 left",
            "there is no node nowhere, where it is placed",
        )

    @pytest.mark.parametrize("devices", [((7, 1000),), ((0, 600),)])
    def test_on_devices_that_are_not_there_or_taken_do_not_fit(self, devices: tuple[tuple[int, int], ...]) -> None:
        found = plan(self.NODES, self.placed(("node-0", ((0, 500),)), ("node-0", devices)))
        (unplaced,) = found.unplaced
        assert (unplaced.component, unplaced.workers) == ("a", 1)
        assert "node-0" in unplaced.why[0]

    def test_take_before_workers_that_may_go_anywhere(self) -> None:
        found = plan("(2gpu,4cpu)", part("b", 2, 1, 1), self.placed(("node-0", ((0, 1000),))))
        (unplaced,) = found.unplaced
        assert (unplaced.component, unplaced.workers) == ("b", 1)

    def test_may_hold_declared_hardware(self) -> None:
        node = DescribedNode(node_id="n", rank=0, node_group="cpu", cpu_milli=4000, hardware=("Franka", "Franka"))
        for piece, fits in (("Franka/1", True), ("Franka/2", False)):
            place = WorkerPlace(node_id="n", hardware=((piece, 1000),))
            job = JobSpec(name="j", pool="p", components=(part("a", 1, 1, places=(place,)),))
            assert plan_job(job, [node]).fits is fits


def test_what_fits_part_by_part_and_not_together_does_not_fit() -> None:
    """A quota is for all workers together, wherever each has room."""
    job = JobSpec(name="j", pool="p", components=(part("a", 1, 2), part("b", 1, 2)))
    quota = PoolSpec(name="p", nominal=(("cpu", 3000),))
    found = plan_job(job, nodes_of(parse_cluster("2x(8cpu)")), [quota])
    assert not found.fits
    assert [each.component for each in found.unplaced] == ["b"]
