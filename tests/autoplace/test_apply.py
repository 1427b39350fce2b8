"""Does a placement get into a user's file, and does everything else in it stay as it is?"""

from __future__ import annotations

import difflib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from callboard.autoplace.answer.applying import section_text, with_placement
from callboard.model.faults import InvalidInput

CONFIG = """\
# How we train the 7B model.
defaults:
  - override hydra/job_logging: stdout
cluster:
  num_nodes: 8      # all of them
  auto_scheduler : True
  component_placement:
    # actor: 0-31
    # rollout: 32-111

    actor: 0-15     # training
    rollout: 16-55
    inference: 56-63    # log-probabilities
    reward: all

    # what we tried before:
    # actor: 0-7

runner:
  resume_dir: ~
  lr: 2e-05
  name: "a # b"     # quoted
  steps: [ 1,2,  3 ]
"""


def changed_lines(before: str, after: str) -> list[str]:
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in diff if line[:2] not in {"--", "++", "@@"}]


class TestInPlace:
    def test_entries_that_merge_change_their_lines_alone_and_keep_their_comments(self) -> None:
        after = with_placement(CONFIG, 8, {"rollout,actor": "all", "reward": "all"})
        assert changed_lines(CONFIG, after) == [
            "-    actor: 0-15     # training",
            "-    rollout: 16-55",
            "-    inference: 56-63    # log-probabilities",
            "+    # training",
            "+    rollout,actor: all",
            "+    # inference: log-probabilities",
        ]

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_ft_h2_comments_stay_with_the_components_that_they_describe(self, newline: str) -> None:
        text = """\
cluster:
  component_placement:
    # Written by hand.

    # The trainer.
    actor: 0-3
    # Generates.
    # On its own GPUs.
    rollout: 4-6  # three of them
    # Rewards.
    reward: 7
    # The end.
"""
        together = """\
cluster:
  num_nodes: 1
  component_placement:
    # Written by hand.

    # Generates.
    # On its own GPUs.
    # three of them
    # Rewards.
    rollout,reward: 0-7
    # The trainer.
    actor: 0-3
    # The end.
"""
        placement = {"rollout,reward": "0-7", "actor": "0-3"}
        numbered = text.replace("cluster:\n", "cluster:\n  num_nodes: 1\n")
        after = with_placement(numbered.replace("\n", newline), 1, placement).replace(newline, "\n")
        order = [line for line in after.splitlines() if "rollout" in line or "actor" in line]
        assert order == ["    actor: 0-3", "    rollout,reward: 0-7"], "what stays keeps its place"
        assert sorted(after.splitlines()) == sorted(together.splitlines())
        for component, comments in (
            ("actor", ["# The trainer."]),
            ("rollout", ["# Generates.", "# On its own GPUs.", "# three of them", "# Rewards."]),
        ):
            lines = after.splitlines()
            at = next(place for place, line in enumerate(lines) if line.lstrip().startswith(component))
            assert [line.strip() for line in lines[at - len(comments) : at]] == comments
        split = with_placement(after, 1, {"actor": "0-3", "rollout": "4-6", "reward": "7"})
        assert split.count("#") == after.count("#")
        assert (
            split.index("# The trainer.") < split.index("actor") < split.index("# Generates.") < split.index("rollout:")
        )

    def test_entries_that_stay_keep_their_place_and_get_new_values(self) -> None:
        after = with_placement(CONFIG, 4, {"rollout": "0-9", "inference": "10-11", "actor": "12-31", "reward": "0-9"})
        assert changed_lines(CONFIG, after) == [
            "-  num_nodes: 8      # all of them",
            "+  num_nodes: 4      # all of them",
            "-    actor: 0-15     # training",
            "-    rollout: 16-55",
            "-    inference: 56-63    # log-probabilities",
            "-    reward: all",
            "+    actor: 12-31     # training",
            "+    rollout: 0-9",
            "+    inference: 10-11    # log-probabilities",
            "+    reward: 0-9",
        ]

    def test_a_mapping_below_its_key_gives_way_to_a_text_beside_it(self) -> None:
        text = "cluster:\n    component_placement:\n        actor:\n            placement: all\n        env:\n"
        text += "            # by hand\n            placement: 0-1  # two\nx: 1\n"
        after = with_placement(text, 1, {"actor": "0-3", "env": "4-7"})
        assert after == (
            "cluster:\n    component_placement:\n        actor: 0-3\n        env:\n            # by hand\n"
            "            4-7  # two\nx: 1\n"
        )

    def test_the_same_placement_changes_no_byte(self) -> None:
        placement = {"rollout": "16-55", "actor": "0-15", "reward": "all", "inference": "56-63"}
        assert with_placement(CONFIG, 8, placement) == CONFIG

    def test_names_in_another_order_are_the_same_entry(self) -> None:
        text = "cluster:\n  component_placement:\n    actor, rollout: 0-3  # both\n"
        assert with_placement(text, 1, {"rollout,actor": "all"}) == text.replace("0-3", "all")

    def test_windows_line_ends_and_a_byte_order_mark_stay(self) -> None:
        text = "\ufeff" + CONFIG.replace("\n", "\r\n")
        after = with_placement(text, 8, {"rollout,actor": "all", "reward": "all"})
        assert after.startswith("\ufeff# How")
        assert "\r\n    rollout,actor: all\r\n" in after
        assert "\n" not in after.replace("\r\n", "")

    def test_what_an_uncosted_entry_says_is_not_written_anew(self) -> None:
        """``010`` is 8 to one reader of YAML and 10 to another; nobody asked to decide that here."""
        text = "cluster:\n  component_placement:\n    actor: 0-3\n    agent: 010\n"
        after = with_placement(text, 1, {"actor": "all", "agent": 8})  # type: ignore[dict-item]
        assert after == text.replace("0-3", "all")

    def test_flow_style_stays_on_its_line(self) -> None:
        text = "a: 1\ncluster: {num_nodes: 1, component_placement: {actor: 0-3, rollout: 4-7}}  # short\nb: 2\n"
        after = with_placement(text, 1, {"rollout,actor": "all", "env": {"node_group": "4090", "placement": "0-2,5"}})
        assert after == (
            'a: 1\ncluster: {num_nodes: 1, component_placement: {"rollout,actor": all, '
            'env: {node_group: "4090", placement: "0-2,5"}}}  # short\nb: 2\n'
        )

    @pytest.mark.parametrize("nothing", ["", " null", " ~", " {}"])
    def test_an_empty_placement_is_filled(self, nothing: str) -> None:
        text = f"cluster:\n  num_nodes: 1\n  component_placement:{nothing}\nb: 2\n"
        after = with_placement(text, 1, {"rollout,actor": "all"})
        assert yaml.safe_load(after)["cluster"]["component_placement"] == {"rollout,actor": "all"}
        assert after.endswith("\nb: 2\n")

    def test_a_cluster_without_a_placement_gets_one(self) -> None:
        text = "cluster:\n  num_nodes: 1  # one\n\n# the rest\nb: 2\n"
        after = with_placement(text, 2, {"rollout": "0-3", "actor": "4-7"})
        assert after == (
            "cluster:\n  num_nodes: 2  # one\n  component_placement:\n    rollout: 0-3\n    actor: 4-7\n"
            "\n# the rest\nb: 2\n"
        )

    @pytest.mark.parametrize("text", ["b: 2", "b: 2\n"])
    def test_a_file_without_a_cluster_gets_one_at_its_end(self, text: str) -> None:
        after = with_placement(text, 1, {"rollout,actor": "all"})
        assert after == f"b: 2\n\n{section_text(1, {'rollout,actor': 'all'})}"

    @pytest.mark.parametrize(
        "text",
        [
            "cluster:\n  component_placement: &p\n    actor: 0-3\nother: *p\n",
            "cluster:\n  component_placement:\n    actor: &x 0-3\n    rollout: *x\nother: *x\n",
            "base: &b {actor: 0-3}\ncluster:\n  component_placement:\n    <<: *b\n    rollout: 4-7\n",
            "base: &b {component_placement: {actor: 0-3}}\ncluster: *b\n",
            "cluster: [1]\n",
        ],
    )
    def test_what_is_tied_to_something_else_is_refused_and_a_way_out_is_named(self, text: str) -> None:
        with pytest.raises(InvalidInput, match="paste the section"):
            with_placement(text, 1, {"rollout,actor": "all"})

    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            (
                "a: &x 0-3\ncluster:\n  component_placement:\n    actor: *x  # first\n    env: *x  # second\nb: *x\n",
                (
                    "a: &x 0-3\ncluster:\n  component_placement:\n    # first\n    rollout,actor: all\n"
                    "    env: 4-5  # second\nb: *x\n"
                ),
            ),
            (
                "cluster:\n  component_placement:\n    env: &x 0-3\n    actor: *x\n",
                "cluster:\n  component_placement:\n    env: 4-5\n    rollout,actor: all\n",
            ),
            (
                "base: &b {actor: 0-3}\ncluster:\n  component_placement: *b  # why\n",
                'base: &b {actor: 0-3}\ncluster:\n  component_placement: {"rollout,actor": all, env: 4-5}  # why\n',
            ),
            (
                "n: &n 2\ncluster:\n  num_nodes: *n  # why\n  component_placement: {actor: 0-3}\nm: *n\n",
                (
                    "n: &n 2\ncluster:\n  num_nodes: 1  # why\n"
                    '  component_placement: {"rollout,actor": all, env: 4-5}\nm: *n\n'
                ),
            ),
        ],
    )
    def test_an_alias_gives_way_and_what_it_stands_for_stays(self, text: str, meant: str) -> None:
        assert with_placement(text, 1, {"rollout,actor": "all", "env": "4-5"}) == meant

    def test_comments_inside_a_flow_mapping_move_above_it(self) -> None:
        text = (
            "cluster: {\n  num_nodes: 1,  # one\n  component_placement: {  # here\n"
            "    'actor': all,  # \"fast\"\n    rollout: 'a#b'\n  },\n}\n"
        )
        assert with_placement(text, 1, {"rollout": "all"}) == (
            'cluster: {\n  num_nodes: 1,  # one\n  # here\n  # "fast"\n  component_placement: {rollout: all},\n}\n'
        )

    @pytest.mark.parametrize("last", ["  num_nodes: 1,\n", "  num_nodes: 1  # one, alone\n", "  num_nodes: 1, # one\n"])
    def test_a_flow_mapping_gets_a_placement_whatever_ends_it(self, last: str) -> None:
        after = with_placement(f"cluster: {{\n{last}}}\n", 1, {"rollout": "all"})
        assert after.startswith(f"cluster: {{\n{last}")
        assert yaml.safe_load(after) == {"cluster": {"num_nodes": 1, "component_placement": {"rollout": "all"}}}

    def test_lines_that_end_in_another_way_than_their_neighbours_stay(self) -> None:
        text = "a: 1\ncluster:\r\n  component_placement:\r\n    actor: 0-3  # why\r\nb: 2\nc: 3\n"
        assert with_placement(text, 1, {"rollout": "all"}) == (
            "a: 1\ncluster:\r\n  component_placement:\r\n    rollout: all\r\n    # actor: why\r\nb: 2\nc: 3\n"
        )

    def test_a_file_that_is_no_yaml_is_refused(self) -> None:
        with pytest.raises(InvalidInput):
            with_placement("a: [", 1, {"actor": "all"})


NAMES = st.sampled_from(["actor", "rollout", "inference", "reward", "env", "critic"])
VALUES = st.sampled_from(["all", "0-3", "4-7", "0", "0-2,5", "0:0-1"])


@st.composite
def placements(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(NAMES, unique=True, min_size=1))
    placement: dict[str, Any] = {}
    while names:
        count = draw(st.integers(1, len(names)))
        value = draw(VALUES)
        grouped = draw(st.booleans())
        placement[",".join(names[:count])] = {"node_group": "4090", "placement": value} if grouped else value
        names = names[count:]
    return placement


@given(placements(), placements(), st.integers(1, 20), st.integers(2, 6), st.booleans())
def test_any_placement_can_replace_any_other_and_nothing_else_changes(
    old: dict[str, Any], new: dict[str, Any], nodes: int, indent: int, commented: bool
) -> None:
    pad = " " * indent
    lines = []
    for key, value in old.items():
        text = (
            f'{{node_group: "{value["node_group"]}", placement: "{value["placement"]}"}}'
            if isinstance(value, dict)
            else repr(value)
        )
        lines.append(f"{2 * pad}{key}: {text}{'   # why' if commented else ''}")
    body = "\n".join(lines)
    before = f"top: 1\ncluster:\n{pad}num_nodes: 7\n{pad}component_placement:\n{body}\n{pad}extra: [1]\ntail: 2\n"
    after = with_placement(before, nodes, new)
    read = yaml.safe_load(after)
    assert read["cluster"]["num_nodes"] == nodes
    assert read["cluster"]["extra"] == [1]
    assert (read["top"], read["tail"]) == (1, 2)
    written = {frozenset(key.split(",")): value for key, value in read["cluster"]["component_placement"].items()}
    wanted = {frozenset(key.split(",")): value for key, value in new.items()}
    assert {key: as_text(value) for key, value in written.items()} == {key: as_text(v) for key, v in wanted.items()}
    assert after.count("why") == before.count("why")


def as_text(value: Any) -> Any:
    return {key: str(item) for key, item in value.items()} if isinstance(value, dict) else str(value)


def test_the_section_is_the_seeds_own() -> None:
    assert section_text(1, {"rollout,actor": "all"}) == (
        "cluster:\n  num_nodes: 1\n  component_placement:\n    rollout,actor: all\n"
    )
