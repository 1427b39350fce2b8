"""Which options of a task are kept, and are those of a large cluster found in time?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callboard.autoplace import NoPlan, Problem, search
from callboard.autoplace.instance.instances import instance_of
from callboard.autoplace.instance.options import MOST_SIZES_OF_CYCLE, undominated
from callboard.autoplace.instance.tasks import Option, Part
from callboard.autoplace.problem.problem import Mode

_FEW = st.integers(0, 4)


@st.composite
def _options(draw: st.DrawFn) -> list[Option]:
    def option() -> Option:
        pool = draw(st.sampled_from(["a", "b"]))
        work = draw(_FEW)
        return Option(
            parts=(Part(component=0, mode=Mode(pool=pool, gpus=1, seconds=1.0, held_seconds=1.0)),),
            widths=((0, draw(st.integers(1, 5))),),
            work=work,
            piece=draw(_FEW),
            extra=draw(st.integers(0, 2)),
            alone=draw(st.booleans()),
            peak=draw(st.integers(0, 1)),
            resident=draw(st.integers(0, 1)),
            held=draw(st.sampled_from([work, draw(_FEW)])),
            tail=draw(st.integers(0, 1)),
        )

    return [option() for _ in range(draw(st.integers(1, 15)))]


def _beats(one: Option, other: Option) -> bool:
    keys = ("gpus", "work", "piece", "held", "tail", "extra", "alone", "peak", "resident")
    return one.parts[0].mode.pool == other.parts[0].mode.pool and all(
        getattr(one, key) <= getattr(other, key) for key in keys
    )


@given(_options())
@settings(max_examples=150, deadline=None)
def test_what_is_kept_is_beaten_by_nothing_before_it_and_beats_the_rest(options: list[Option]) -> None:
    kept = undominated(options)
    assert all(any(_beats(one, option) for one in kept) for option in options)
    assert not any(_beats(one, other) for one, other in combinations(kept, 2))


def _law(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds_by_gpus": {8: seconds}, "scaling": {"model": "amdahl", "serial_fraction": 0.01}, **more}


def _cycle(gpus: int) -> Problem:
    return Problem.from_mapping(
        {
            "workflow": {
                "chunks": 16,
                "components": {"env": _law(40.0), "rollout": _law(60.0), "actor": _law(95.7)},
                "edges": [["env", "rollout", "stream"], ["rollout", "env", "stream"], ["rollout", "actor", "barrier"]],
            },
            "cluster": {"nodes": [{"gpus": 8, "count": gpus // 8}]},
        }
    )


def test_thousands_of_counts_are_made_into_options() -> None:
    """Each count is an option, with and without switching. They were compared pair by pair, for minutes from some ten
    thousand GPUs on."""
    problem = Problem.from_mapping(
        {
            "workflow": {"components": {"rollout": _law(60.0, switch_seconds=1.0)}},
            "cluster": {"nodes": [{"gpus": 8, "count": 512}]},
        }
    )
    (task,) = instance_of(problem).tasks
    assert {option.gpus for option in task.options} >= set(range(1, 2048))


def test_a_cycle_has_an_option_as_good_as_every_pair_of_sizes() -> None:
    problem = _cycle(24)
    instance = instance_of(problem)
    task = max(instance.tasks, key=lambda task: len(task.members))
    apart = [option for option in task.options if not option.takes_turns]
    in_turn = [option for option in task.options if option.takes_turns]
    for env in problem.component("env").modes:
        for rollout in problem.component("rollout").modes:
            pieces = [mode.seconds / problem.chunks for mode in (env, rollout)]
            ways = [(in_turn, max(env.gpus, rollout.gpus), sum(pieces) * problem.chunks)]
            if env.gpus + rollout.gpus <= 24:
                beside = sum(pieces) + max(pieces) * (problem.chunks - 1)
                ways.append((apart, env.gpus + rollout.gpus, beside))
            for options, gpus, seconds in ways:
                assert any(
                    option.gpus <= gpus
                    and option.work <= round(seconds / instance.unit_seconds)
                    and option.piece <= round(sum(pieces) / instance.unit_seconds)
                    for option in options
                )


def test_a_cycle_of_too_many_counts_says_what_to_state() -> None:
    gpus = 8 * (int(MOST_SIZES_OF_CYCLE**0.5) // 8 + 1)
    with pytest.raises(NoPlan, match=r"env and rollout are a cycle.*state the counts"):
        search(_cycle(gpus))
