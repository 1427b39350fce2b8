"""Does `callboard plan` say what a job needs, offline, and do the examples keep their promises?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from callboard.cli.main import app
from callboard.model.roles import PRESETS

PLANS = Path(__file__).parents[2] / "examples" / "plans"

JOB = """
name: j
pool: p
components:
  - {name: a, role: trainer, actor: "m:A", workers: 2}
  - {name: b, role: validator, actor: "m:B", pool: other}
"""


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments], input=text)


def planned(*arguments: str, text: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke(*arguments, "-o", "json", text=text).stdout)
    return found


class TestTheExamples:
    """The three sizes of the seed; colocated members don't count twice."""

    @pytest.mark.parametrize(
        ("size", "totals"),
        [("small", {"cpu": 14, "gpu": 1}), ("medium", {"cpu": 88, "gpu": 4}), ("large", {"cpu": 304, "gpu": 8})],
    )
    def test_need_what_the_arithmetic_says_and_fit(self, size: str, totals: dict[str, int]) -> None:
        found = planned(str(PLANS / f"{size}.yaml"))
        assert found["totals"] == totals
        assert found["fits"] is True
        assert found["unplaced"] == []

    def test_large_keeps_rollouts_off_the_gpu_nodes(self) -> None:
        found = planned(str(PLANS / "large.yaml"))
        assert found["node_groups"] == {"gpu": {"cpu": 48, "gpu": 8}, "cpu": {"cpu": 256, "gpu": 0}}
        assert found["pools"] == {
            "cpu_pool": {"cpu": 256, "gpu": 0},
            "gpu_pool": {"cpu": 40, "gpu": 8},
            "storage_pool": {"cpu": 8, "gpu": 0},
        }

    def test_are_all_tried(self) -> None:
        assert {path.stem for path in PLANS.iterdir()} == {"small", "medium", "large"}

    def test_are_read_by_people_too(self) -> None:
        shown = invoke(str(PLANS / "small.yaml")).stdout
        assert "small needs 14 CPU, 1 GPU." in shown
        assert "training: trainer, trajectory_pool, weight_sync" in shown
        assert "It fits." in shown


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


class TestTheDocs:
    def test_show_what_the_verb_prints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (PLANS.parents[1] / "docs" / "roles.md").read_text()
        _, _, block = text.partition("$ callboard plan examples/plans/small.yaml\n")
        printed = invoke(str(PLANS / "small.yaml")).stdout
        assert _lines(block.partition("```")[0]) == _lines(printed)

    def test_have_the_table_of_presets(self) -> None:
        text = (PLANS.parents[1] / "docs" / "roles.md").read_text()
        for role, preset in PRESETS.items():
            cpu, gpu = preset.resources.cpu_milli // 1000, preset.resources.gpu_milli // 1000
            assert f"| {role} | {cpu} | {gpu} | {preset.max_concurrency} | {preset.profile} |" in text


class TestAPlan:
    def test_without_nodes_says_totals_alone(self) -> None:
        result = invoke("-", "-o", "json", text=JOB)
        found = json.loads(result.stdout)
        assert result.exit_code == 0
        assert found["totals"] == {"cpu": 9, "gpu": 2}
        assert found["fits"] is None
        assert found["components"][0]["per_worker"] == {"cpu": 4, "gpu": 1}
        assert "nodes" not in found

    def test_that_does_not_fit_says_what_and_why_and_ends_with_3(self) -> None:
        result = invoke("-", "--nodes", "(1gpu,32cpu)", "-o", "json", text=JOB)
        found = json.loads(result.stdout)
        assert result.exit_code == 3
        assert found["fits"] is False
        assert found["unplaced"] == [
            {"component": "a", "workers": 1, "why": ["one worker asks 1 gpu; node-0 has 0 left"]}
        ]
        shown = invoke("-", "--nodes", "(1gpu,32cpu)", text=JOB).stdout
        assert "It does not fit." in shown
        assert "1 × a find no room" in shown

    def test_takes_the_nodes_of_the_option_before_those_of_the_file(self) -> None:
        assert planned("-", "--nodes", "2x(8gpu,64cpu)", text=JOB + "nodes: (1cpu)\n")["fits"] is True
        assert planned("-", text=JOB + "nodes: (1cpu)\n")["fits"] is False

    def test_takes_roles_from_a_file(self, tmp_path: Path) -> None:
        roles = tmp_path / "roles.yaml"
        roles.write_text("roles: {trainer: {cpu: 10, gpu: 4}}")
        assert planned("-", "--roles", str(roles), text=JOB)["totals"] == {"cpu": 21, "gpu": 8}

    @pytest.mark.parametrize(
        ("arguments", "text", "words"),
        [
            (["-"], "name: [", "1:8: no YAML"),
            (["-"], JOB.replace("trainer", "trianer"), "did you mean trainer?"),
            (["-"], JOB.replace("workers: 2", "workers: 0"), "1 to 100000"),
            (["-", "--nodes", "8+x"], JOB, "describes no node"),
            (["-"], JOB + "nodes: [1]\n", "4x(2gpu,32cpu)"),
            (["/nowhere/job.yaml"], "", "can't be read"),
        ],
    )
    def test_of_bad_input_ends_with_2(self, arguments: list[str], text: str, words: str) -> None:
        result = invoke(*arguments, text=text)
        assert result.exit_code == 2
        assert words in result.output

    def test_imports_no_client(self) -> None:
        code = "import callboard.cli.actions.plan, sys; print(*sys.modules)"
        loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
        assert loaded & {"grpc", "ray", "asyncio", "rich.console", "callboard.simulation"} == set()
