"""Whatever goes wrong, every rule holds and nothing is left.

A failure says the rule, the step, the job's story and the command that replays it.
"""

from __future__ import annotations

import random

import pytest

from callboard.simulation import Fault, SimulationOptions, SimulationReport, simulate
from callboard.simulation.options import ALL_FAULTS, NO_FAULTS


def run(options: SimulationOptions) -> SimulationReport:
    report = simulate(options)
    failure = report.failure
    if failure is not None:
        told = "\n".join((failure.message, *failure.story, "last events:", *failure.last_events))
        pytest.fail(f"step {failure.step}, {failure.rule}; replay: {failure.command}\n{told}")
    return report


# Together they bring about every kind of trouble there is, in each way of drawing the order of tasks.
@pytest.mark.parametrize(("seed", "events"), [(1, 600), (7, 600), (9, 600), (14, 600), (17, 2_000)])
def test_every_rule_holds_under_all_faults(seed: int, events: int) -> None:
    report = run(SimulationOptions(seed=seed, events=events, nodes=5, schedule=seed % 3))
    assert report.events >= events
    assert report.processes > 50
    assert dict(report.faults)["message duplicated"] > 0


def test_a_goodbye_that_comes_together_with_the_end_of_its_stream_leaves_the_node_to_its_lease() -> None:
    run(SimulationOptions(seed=600118, events=1_000, nodes=6))


@pytest.mark.parametrize("number", range(2))
def test_every_rule_holds_under_a_fresh_seed(number: int) -> None:
    run(SimulationOptions(seed=random.SystemRandom().randrange(1_000_000), events=1_200, nodes=6))


def test_without_faults_every_job_that_is_taken_in_ends() -> None:
    report = run(SimulationOptions(seed=3, jobs=60, nodes=4, faults=NO_FAULTS))
    # Some ask for more than their pool or the cluster could ever give.
    assert 50 <= sum(count for _, count in report.jobs) <= 60
    assert {what for what, _ in report.faults} <= {"calls refused", "worker asked to yield before its kill"}


@pytest.mark.parametrize("fault", sorted(ALL_FAULTS))
def test_every_fault_alone_is_survived(fault: Fault) -> None:
    run(SimulationOptions(seed=5, events=150, nodes=3, faults=frozenset({fault})))
