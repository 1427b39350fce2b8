"""Where in the file is it, and which files are refused?"""

from __future__ import annotations

import pytest
import yaml

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import job_spec, pool_spec, read_yaml
from callboard.model.inputs.source import composed


def faults_of(text: str) -> tuple[Fault, ...]:
    with pytest.raises(InvalidInput) as caught:
        read_yaml(text)
    return caught.value.faults


class TestReading:
    def test_yaml_and_json(self) -> None:
        assert read_yaml("a: 1\nb: [x, {c: 2}]\n") == {"a": 1, "b": ["x", {"c": 2}]}
        assert read_yaml('{"a": 1, "b": [null, true, 0.5]}') == {"a": 1, "b": [None, True, 0.5]}

    def test_merges_yield_to_what_is_stated(self) -> None:
        text = "base: &base {cpu: 1, gpu: 1}\nmore: &more {gpu: 2, x: 3}\nown: {<<: [*base, *more], cpu: 4}\n"
        assert read_yaml(text)["own"] == {"cpu": 4, "gpu": 1, "x": 3}


class TestWhereFaultsAre:
    def test_a_key_twice_is_refused_with_both_places(self) -> None:
        (fault,) = faults_of("name: a\npool: p\nname: b\n")
        assert (fault.field, fault.line, fault.column) == ("name", 3, 1)
        assert fault.message == "the key 'name' occurs twice, first in line 1"

    def test_every_key_that_occurs_twice_is_told_at_any_depth(self) -> None:
        faults = faults_of("a: {x: 1, x: 2}\nb:\n- y: 1\n  y: 2\n")
        assert [(fault.field, fault.line, fault.column) for fault in faults] == [("a.x", 1, 11), ("b[0].y", 4, 3)]

    @pytest.mark.parametrize("text", ["a: {0: 1,\n .0: 2}", "a: {1: x,\n true: y}", "a: {1.0: x,\n 1: y}"])
    def test_equal_numbers_are_one_key_however_they_are_written(self, text: str) -> None:
        (fault,) = faults_of(text)
        assert fault.line == 2
        assert "occurs twice, first in line 1" in fault.message

    @pytest.mark.parametrize(
        ("line", "field"),
        [
            ("  workers: 010", "components[0].workers"),
            ("  resources: {cpu: 1:30}", "components[0].resources.cpu"),
            ("  kwargs: {mode: [0755]}", "components[0].kwargs.mode[0]"),
            ("priority: 010", "priority"),
            ("wait_for_nodes: 1:30", "wait_for_nodes.timeout"),
        ],
    )
    def test_ps_01_a_number_that_nobody_typed_is_refused(self, line: str, field: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            job_spec(read_yaml(f"name: j\npool: p\ncomponents:\n- name: c\n  actor: m:C\n{line}\n"))
        (fault,) = caught.value.faults
        assert (fault.field, fault.line) == (field, 6)
        assert "for YAML reads" in fault.message

    def test_ps_01_configs_of_others_may_have_such_numbers(self) -> None:
        assert read_yaml("mode: 0755\nat: 1:30\n", ours=False) == {"mode": 493, "at": 90}
        assert read_yaml("a: 0\nb: 0x10\nc: 1_000\nd: '010'\n") == {"a": 0, "b": 16, "c": 1000, "d": "010"}

    def test_faults_of_a_job_have_line_and_column(self) -> None:
        text = "name: j\npool: p\ncomponents:\n- name: c\n  actor: nothing\n  resources: {cpu: 1, gpu: 1.5}\n- nam: d\n"
        with pytest.raises(InvalidInput) as caught:
            job_spec(read_yaml(text))
        assert [(fault.field, fault.line, fault.column) for fault in caught.value.faults] == [
            ("components[0].actor", 5, 3),
            ("components[0].resources.gpu", 6, 23),
            ("components[1].nam", 7, 3),
        ]
        assert str(caught.value.faults[0]).startswith("5:3: components[0].actor: 'nothing' is not")

    def test_faults_of_a_pool_have_line_and_column(self) -> None:
        with pytest.raises(InvalidInput) as caught:
            pool_spec(read_yaml("name: p\nnominal:\n  cpu: -1\n"))
        assert [(fault.field, fault.line) for fault in caught.value.faults] == [("nominal.cpu", 3)]

    def test_numbers_are_keys_and_indices(self) -> None:
        """A table by number of GPUs is read with numbers for keys, and a fault in it has its own column."""
        source = read_yaml("rollout: {8: 59.9, 16: -1}\nnodes: [8, {gpus: 4}]\n")
        assert source.position(("rollout", 16)) == (1, 20)
        assert source.position(("rollout", "16")) == (1, 20)
        assert source.position(("nodes", 1, "gpus")) == (2, 13)
        assert source.position(("rollout", 32)) == source.position(("rollout",)) == (1, 1)

    def test_words_that_yaml_takes_for_truth_values_are_refused_as_labels(self) -> None:
        with pytest.raises(InvalidInput, match=r"labels\.stage: true .* put it in quotes"):
            pool_spec(read_yaml("name: p\nlabels: {stage: on}\n"))


class TestFilesThatAreRefused:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "the file is empty"),
            ("# nothing\n", "the file is empty"),
            ("- a\n", "holds a list, not a mapping"),
            ("just words", "holds 'just words', not a mapping"),
            ("a: [", "no YAML"),
            ("a: 'x", "no YAML"),
            ("a: \x07", "no YAML"),
            ("a: b: c", "no YAML"),
            ("a: 1\n---\nb: 2\n", "another document"),
            ("a: !!python/object/apply:os.system [x]", "is not allowed"),
            ("a: !!set {x, y}", "is not allowed"),
            ("a: !thing x", "could not determine a constructor"),
            ("? [1]\n: 2", "a key is not a text"),
            ("a: *nowhere", "undefined alias"),
            ("a: 2024-13-45", "no YAML"),
            ("a: &a [*a]", "nested deeper"),
            ("[" * 2000, "nested deeper"),
            ("a: {<<: 3}", "<< needs a mapping"),
            ("a: " + "x" * (5 << 20), "larger than"),
        ],
    )
    def test_with_a_reason(self, text: str, reason: str) -> None:
        assert reason in faults_of(text)[0].message

    @pytest.mark.parametrize(
        ("text", "place", "remedy"),
        [
            ("a: 1\nb: 'x\nc: 2\n", (2, 4), "the quote that stands here is closed nowhere"),
            ("a: 1\n  b: 2\n", (2, 4), "an indented key, a key without a value above it"),
            ("a:\n  b: 1\n c: 2\n", (3, 2), "this line is indented like none above it"),
            ('a: "b" c\n', (1, 8), "a text goes on behind its closing quote"),
            ("a: - b\n", (1, 4), "the items of a list begin on lines of their own"),
            ("a: @b\n", (1, 4), "a text that begins with this character needs quotes"),
            ("a: *\n", (1, 5), "a text that begins with this character needs quotes"),
            ("a: *b\n", (1, 4), "what an anchor (&) of that name marks above it"),
            ("a: {b: 1\nc: 2\n", (2, 2), "a comma or a closing bracket is missing before this"),
            ("a: 1\nb\nc: 2\n", (3, 1), "a key needs ': ' behind it"),
            ('a: "C:\\dir"\n', (1, None), "write two backslashes for one"),
            ("a: 1\n---\nb: 2\n", (2, 1), "write each document into a file of its own"),
            ("{a: 1}}\n", (1, 7), "a bracket is too many"),
            ("a: 1\nb: 2024-13-45\n", (2, 4), "can't be read as a date; put it in quotes if it is meant as a text"),
        ],
    )
    @pytest.mark.parametrize("loader", [yaml.SafeLoader, getattr(yaml, "CBaseLoader", yaml.BaseLoader)])
    def test_with_a_place_and_what_usually_helps(
        self, text: str, place: tuple[int, int | None], remedy: str, loader: type
    ) -> None:
        """Both readers of YAML, which say the same in different words."""
        if "2024" in text:
            (fault,) = faults_of(text)
        else:
            with pytest.raises(InvalidInput) as caught:
                composed(text, loader)
            (fault,) = caught.value.faults
        assert remedy in fault.message
        assert (fault.line, place[1] and fault.column) == place

    def test_ten_lines_that_mean_a_thousand_million_values(self) -> None:
        lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9)]
        assert "more than 200000 values" in faults_of("\n".join(lines))[0].message

    def test_no_tag_runs_code(self) -> None:
        assert faults_of("a: !!python/object/new:os.system ['echo']")[0].line == 1
