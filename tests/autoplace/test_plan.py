"""Does a plan say who lies where, however it is asked?"""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from callboard.autoplace import Plan, Problem, Status, search
from callboard.autoplace.problem.plan import Spans


def plan() -> Plan:
    """Two components side by side."""
    components = {"rollout": {"seconds_by_gpus": {"2": 8}}, "actor": {"seconds_by_gpus": {"2": 8}}}
    return search(Problem.from_mapping({"gpus": 4, "components": components}))


class TestSpans:
    def test_they_are_found_by_name_and_by_place(self) -> None:
        spans = plan().spans
        assert spans["actor"] is spans[1]
        assert spans["actor"].gpu_ranks == (2, 3)
        assert spans[:1] == (spans["rollout"],)
        assert spans[0] in spans
        names: list[object] = ["actor", "critic"]
        assert [name in spans for name in names] == [True, False]
        with pytest.raises(KeyError):
            spans["critic"]

    def test_they_are_listed_as_a_tuple_and_as_a_mapping(self) -> None:
        spans = plan().spans
        assert [span.component for span in spans] == ["rollout", "actor"]
        assert dict(spans) == dict(spans.items()) == {"rollout": spans[0], "actor": spans[1]}
        assert (spans.keys(), spans.values()) == (("rollout", "actor"), tuple(spans))

    def test_they_survive_being_copied_and_sent(self) -> None:
        spans = plan().spans
        for again in (copy.deepcopy(spans), pickle.loads(pickle.dumps(spans))):
            assert isinstance(again, Spans)
            assert again == spans
            assert again["actor"] == spans["actor"]


def test_a_status_is_its_text() -> None:
    status = plan().status
    assert status is Status.OPTIMAL
    assert status == "OPTIMAL"
    assert f"{status}" == "OPTIMAL"
    assert json.dumps(status) == '"OPTIMAL"'
    assert {"OPTIMAL": 1}[status] == 1


def test_members_of_a_cycle_count_one_by_one_in_a_layout() -> None:
    """env and rollout side by side, then the actor on both their GPUs: neither of the pure layouts."""
    components = {
        "env": {"seconds_by_gpus": {"2": 8}},
        "rollout": {"seconds_by_gpus": {"2": 8}},
        "actor": {"seconds_by_gpus": {"4": 3, "1": 12}},
    }
    edges = [["env", "rollout", "stream"], ["rollout", "env", "stream"], ["rollout", "actor", "barrier"]]
    found = search(Problem.from_mapping({"gpus": 4, "chunks": 8, "components": components, "edges": edges}))
    assert found.layout == "hybrid"
    assert found.iteration_seconds == pytest.approx(9 + 3)
    assert found.alternatives == {"collocated": 8 + 8 + 3, "disaggregated": None, "hybrid": found.iteration_seconds}
