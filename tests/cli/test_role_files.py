"""Does a file of roles give a cluster its nodes, its pools and its presets, and does a plan with it say the same?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from callboard.agents.ray.ray_command import free_port
from callboard.cli.local.plan import ClusterPlan, NodeShape, read_plan, write_plan
from callboard.cli.main import app
from callboard.model.inputs import read_yaml
from callboard.model.inputs.role_file import role_file
from tests.cli.machine import Machine

ROLES = """
roles:
  simulator: {cpu: 2, max_concurrency: 20}
pools:
  gpu_pool: {nominal: {gpu: 2}, node_selector: {node_group: gpu}}
  cpu_pool: {nominal: {cpu: 6}, node_selector: {node_group: cpu}}
nodes: (2gpu,8cpu)+(16cpu)
"""

JOB = """
name: sims
pool: cpu_pool
components:
  - {name: sim, role: simulator, actor: "tests.support.actors:Plain", workers: 3}
  - {name: trainer, role: trainer, actor: "tests.support.actors:Plain", pool: gpu_pool}
"""


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    file = tmp_path / "roles.yaml"
    file.write_text(ROLES)
    return file


def invoke(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=text)


def test_a_cluster_is_started_by_it_and_runs_what_was_planned(machine: Machine, roles: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    port = str(free_port())
    up = machine.run("up", "--runtime", "process", "--roles", str(roles), "--port", port, "--detach")
    assert up.returncode == 0, up.stderr
    assert "Pools: gpu_pool, cpu_pool." in up.stdout
    submitted = invoke("job", "submit", str(job), "--wait", "-o", "json")
    assert submitted.exit_code == 0, submitted.output
    found = json.loads(submitted.stdout)
    placed = {(each["key"]["component"], each["allocation"]["node_id"]) for each in found["workers"]}
    assert placed == {("sim", "node-1"), ("trainer", "node-0")}
    assert found["spec"]["components"][0]["max_concurrency"] == 20
    planned = json.loads(invoke("plan", str(job), "--roles", str(roles), "-o", "json").stdout)
    assert [node["workers"] for node in planned["nodes"]] == [{"trainer": 1}, {"sim": 3}]
    assert machine.run("down", "-q").returncode == 0


def test_the_one_of_the_docs_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
    found = role_file(read_yaml(text.partition("```yaml\n")[2].partition("```")[0]))
    assert "simulator" in found.presets
    assert [pool.name for pool in found.pools] == ["gpu_pool", "cpu_pool"]
    assert [node.gpus for node in found.nodes] == [2, 2, 0]


class TestAPlan:
    def plan(self, roles: Path, *arguments: str, text: str = JOB) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            invoke("plan", "-", "--roles", str(roles), *arguments, "-o", "json", text=text).stdout
        )
        return found

    def test_keeps_to_the_quotas_of_the_pools(self, roles: Path) -> None:
        found = self.plan(roles, text=JOB.replace("workers: 3", "workers: 4"))
        assert found["fits"] is False
        assert [(each["component"], each["workers"]) for each in found["unplaced"]] == [("sim", 1)]
        assert "pool cpu_pool" in found["unplaced"][0]["why"][0]

    def test_says_where_a_pool_has_no_node(self, roles: Path) -> None:
        found = self.plan(roles, "--nodes", "(2gpu,16cpu)")
        assert found["unplaced"] == [{"component": "sim", "workers": 3, "why": ["no node has node_group=cpu"]}]

    @pytest.mark.parametrize(
        ("pool", "said"),
        [("cpu_pool", ""), ("dev", "note: the file of roles has no pool dev; planned without a quota.")],
    )
    def test_names_a_pool_that_the_cluster_would_not_have(self, roles: Path, pool: str, said: str) -> None:
        job = JOB.replace("\npool: cpu_pool", f"\npool: {pool}")
        result = invoke("plan", "-", "--roles", str(roles), text=job)
        assert result.stderr.strip() == said

    def test_takes_the_nodes_that_are_nearest_to_it(self, roles: Path) -> None:
        assert len(self.plan(roles)["nodes"]) == 2
        assert len(self.plan(roles, text=JOB + "nodes: 3x(1gpu,8cpu)+2x(8cpu)\n")["nodes"]) == 5
        assert len(self.plan(roles, "--nodes", "(1gpu,8cpu)", text=JOB + "nodes: 8+8\n")["nodes"]) == 1

    def test_of_a_placed_job_takes_them_too(self, roles: Path) -> None:
        placement = "cluster: {component_placement: {trainer: 1, sim: {node_group: node, placement: '1:0-2'}}}\n"
        found = self.plan(roles, text=JOB + placement)
        assert [node["workers"] for node in found["nodes"]] == [{"trainer": 1}, {"sim": 3}]


class TestNodes:
    def plan(self, directory: Path, **fields: Any) -> ClusterPlan:
        shapes = (
            NodeShape(cpus="8", memory="4GiB", gpus=2, node_group="gpu"),
            NodeShape(cpus="16", memory="8GiB", gpus=0, node_group="cpu"),
            NodeShape(cpus="4", memory="4GiB", gpus=1, node_group="gpu"),
        )
        return ClusterPlan(name="x", directory=directory, agents=3, **{"shapes": shapes, **fields})

    def test_have_what_each_is_given(self, tmp_path: Path) -> None:
        arguments = [" ".join(self.plan(tmp_path).agent_arguments(rank)) for rank in range(4)]
        for text, words in zip(
            arguments,
            [
                "--cpus 8 --memory 4GiB --simulate-gpus 2 --node-group gpu",
                "--cpus 16 --memory 8GiB --simulate-gpus 0 --node-group cpu",
                "--cpus 4 --memory 4GiB --simulate-gpus 1 --node-group gpu",
                "--cpus 4 --memory 4GiB --simulate-gpus 1 --node-group gpu",
            ],
            strict=True,
        ):
            assert words in text

    def test_are_dealt_the_gpus_of_the_machine_in_their_order(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path, machine_gpus=("3", "5", "7", "9"))
        assert [plan.gpus_of(rank) for rank in range(4)] == [("3", "5"), (), ("7",), ("9",)]
        assert plan.environment_of(1) == {"CUDA_VISIBLE_DEVICES": ""}
        assert plan.places == 4

    def test_are_read_as_they_were_written(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path, roles="/etc/roles.yaml")
        write_plan(plan)
        assert read_plan(tmp_path) == plan
        assert "--roles /etc/roles.yaml" in " ".join(plan.controller_arguments())

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--agents", "3"], "leave out --agents"),
            (["--gpus-per-node", "1", "-n", "2"], "leave out --agents and --gpus-per-node"),
            (["--nodes", "(2gpu:h100)"], "leave out :h100"),
            (["--nodes", "(1.5cpu)"], "whole CPUs"),
            (["--nodes", "(0cpu)"], "more than 0 CPUs"),
            (["--nodes", "65x1"], "65 nodes are too many"),
            (["--nodes", "8+z"], "'z' describes no node"),
            (["--machine-gpus", "1"], "GPU 1 is not available"),
        ],
    )
    def test_that_can_not_be_started_are_refused(self, roles: Path, arguments: list[str], words: str) -> None:
        result = invoke("up", "--roles", str(roles), *arguments)
        assert result.exit_code != 0
        assert words in " ".join(result.output.split())

    @pytest.mark.parametrize(("text", "words"), [("roles: {a: {gpu: x}}", "roles.a.gpu"), ("nodes: 8+z", "column 3")])
    def test_of_a_file_with_faults_are_not_started(self, roles: Path, text: str, words: str) -> None:
        roles.write_text(text)
        result = invoke("up", "--roles", str(roles))
        assert result.exit_code == 2
        assert words in result.output
