"""The behaviour of a worker, drawn once, when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.simulation.options import Fault
from callboard.simulation.site import Site
from callboard.v1 import agent_pb2


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What the user's code and the machine will do, drawn once. Times in milliseconds."""

    launch_ms: int
    construct_ms: int
    problem: agent_pb2.StartFailure.ValueType
    kill_ms: int
    stuck_ms: int
    children: int
    hook_ms: int
    life_ms: int
    entry_ms: int
    entry_works: bool
    leaves_checkpoint: bool


def draw(site: Site, command: agent_pb2.StartWorker) -> Behaviour:
    """What will become of a worker. Every draw is made, so that faults don't shift later ones."""
    chance = site.chance.workers
    slow = site.strikes(Fault.WORKER, 0.02)
    problem = agent_pb2.START_FAILURE_UNSPECIFIED
    for failure, share in (
        (agent_pb2.START_FAILURE_CONSTRUCTOR, 0.02),
        (agent_pb2.START_FAILURE_HOST, 0.02),
        (agent_pb2.START_FAILURE_DIED, 0.01),
    ):
        if site.strikes(Fault.WORKER, share):
            problem = failure
    hangs = site.strikes(Fault.WORKER, 0.1)
    stuck = site.strikes(Fault.WORKER, 0.02)
    dies = site.strikes(Fault.WORKER, 0.06)
    construct_ms = chance.randint(100, 2_000)
    return Behaviour(
        launch_ms=chance.randint(10, 400),
        construct_ms=round(command.start_timeout_ms * chance.uniform(0.5, 2)) if slow else construct_ms,
        problem=problem,
        kill_ms=chance.randint(5, 300),
        stuck_ms=chance.randint(1_000, 90_000) if stuck else 0,
        children=chance.choice([0, 0, 0, 1, 4]),
        hook_ms=10**9 if hangs else chance.choice([0, 5, 100, 400, 900]),
        life_ms=chance.randint(100, 90_000) if dies else 10**9,
        entry_ms=round(chance.expovariate(1 / 40_000)) + 500,
        entry_works=not site.strikes(Fault.WORKER, 0.04),
        leaves_checkpoint=chance.random() < 0.5,
    )
