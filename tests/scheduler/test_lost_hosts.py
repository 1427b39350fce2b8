"""A Ray node that dies under its workers is no fault of the job's: it costs no restart of its budget."""

from __future__ import annotations

from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import JobState, NodeState
from tests.scheduler.world import World


def ray_ends(world: World, node_id: str) -> None:
    epoch = world.state.nodes[node_id].epoch
    world.send(ev.NodeRayChanged(now_ms=world.now_ms, node_id=node_id, epoch=epoch, ray=None))


def test_a_gang_starts_again_elsewhere_when_a_raylet_died() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit("j", workers=2)
    hit = world.workers("j")[0].node_id
    ray_ends(world, hit)
    assert world.state.nodes[hit].state is NodeState.JOINING
    world.exit("j", 0, "the Ray node ended")
    world.tick(120_000)
    assert world.job("j").state is JobState.RUNNING
    assert (world.job("j").attempt, world.job("j").failures) == (2, ())
    assert hit not in {worker.node_id for worker in world.workers("j") if worker.attempt == 2}


def test_a_worker_that_dies_on_a_living_node_counts() -> None:
    world = World({"n1": 1, "n2": 1, "n3": 1})
    world.pool()
    world.submit("j", workers=2)
    world.exit("j", 0)
    world.tick(120_000)
    assert world.job("j").state is JobState.FAILED
