"""Does every text end in a plan or in faults? Thousands of careless edits of valid files say so.

``benchmarks/placement.py --fuzz 100000`` runs more of them against a limit of time.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callboard.placement import plan_placement
from tests.placement import mutations

KNOWN = mutations.cluster()


@pytest.mark.parametrize("text", mutations.VALID, ids=["hetero", "reasoning", "job", "section", "collocated"])
def test_the_files_that_are_mutated_are_valid(text: str) -> None:
    assert plan_placement(text, None if text is mutations.SECTION else KNOWN).workers


@pytest.mark.parametrize("seed", range(4))
def test_careless_edits_end_in_a_plan_or_in_faults(seed: int) -> None:
    chance = random.Random(seed)
    found = Counter(mutations.outcome(mutations.mutated(chance), KNOWN) for _ in range(1000))
    assert set(found) == {"plan", "faults"}  # both happen, or the edits are too tame or too wild


@given(st.text(max_size=40))
def test_any_text_is_a_placement_or_a_fault(text: str) -> None:
    assert mutations.outcome_of({"cluster": {"component_placement": {"actor": text}}}, KNOWN) in {"plan", "faults"}


@given(st.text(alphabet="0123456789-:, al", max_size=24))
def test_any_text_of_the_grammar_s_characters_is_a_placement_or_a_fault(text: str) -> None:
    assert mutations.outcome_of({"cluster": {"component_placement": {"actor": text}}}, KNOWN) in {"plan", "faults"}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([b"x", (1,), {1}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    ["num_nodes", "component_placement", "node_groups", "nodes", "auto_scheduler", "num_gpus_per_node", "label"]
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=4), st.dictionaries(st.text(max_size=5), _VALUES, max_size=3))
def test_any_mapping_is_a_config_or_a_fault(section: dict[str, object], placements: dict[str, object]) -> None:
    assert mutations.outcome_of({"cluster": {"component_placement": placements, **section}}, KNOWN)
    groups = {"node_groups": [placements, {"label": "a", **section}]}
    assert mutations.outcome_of({"cluster": {"component_placement": {"a": 0}, **groups}}, KNOWN)


BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(ord(c) + 1)}: &{chr(ord(c) + 1)} [*{c},*{c},*{c},*{c},*{c},*{c},*{c},*{c}]\n" for c in "abcdefgh"
)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "cluster: " + "{a: " * 100_000,
        "- " * 50_000,
        BOMB + "cluster: {component_placement: *i}",
        "cluster: &c {component_placement: *c}",
        "cluster: {component_placement: {a: '" + "0," * 40_000 + "'}}",
        "cluster: {component_placement: {a: '" + ",".join(str(2 * i) for i in range(12_000)) + "'}}",
        "cluster: {component_placement: {a: '0:0-999999999'}}",
        "cluster: {component_placement: {a: 0-999999999}}",
        "cluster: {num_nodes: 1, component_placement: {a: 0}, node_groups: [{label: x, node_ranks: 0-999999999}]}",
        "cluster: {component_placement: {" + ", ".join(f"c{i}: 0" for i in range(5000)) + "}}",
        "\ud800: 1",
        "\x00",
        "",
        "x",
        "cluster",
        "cluster: 1",
        "cluster: [1]",
        "cluster: {component_placement: 0-3}",
        "a: b\n---\nc: d",
    ],
    ids=range(20),
)
def test_hostile_texts_are_bounded(text: str) -> None:
    assert mutations.outcome(text, KNOWN) == "faults"
