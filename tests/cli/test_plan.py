"""Does `callboard plan` say what a job needs, offline, and do the examples keep their promises?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from callboard.cli.main import app
from callboard.model.describe import job_to_mapping
from callboard.model.inputs.groups import settled
from callboard.model.inputs.job import job_spec
from callboard.model.roles import PRESETS
from callboard.placement import Cluster
from callboard.placement.jobs import place_job

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

    def test_a_text_that_is_not_utf_8_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_bytes("name: j".encode("utf-16"))
        for shown in (
            invoke(str(tmp_path / "job.yaml")),
            CliRunner().invoke(app, ["plan", "-"], input=b"\xff\xfe"),
            CliRunner().invoke(app, ["placement", "show", "-", "--nodes", "4"], input=b"\xff\xfe"),
        ):
            assert shown.exit_code == 2
            assert "save it as utf-8" in shown.output.lower()

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

    def test_code_that_a_submit_would_send_stays_where_it_is(self) -> None:
        """What is named on this machine, all of the README's job."""
        code = "working_dir: my_job, py_modules: [lib], env: {requirements: need.txt}"
        text = JOB.replace('actor: "m:A", ', f'actor: "m:A", {code}, ')
        assert code in text
        found = [planned("-", "--nodes", "2x(8gpu,64cpu)", text=each) for each in (text, JOB)]
        assert found[0] == found[1]
        assert found[0]["fits"] is True

    def test_takes_the_nodes_of_the_option_before_those_of_the_file(self) -> None:
        assert planned("-", "--nodes", "2x(8gpu,64cpu)", text=JOB + "nodes: (1cpu)\n")["fits"] is True
        assert planned("-", text=JOB + "nodes: (1cpu)\n")["fits"] is False
        assert [node["node_group"] for node in planned("-", text=JOB + "nodes: 0\n")["nodes"]] == ["cpu"]

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


PLACED = """\
name: placed
pool: p
components:
  - {name: actor, actor: "m:A", resources: {cpu: 2}}
  - {name: env, actor: "m:B", resources: {cpu: 1}}
  - {name: reward, role: validator, actor: "m:C"}
cluster:
  component_placement:
    actor: 0-3
    env: "0-1:0-3"
"""


class TestAPlacedJob:
    def test_is_planned_where_its_text_places_it(self) -> None:
        found = planned("-", "--nodes", "2x(2gpu,32cpu)", text=PLACED)
        assert found["fits"] is True
        assert found["totals"] == {"cpu": 13, "gpu": 4}  # Three share each of two GPUs: all of it together.
        assert [node["workers"] for node in found["nodes"]] == [{"actor": 2, "env": 4, "reward": 1}, {"actor": 2}]
        assert [component["per_worker"] for component in found["components"]] == [
            {"cpu": 2, "gpu": 1},
            {"cpu": 1, "gpu": 0.333},
            {"cpu": 1, "gpu": 0},
        ]

    def test_that_lacks_cpus_on_a_node_says_which(self) -> None:
        result = invoke("-", "--nodes", "2x(2gpu,6cpu)", "-o", "json", text=PLACED)
        found = json.loads(result.stdout)
        assert result.exit_code == 3
        why = "one worker asks 1 cpu; node-0, where it is placed, has 0 left"
        assert found["unplaced"] == [{"component": "env", "workers": 2, "why": [why]}]
        assert [node["workers"] for node in found["nodes"]] == [{"actor": 2, "env": 2}, {"actor": 2, "reward": 1}]

    def test_may_say_itself_which_nodes_there_are_and_how_they_are_grouped(self) -> None:
        groups = "  node_groups: [{label: cheap, node_ranks: 1-2}]\n    "
        text = PLACED.replace('"0-1:0-3"', "{node_group: cheap, placement: 0-1}")
        nodes = "  nodes: [{node_id: big, accelerators: 4}, {node_id: a, cpu: 4}, {node_id: b, cpu: 4}]\n"
        found = planned("-", text=text + nodes + groups)
        assert found["fits"] is True
        held = {node["node"]: node["workers"] for node in found["nodes"]}
        assert held.pop("big").pop("actor") == 4
        assert [workers.get("env") for workers in held.values()] == [1, 1]

    def test_counts_the_node_groups_of_a_plan(self) -> None:
        text = PLACED.replace('"0-1:0-3"', "{node_group: cpu, placement: 0}")
        found = planned("-", "--nodes", "(4gpu,32cpu)+(8cpu)", text=text)
        assert [node["workers"].get("env") for node in found["nodes"]] == [None, 1]

    def test_shares_a_process_by_its_places(self) -> None:
        text = (
            PLACED.replace("resources: {cpu: 2}}", "colocation_group: g}")
            .replace("resources: {cpu: 1}}", "colocation_group: g}")
            .replace('"0-1:0-3"', "0-3")
        )
        found = planned("-", "--nodes", "4", text=text)
        assert [(each["component"], each["workers"]) for each in found["components"]] == [("g", 4), ("reward", 1)]

    @pytest.mark.parametrize("members", [2, 3, 7])
    def test_ft_b6_a_process_of_several_components_holds_what_each_of_them_is_charged(self, members: int) -> None:
        """Else a part of its GPUs would be left for other jobs, or none of seven equal parts be that of the first."""
        names = [f"c{number}" for number in range(members)]
        job = {
            "name": "j",
            "pool": "p",
            "components": [
                {"name": name, "actor": "m:A", "component_placement": "0-3", "colocation_group": "g"} for name in names
            ],
        }
        found = planned("-", "--nodes", "4", text=json.dumps(job))
        assert (found["totals"]["gpu"], found["nodes"][0]["left"]["gpu"]) == (4, 0)
        cluster = Cluster.from_nodes("4")
        shown = job_to_mapping(settled(place_job(job_spec(job), cluster)))
        again = settled(place_job(job_spec(shown), cluster))
        assert [place.gpu_milli for place in again.components[0].places] == [1000] * 4

    @pytest.mark.parametrize(
        ("arguments", "old", "new", "words"),
        [
            (["--nodes", "2"], "", "", ["input:9:12: error: ", "GPU rank 3 does not exist", "    9 |     actor: 0-3"]),
            (["--nodes", "4"], "0-3\n", "0-3;\n", ["input:9:"]),
            (["--nodes", "4"], "resources: {cpu: 2}", "workers: 3", ["input:4:33: error: ", "its placement makes 4"]),
            (["--nodes", "4"], "resources: {cpu: 2}", "resources: {gpu: 3}", ["input:4:45: error: ", "3 GPU a worker"]),
            (["--nodes", "4"], "    actor:", "    actr:", ["input:8:3: error: component_placement places actr"]),
            ([], "", "", ["describe them, e.g. --nodes 8+8"]),
            (["--nodes", "4+y"], "", "", ["'y' describes no node"]),
        ],
    )
    def test_with_faults_shows_each_in_its_line(
        self, arguments: list[str], old: str, new: str, words: list[str]
    ) -> None:
        result = invoke("-", *arguments, text=PLACED.replace(old, new))
        assert result.exit_code == 2
        for each in words:
            assert each in result.output

    def test_that_may_not_be_meant_is_warned_of(self) -> None:
        text = PLACED.replace('"0-1:0-3"', "{node_group: cpu, placement: 0}")
        result = invoke("-", "--nodes", "4+0", text=text)
        assert result.exit_code == 0
        assert "warning: " in result.output
        assert "no accelerators found on nodes 1" in result.output


class TestAFileWithManyFaults:
    def test_shows_all_of_them_at_once_in_their_order(self, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(
            "name: x\npool: p\npriorty: 3\nnodes: 2x(2gpu\ncomponents:\n"
            "  - {name: a, actor: m:C, role: trainr}\n  - {name: b, actor: m:C, resources: {gpu: two}}\n"
        )
        result = CliRunner().invoke(app, ["plan", str(file), "-o", "json"])
        assert result.exit_code == 2
        found = [fault["field"] for fault in json.loads(result.stderr)["error"]["faults"]]
        assert found == ["priorty", "nodes", "components[0].role", "components[1].resources.gpu"]
