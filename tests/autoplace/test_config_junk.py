"""Can a config make the reader fail in any way but by naming its faults?"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from callboard.autoplace.problem.problem import NoPlan
from callboard.autoplace.rlinf.job import rlinf_job
from callboard.model.faults import InvalidInput

BASE: dict[str, Any] = {
    "runner": {"task_type": "reasoning"},
    "cluster": {
        "num_nodes": 2,
        "num_gpus_per_node": 4,
        "auto_scheduler": False,
        "component_placement": {
            "actor,rollout": {"node_group": "a", "placement": "0-3"},
            "env": "0:0-1",
            "reward": 0,
        },
        "node_groups": [
            {"label": "a", "node_ranks": "0-1"},
            {"label": "f", "node_ranks": 0, "hardware": {"type": "x"}},
        ],
    },
    "algorithm": {"group_size": 4, "n_minibatches": 2, "recompute_logprobs": True},
    "data": {"rollout_batch_size": 16, "env_num": 16},
    "rollout": {"max_running_requests": 64, "tensor_parallel_size": 1, "pipeline_stage_num": 2},
    "actor": {"model": {"tensor_model_parallel_size": 1}, "global_batch_size": 64},
    "inference": {"model": {"tensor_model_parallel_size": 1}},
    "profile_data": {
        "actor_cost": 9.0,
        "inference_cost": {4: 3.0, "8": 2.0},
        "rollout_cost": 6.0,
        "num_gpus": 8,
        "env_profile_data": {2: 1.0, 16: 4.0},
        "rollout_profile_data": {2: 1.0, 16: 4.0},
    },
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.integers(-2, 20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["0-3", "all", "9-1", "0:0-3", "node", "${x}", "???", "embodied", "reasoning", "0-99999999999"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-1, 9), st.none()), st.floats(), max_size=3),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


PLACES = places(BASE)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), JUNK), min_size=1, max_size=4),
    st.sampled_from(["reasoning", "embodied"]),
    st.sampled_from([None, (8,), (4, 4), (0, 3), ()]),
)
def test_whatever_is_written_the_answer_is_a_problem_or_named_faults(
    changes: list[tuple[tuple[Any, ...], Any]], kind: str, nodes: tuple[int, ...] | None
) -> None:
    config = copy.deepcopy(BASE)
    config["runner"]["task_type"] = kind
    for path, junk in changes:
        section: Any = config
        for key in path[:-1]:
            section = section[key] if isinstance(section, dict | list) and _has(section, key) else None
        if isinstance(section, dict | list) and (isinstance(section, dict) or _has(section, path[-1])):
            section[path[-1]] = junk
    assert told_or_built(config, nodes)


def told_or_built(config: dict[str, Any], nodes: tuple[int, ...] | None) -> bool:
    """Whether the reader named faults, named components without a place, or built a problem with modes for each."""
    try:
        job = rlinf_job(config, nodes=nodes)
    except InvalidInput as error:
        return bool(error.faults) and all(fault.message for fault in error.faults)
    except NoPlan as error:
        return bool(error.causes)
    return all(component.modes for component in job.problem.components)


def _has(section: Any, key: Any) -> bool:
    return key in section if isinstance(section, dict) else isinstance(key, int) and key < len(section)
