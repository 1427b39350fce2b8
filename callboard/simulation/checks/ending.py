"""The end of a simulation: what must be true, and gone, when everything has healed."""

from __future__ import annotations

from callboard.scheduler import Scheduler
from callboard.scheduler.records.states import ENDED, HOLDING, JobState, NodeState
from callboard.simulation.world.rules import RuleBroken
from callboard.simulation.world.site import Site


def check_settled(site: Site, scheduler: Scheduler, now_ms: int) -> None:
    """After healing and some time: no job is on its way for ever, and one that waits says why.

    Raises:
        RuleBroken: one is, or doesn't.
    """
    state = scheduler.state
    for node_id in site.machines.by_node:
        if node_id not in state.nodes:
            raise RuleBroken("end", f"the agent of {node_id} was never let in though everything healed")
    for node in state.nodes.values():
        if node.state is not NodeState.READY:
            raise RuleBroken("end", f"{node.node_id} is {node.state} ({node.reason}) though everything healed")
        if node.ghosts:
            raise RuleBroken("end", f"{node.node_id} still waits for the end of {node.ghosts}")
    for job in state.jobs.values():
        if job.state not in ENDED and job.state not in (JobState.PENDING, JobState.STARTING, JobState.RUNNING):
            entered_ms = job.story[-1].at_ms
            if now_ms - entered_ms > 120_000:
                raise RuleBroken("end", f"{job.name} has been {job.state} for {now_ms - entered_ms} ms", job.uid)
        if job.state is JobState.PENDING and not scheduler.explain(job.uid, now_ms).summary:
            raise RuleBroken("end", f"{job.name} waits and nothing says why", job.uid)


def check_nothing_left(site: Site, scheduler: Scheduler) -> None:
    """After everything was cancelled and deleted: nothing lives, nothing is held, nothing is booked.

    Raises:
        RuleBroken: something is left.
    """
    state = scheduler.state
    for job in state.jobs.values():
        if job.state not in ENDED:
            raise RuleBroken("end", f"{job.name} is {job.state} ({job.reason}) though it was cancelled", job.uid)
    for node_id, tree in site.machines.living():
        raise RuleBroken("end", f"processes of g{tree.generation} live on {node_id}", tree.key[0])
    for worker in state.workers.values():
        if worker.state in HOLDING:
            raise RuleBroken("end", f"g{worker.generation} is {worker.state} ({worker.reason})", worker.job)
    for group in state.groups.values():
        raise RuleBroken("end", f"placement group {group.group_id} is {group.state} ({group.reason})")
    for booked in site.ray.groups:
        raise RuleBroken("end", f"placement group {booked} is left in Ray")
    for name in state.pools:
        raise RuleBroken("end", f"pool {name} is left though it was deleted")
    for node_id, node in state.nodes.items():
        if state.node_use(node_id).free != node.capacity:
            raise RuleBroken("end", f"{node_id} is not free: {state.node_use(node_id)}")
