"""Does a placement on more nodes than there are wait for them, as any other job does?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard.controller.searches.placements import placed
from callboard.model.faults import InvalidInput
from callboard.model.inputs import job_spec
from callboard.model.quantities import Resources
from callboard.model.roles import fused
from callboard.model.specs import JobSpec
from callboard.scheduler.account.demand import demand
from callboard.scheduler.records.states import JobState
from tests.scheduler.twin import Twin
from tests.scheduler.world import World


def waiting_job(world: World, nodes: int = 3, placement: str = "0-5", **fields: Any) -> JobSpec:
    component = {"name": "a", "actor": "m:A", "resources": {"cpu": 1}, **fields.pop("component", {})}
    mapping = {
        "name": "j",
        "pool": "pool",
        "wait_for_nodes": "5m",
        "cluster": {"num_nodes": nodes, "component_placement": {"a": placement}, **fields.pop("cluster", {})},
        "components": [component],
        **fields,
    }
    return fused(placed(job_spec(mapping), world.state.nodes.values()))


@pytest.mark.parametrize("there", [0, 1, 2])
def test_ft_e7_it_waits_is_in_demand_and_starts_when_the_nodes_are_there(there: int) -> None:
    world = World({f"n{number}": 2 for number in range(there)})
    world.pool()
    world.submit(waiting_job(world))
    assert world.status("j") is JobState.PENDING
    (entry,) = demand(world.state)
    assert (entry.shape, entry.count, entry.jobs) == (Resources.parse({"cpu": 1, "gpu": 1}), 6, ["j"])
    assert "its placement needs more nodes than have joined" in world.explain("j").summary
    for number in range(there, 3):
        assert world.status("j") is JobState.PENDING
        world.tick(60_000)
        world.join(f"n{number}", 2)
    assert world.status("j") is JobState.RUNNING
    assert [worker.node_id for worker in world.workers("j")] == ["n0", "n0", "n1", "n1", "n2", "n2"]
    assert demand(world.state) == []
    assert not world.state.specs[world.job("j").uid].spec.placement_nodes
    assert world.job("j").deadline_ms == 0


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ([], "its placement needs 3 nodes; none joined, 3 are missing"),
        (["n0", "n7"], "its placement needs 3 nodes; n0, n7 joined, 1 is missing"),
    ],
)
def test_ft_e7_at_the_end_of_its_time_it_names_the_nodes_that_joined(there: list[str], said: str) -> None:
    world = World()
    world.pool()
    world.submit(waiting_job(world))
    for node_id in there:
        world.join(node_id, 2)
    world.tick(299_999)
    assert world.status("j") is JobState.PENDING
    world.tick(1)
    assert world.status("j") is JobState.FAILED
    assert said in world.job("j").reason


def test_ft_e7_nodes_other_than_the_first_guess_are_taken_as_they_are() -> None:
    world = World()
    world.pool()
    world.submit(waiting_job(world, nodes=2, placement="0-3"))
    world.join("big", 3)
    world.join("small", 1)
    assert [worker.node_id for worker in world.workers("j")] == ["big", "big", "big", "small"]


def test_ft_e7_nodes_that_do_not_suit_leave_it_waiting() -> None:
    world = World()
    world.pool()
    world.submit(waiting_job(world, nodes=2, placement="0-3"))
    world.join("n0", 1)
    world.join("n1", 1)
    assert world.status("j") is JobState.PENDING
    world.join("n2", 2)
    assert world.status("j") is JobState.PENDING  # num_nodes says 2
    world.tick(300_000)
    assert world.status("j") is JobState.FAILED


@pytest.mark.parametrize("there", [0, 1])
def test_ft_e7_a_text_that_does_not_say_how_many_nodes_waits_for_as_many_as_it_needs(there: int) -> None:
    world = World({f"n{number}": 2 for number in range(there)})
    world.pool()
    world.submit(waiting_job(world, placement="0-3", cluster={"num_nodes": None}))
    assert world.status("j") is JobState.PENDING
    assert sum(entry.count for entry in demand(world.state)) == 4
    for number in range(there, 3):
        assert world.status("j") is JobState.PENDING
        world.join(f"n{number}", 1 if number else 2)
        if number == 1 and there == 1:
            assert world.status("j") is JobState.PENDING, "3 GPUs are not enough"
    assert [worker.node_id for worker in world.workers("j")] == ["n0", "n0", "n1", "n2"]
    assert world.status("j") is JobState.RUNNING


@pytest.mark.parametrize("stated", [None, 4])
@pytest.mark.parametrize("named", ["late", ["late"], "late, later"], ids=str)
def test_ft_e7_node_groups_with_which_nodes_are_still_to_join(named: Any, stated: int | None) -> None:
    world = World({"n0": 2})
    world.pool()
    cluster = {"num_nodes": stated, "component_placement": {"a": {"node_group": named, "placement": "0-3"}}}
    world.submit(waiting_job(world, cluster=cluster))
    assert world.status("j") is JobState.PENDING
    assert sum(entry.count for entry in demand(world.state)) == 4
    world.join("n1", 4)  # of no group
    assert world.status("j") is JobState.PENDING
    groups = ["late", "later" if "later" in named else "late"]
    for number, group in enumerate(groups, 2):
        world.join(f"n{number}", 2, node_group=group)
    assert world.status("j") is JobState.RUNNING
    assert [worker.node_id for worker in world.workers("j")] == ["n2", "n2", "n3", "n3"]


def test_ft_e7_at_the_end_of_its_time_it_names_the_node_group_that_never_joined() -> None:
    world = World({"n0": 2})
    world.pool()
    cluster = {"num_nodes": 2, "component_placement": {"a": {"node_group": "late", "placement": "0-1"}}}
    world.submit(waiting_job(world, cluster=cluster))
    world.join("n1", 4)
    world.tick(300_000)
    assert "its placement needs the node group late, with which no node joined" in world.job("j").reason


def test_ft_e7_without_a_wait_and_with_another_fault_it_is_refused() -> None:
    world = World({"n0": 2})
    with pytest.raises(InvalidInput, match="num_nodes is 3, but 1 node is there"):
        waiting_job(world, wait_for_nodes=None)
    with pytest.raises(InvalidInput):
        waiting_job(world, placement="0-banana")
    with pytest.raises(InvalidInput):
        waiting_job(world, nodes=1, placement="0-5")


def test_ft_e7_variables_of_node_groups_stay_with_their_ranks() -> None:
    world = World()
    world.pool()
    groups = [
        {"label": "left", "node_ranks": "0-1", "env_configs": [{"node_ranks": 1, "env_vars": [{"MY_TOKEN": "hidden"}]}]}
    ]
    cluster = {"node_groups": groups, "component_placement": {"a": {"node_group": "left", "placement": "0-3"}}}
    spec = waiting_job(world, nodes=2, cluster=cluster)
    assert "hidden" not in spec.placement_config
    assert "MY_TOKEN" in spec.placement_config
    world.submit(spec)
    world.join("n0", 2)
    world.join("n1", 2)
    envs = [place.env for place in world.state.specs[world.job("j").uid].spec.components[0].places]
    assert envs == [(), (), (("MY_TOKEN", "hidden"),), (("MY_TOKEN", "hidden"),)]


def test_ft_e7_members_of_a_colocation_group_wait_together() -> None:
    world = World()
    world.pool()
    members = [{"name": name, "actor": "m:A", "colocation_group": "g", "resources": {"cpu": 1}} for name in ("a", "b")]
    cluster = {"component_placement": {"a,b": "0-3"}}
    world.submit(waiting_job(world, nodes=2, cluster=cluster, components=members))
    world.join("n0", 2)
    world.join("n1", 2)
    assert [worker.node_id for worker in world.workers("j")] == ["n0", "n0", "n1", "n1"]


def test_ft_e7_a_scheduler_made_from_the_records_decides_the_same() -> None:
    world = World()
    world.scheduler = Twin()
    world.pool()
    world.submit(waiting_job(world, nodes=2, placement="0-3"))
    world.submit("other", ask={"cpu": 1}, wait_for_nodes_ms=60_000)
    world.join("n0", 2)
    world.join("n1", 2)
    assert world.status("j") is JobState.RUNNING
