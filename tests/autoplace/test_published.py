"""Does the search order layouts as published measurements did?

Seconds per step from the public reports of verl (fully asynchronous and one-step-off training of 7B and 30B models on
H20). The asynchronous rollout needed only a part of the GPU-seconds that the synchronous step spent on it, so it is
costed by its work; what the synchronous step spent beyond that is its tail. The trainer's time on its own GPUs is the
measured one, as laws mispredict it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from callboard.autoplace import Plan, Problem, Status, search

WITHIN = 0.15


@dataclass(frozen=True)
class Measured:
    """One published comparison.

    Attributes:
        gpus: of both layouts.
        step: seconds of the synchronous step, all components on all GPUs in turn.
        stages: its rollout, log-probabilities and update.
        split: GPUs of the rollout in the asynchronous layout; the trainer has the rest.
        work_share: part of the rollout's synchronous GPU-seconds that its asynchronous work took.
        update: seconds of everything on the trainer's GPUs.
        async_step: seconds of the asynchronous step.
    """

    gpus: int
    step: float
    stages: tuple[float, float, float]
    split: int
    work_share: float
    update: float
    async_step: float


CASES = {
    "V1": Measured(32, 790.10, (357.41, 107.71, 269.80), 16, 0.41, 313.81, 294.77),
    "V2": Measured(64, 365.28, (150.72, 70.26, 133.41), 32, 0.63, 156.98, 189.26),
    "V3": Measured(128, 356.30, (177.85, 53.92, 113.81), 64, 0.42, 113.16, 150.63),
    "V6": Measured(128, 497.89, (348.05, 28.73 + 20.86, 86.27), 96, 0.61, 206.63 + 50.05, 282.75),
}


def synchronous(case: Measured) -> Plan:
    """The step with everything on all GPUs in turn."""
    names = ("rollout", "logprob", "actor")
    return search(
        Problem.from_mapping(
            {
                "gpus": case.gpus,
                "components": {
                    name: {"seconds_by_gpus": {case.gpus: seconds}}
                    for name, seconds in zip(names, case.stages, strict=True)
                },
                "edges": [["rollout", "logprob", "barrier"], ["logprob", "actor", "barrier"]],
            }
        )
    )


def asynchronous(case: Measured, staleness: float) -> Plan:
    """The best asynchronous plan; the trainer may have its published GPUs, or share all of them."""
    rollout, logprob, update = case.stages
    work = rollout * case.work_share
    problem = Problem.from_mapping(
        {
            "workflow": {
                "components": {
                    "rollout": {
                        "seconds_by_gpus": {case.gpus: rollout},
                        "work_gpu_seconds": work * case.gpus,
                        "tail_seconds": rollout - work,
                        "gpus": {"counts": [case.split, case.gpus]},
                        "scaling": "linear",
                    },
                    "trainer": {
                        "seconds_by_gpus": {case.gpus - case.split: case.update, case.gpus: logprob + update},
                        "gpus": {"measured": True},
                    },
                },
                "edges": [["rollout", "trainer", "barrier"]],
            },
            "cluster": {"nodes": [{"gpus": 8, "count": case.gpus // 8}]},
            "objective": {"async": {"staleness": staleness}},
        }
    )
    plan = search(problem)
    assert plan.status is Status.OPTIMAL
    return plan


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_asynchronous_split_wins_where_it_won(case: Measured) -> None:
    together = synchronous(case)
    apart = asynchronous(case, staleness=2)
    assert together.iteration_seconds == pytest.approx(case.step, rel=WITHIN)
    assert apart.layout == "disaggregated"
    assert apart.span("rollout").gpus == case.split
    assert apart.iteration_seconds == pytest.approx(case.async_step, rel=WITHIN)
    assert apart.iteration_seconds < together.iteration_seconds


def test_v4_more_staleness_is_never_slower_and_the_first_steps_buy_most() -> None:
    periods = [asynchronous(CASES["V3"], staleness).iteration_seconds for staleness in (0, 0.1, 0.3, 0.5, 2)]
    assert all(later <= sooner for sooner, later in pairwise(periods))
    assert periods[0] > periods[3] > periods[4]


def test_v8_no_gain_where_none_was_seen() -> None:
    # Eight GPUs less for a trainer that takes nine tenths of the step: 489.95 s against 484.62 s.
    case = Measured(16, 484.62, (52.94, 0.0, 430.26), 8, 1.0, 489.95, 489.95)
    plan = asynchronous(case, staleness=2)
    assert plan.layout == "collocated"
    assert plan.iteration_seconds == pytest.approx(case.step, rel=WITHIN)
    assert plan.alternatives["disaggregated"] == pytest.approx(489.95)
