"""What is wanted beyond what there is, and which nodes can be forgotten?"""

from __future__ import annotations

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec
from callboard.scheduler import Refusal, State
from callboard.scheduler.account.demand import MAX_JOBS_NAMED, Demand, demand
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.refusals import RefusalCode
from callboard.scheduler.records.states import JobState, NodeState
from tests.scheduler.world import World, job_spec, pool_spec

GPU = Resources.parse({"gpu": 1})


def elastic(most: int) -> ComponentSpec:
    return ComponentSpec(name="main", actor="tests:Actor", min_workers=1, max_workers=most, resources=GPU)


def only(world: World) -> Demand:
    (found,) = demand(world.state)
    return found


class TestDemand:
    def test_nothing_is_wanted_where_everything_runs(self) -> None:
        world = World({"n1": 2})
        world.pool()
        world.submit("a", workers=2)
        assert demand(world.state) == []

    def test_a_gang_that_waits_wants_all_of_its_workers(self) -> None:
        world = World({"n1": 2})
        world.pool()
        world.submit("a", workers=4, wait_for_nodes_ms=60_000)
        found = only(world)
        assert (found.pool, found.count, found.optional, found.jobs) == ("pool", 4, 0, ["a"])
        assert found.shape == GPU
        assert found.since_ms == world.job("a").submit_ms
        assert not found.quota_blocked
        world.join("n2", 2)
        assert demand(world.state) == []

    def test_jobs_of_one_shape_are_counted_together_and_shapes_apart(self) -> None:
        world = World({"n1": 1})
        world.pool()
        world.submit("runs")
        for number in range(MAX_JOBS_NAMED + 5):
            world.submit(f"w{number}")
        world.submit("wide", ask={"gpu": 1, "cpu": 4})
        small, wide = demand(world.state)
        assert (small.count, len(small.jobs), small.jobs[0]) == (MAX_JOBS_NAMED + 5, MAX_JOBS_NAMED, "w0")
        assert (wide.count, wide.jobs) == (1, ["wide"])
        assert small.since_ms < wide.since_ms

    def test_a_job_whose_room_is_on_the_way_wants_nothing_more(self) -> None:
        world = World({"n1": 1})
        world.pool()
        world.submit("victim", priority=1.0)
        world.hold = lambda command: True
        world.submit("urgent", priority=9.0)
        assert world.job("urgent").nominated
        assert demand(world.state) == []
        world.hold = lambda command: False
        world.answer()
        assert world.job("urgent").state is JobState.RUNNING
        assert only(world).jobs == ["victim"]

    def test_a_quota_in_the_way_is_said(self) -> None:
        world = World({"n1": 1})
        world.pool(pool_spec("pool", gpu=1))
        world.submit("a")
        world.submit("b")
        assert only(world).quota_blocked
        world.pool(pool_spec("free"))
        world.submit("c", pool="free")
        assert [entry.quota_blocked for entry in demand(world.state)] == [True, False]

    def test_what_an_elastic_component_could_take_is_optional(self) -> None:
        world = World({"n1": 1})
        world.pool()
        uid = world.submit(job_spec("e", components=(elastic(4),)))
        found = only(world)
        assert (found.count, found.optional, found.jobs) == (3, 3, ["e"])
        assert found.since_ms == world.job("e").running_ms
        world.join("n2", 2)
        assert (only(world).count, only(world).optional) == (1, 1)
        world.send(ev.JobScaled(now_ms=world.now_ms, uid=uid, component="main", workers=2))
        assert demand(world.state) == []

    def test_labels_that_a_node_must_have_are_part_of_it_and_wishes_are_not(self) -> None:
        world = World({"n1": 1})
        world.pool()
        world.submit("runs")
        labels = (("gpu", "h100"),)
        world.submit("must", node_selector=labels, wait_for_nodes_ms=60_000)
        world.submit("wishes", node_selector=labels, node_selector_soft=True)
        assert [(entry.jobs, entry.selector) for entry in demand(world.state)] == [(["must"], labels), (["wishes"], ())]


class TestRemoval:
    def remove(self, world: World, node_id: str) -> None:
        world.send(ev.NodeRemoved(now_ms=world.now_ms, node_id=node_id))

    def leave(self, world: World, node_id: str) -> None:
        epoch = world.state.nodes[node_id].epoch
        world.send(ev.NodeLeft(now_ms=world.now_ms, node_id=node_id, epoch=epoch, reason="SIGTERM"))

    def test_a_node_that_left_is_forgotten_and_its_rank_is_free(self) -> None:
        world = World({"n1": 1, "n2": 1})
        self.leave(world, "n2")
        self.remove(world, "n2")
        assert list(world.state.nodes) == ["n1"]
        assert world.log[-1].type == "node.removed"
        assert world.join("n3").rank == 1
        assert (world.join("n2").rank, world.state.nodes["n2"].epoch) == (2, 1), "it comes back as a new one"

    def test_a_node_whose_agent_is_there_stays(self) -> None:
        world = World({"n1": 1})
        for _ in range(2):
            with pytest.raises(Refusal, match="its agent is there") as refused:
                self.remove(world, "n1")
            assert refused.value.code is RefusalCode.WRONG_STATE
            world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1"))
        assert world.state.nodes["n1"].state is NodeState.DRAINING

    def test_an_unknown_node_is_not_found(self) -> None:
        with pytest.raises(Refusal) as refused:
            self.remove(World(), "n1")
        assert refused.value.code is RefusalCode.NOT_FOUND

    def test_a_lost_node_with_a_job_is_forgotten_and_the_job_waits_elsewhere(self) -> None:
        world = World({"n1": 1, "n2": 1})
        world.pool()
        world.submit("a")
        node_id = world.workers("a")[0].node_id
        world.lose(node_id)
        self.remove(world, node_id)
        assert world.job("a").state is JobState.RUNNING
        assert [worker.node_id for worker in world.workers("a")] == [next(iter(world.state.nodes))]

    def test_a_group_that_is_still_owed_keeps_the_record(self) -> None:
        world = World({"n1": 1})
        world.pool()
        world.submit("a")
        world.lose("n1")
        with pytest.raises(Refusal, match="must still be removed"):
            self.remove(world, "n1")
        world.join("n2")
        self.remove(world, "n1")
        assert list(world.state.nodes) == ["n2"]

    def test_a_replayed_log_forgets_it_too(self) -> None:
        world = World({"n1": 1, "n2": 1})
        self.leave(world, "n1")
        self.remove(world, "n1")
        assert list(State.of(world.state.records()).nodes) == ["n2"]
