"""What does `callboard autoplace` print, change and refuse?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.problem.problem import Problem
from callboard.autoplace.solve.search import search
from callboard.cli.autoplace import progress as autoplace_search
from callboard.cli.main import app
from callboard.client.calls import methods
from callboard.v1.common_pb2 import Device
from callboard.v1.job_pb2 import Job, SubmitJobResponse
from callboard.v1.node_pb2 import DeviceUse, ListNodesResponse, Node, NodeState
from tests.cli.cluster import RealCluster, verb
from tests.cli.conftest import Run
from tests.support.fake_api import FakeApi

REASONING = """\
# our 7B run
cluster:
  num_nodes: 1
  component_placement:
    actor: 0-3      # training
    rollout: 4-7
    reward: all
runner:
  task_type: reasoning
algorithm: {group_size: 16, n_minibatches: 4, recompute_logprobs: true}
data:
  rollout_batch_size: 128
rollout:
  max_running_requests: 64
actor:
  model: {tensor_model_parallel_size: 4}
profile_data:
  actor_cost: 95.7    # seconds
  inference_cost: 30.8
  rollout_cost: 59.9
"""
EMBODIED = """\
cluster:
  num_nodes: 1
  num_gpus_per_node: 4
  component_placement:
    actor,env,rollout: all
runner:
  task_type: embodied
data:
  env_num: 16
rollout:
  pipeline_stage_num: 4
profile_data:
  actor_cost: 10.0
  env_profile_data: {4: 25.8, 8: 30.3, 16: 36.5}
  rollout_profile_data: {4: 6.0, 8: 10.7, 16: 19.2}
"""
GENERAL = """\
workflow:
  chunks: 16
  components:
    rollout: {seconds_by_gpus: {4: 60, 8: 31}}
    reward: {seconds_by_gpus: {0: 4.0}}
    actor: {seconds_by_gpus: {4: 50, 8: 26}}
  edges: [[rollout, reward, stream], [reward, actor, barrier]]
cluster: {nodes: [{gpus: 8}]}
"""

Call = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "train.yaml"
    file.write_text(REASONING)
    return file


@pytest.fixture
def embodied(tmp_path: Path) -> Path:
    return written(tmp_path, EMBODIED)


def autoplace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["autoplace", *map(str, arguments)])


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    return file


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "autoplace").rglob("*.yaml"))
GROUPED = """\
cluster:
  num_nodes: 2
  node_groups:
    - {label: a800, node_ranks: 0, env_configs: [{node_ranks: 0, env_vars: [{HF_TOKEN: hunter2}]}]}
    - {label: franka, node_ranks: 1, hardware: {type: Franka, configs: [{node_rank: 1, robot_ip: 10.10.10.1}]}}
    - {label: unused, node_ranks: 1}
  component_placement:
    actor,rollout: {node_group: a800, placement: 0-7}
    reward: {node_group: a800, placement: 0-7}
    robot: {node_group: franka, placement: 0}
"""


class TestItsOutputIsAnInput:
    """FT-H1: what one verb prints and another reads carries all that the other needs."""

    @staticmethod
    def nodes_of(config: Path) -> str:
        """As many nodes of eight GPUs as the answer names."""
        found = json.loads(autoplace(config, "-o", "json", "-q").stdout)
        return "+".join(["8"] * found["cluster"]["num_nodes"])

    @pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
    def test_ft_h1_every_form_of_it_can_be_shown_and_submitted(
        self, example: Path, tmp_path: Path, run: Run, api: FakeApi
    ) -> None:
        nodes = self.nodes_of(example)
        api.on(methods.SUBMIT_JOB, lambda request: SubmitJobResponse(job=Job(uid="j1", spec=request.spec)))
        new = tmp_path / "new.yaml"
        printed = [autoplace(example, "-o", form, "-q").stdout for form in ("yaml", "json")]
        assert autoplace(example, "--write", new, "-q").exit_code == 0
        shown = set()
        for text in (*printed, new.read_text()):
            file = written(tmp_path, text)
            map_of = run("placement", "show", str(file), "--nodes", nodes)
            assert map_of.exit_code == 0, map_of.output
            shown.add(map_of.stdout)
            submitted = run("job", "submit", "--config", str(file), "--pool", "p", "--quiet")
            assert submitted.exit_code == 0, submitted.output
        assert len(shown) <= 2, "the same places; of a config with more components, some more"

    def test_ft_h1_the_section_has_the_groups_that_it_names_and_no_others(self, tmp_path: Path) -> None:
        config = written(tmp_path, GROUPED + REASONING[REASONING.index("runner:") :])
        section = autoplace(config, "-o", "yaml", "-q").stdout
        groups = yaml.safe_load(section)["cluster"]["node_groups"]
        assert [group["label"] for group in groups] == ["a800", "franka"]
        assert "hunter2" not in section
        found = json.loads(autoplace(config, "-o", "json", "-q").stdout)
        assert found["cluster"]["node_groups"] == groups
        shown = CliRunner().invoke(app, ["placement", "show", str(written(tmp_path, section)), "--nodes", "8+0"])
        assert shown.exit_code == 0, shown.output
        assert "franka" in shown.stdout


class TestSeedsThreeSteps:
    """Profile data in a config, the command, the section pasted or applied, and the placement is accepted."""

    def test_the_output_begins_with_the_seeds_own_lines(self, config: Path) -> None:
        shown = autoplace(config, "--nodes", "8")
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.startswith(
            "Best placement for this task is:\n"
            "\n"
            "cluster:\n"
            "  num_nodes: 1\n"
            "  component_placement:\n"
            "    rollout,actor: all\n"
        )

    def test_the_printed_section_pasted_is_accepted(self, config: Path, tmp_path: Path) -> None:
        section = yaml.safe_load(autoplace(config, "--nodes", "8", "-o", "yaml").stdout)
        pasted = yaml.safe_load(config.read_text()) | section
        file = written(tmp_path, yaml.safe_dump(pasted, sort_keys=False))
        shown = CliRunner().invoke(app, ["placement", "show", str(file), "--nodes", "8"])
        assert shown.exit_code == 0, shown.output

    def test_applied_is_accepted_too_and_comments_stay(self, config: Path) -> None:
        applied = autoplace(config, "--nodes", "8", "--apply")
        assert applied.exit_code == 0, applied.output
        assert config.read_text() == REASONING.replace(
            "    actor: 0-3      # training\n    rollout: 4-7\n", "    # training\n    rollout,actor: all\n"
        )
        assert config.with_name("train.yaml.bak").read_text() == REASONING
        shown = CliRunner().invoke(app, ["placement", "show", str(config), "--nodes", "8"])
        assert shown.exit_code == 0, shown.output
        again = autoplace(config, "--nodes", "8", "-o", "yaml")
        assert yaml.safe_load(again.stdout)["cluster"] == yaml.safe_load(config.read_text())["cluster"]

    def test_applying_twice_keeps_what_was_there_before_the_first(self, config: Path) -> None:
        assert autoplace(config, "--nodes", "8", "--apply").exit_code == 0
        again = autoplace(config, "--nodes", "8", "--apply")
        assert again.exit_code == 0
        assert "has this placement already" in again.stderr
        assert config.with_name("train.yaml.bak").read_text() == REASONING

    def test_an_embodied_job_too(self, tmp_path: Path) -> None:
        file = written(tmp_path, EMBODIED)
        applied = autoplace(file, "--apply")
        assert applied.exit_code == 0, applied.output
        shown = CliRunner().invoke(app, ["placement", "show", str(file), "--nodes", "4"])
        assert shown.exit_code == 0, shown.output


class TestText:
    def test_it_says_how_good_the_plan_is_and_what_else_there_was(self, config: Path) -> None:
        shown = autoplace(config, "--nodes", "8").stdout
        assert "proved: no plan is faster" in shown
        rows = {line.split("  ")[0]: line for line in shown.splitlines()}
        assert "186.4" in rows["collocated (chosen)"]
        assert "impossible" in rows["disaggregated"]  # three times four GPUs
        assert "any layout" in rows

    def test_it_says_which_costs_are_estimates(self, tmp_path: Path) -> None:
        file = written(tmp_path, REASONING.replace("rollout_cost: 59.9", "rollout_cost: {4: 60.0, 8: 59.9}"))
        shown = autoplace(file, "--nodes", "8")
        assert shown.exit_code == 0, shown.output
        assert "measured" in shown.stdout

    def test_the_chart_names_every_component(self, config: Path) -> None:
        chart = [line for line in autoplace(config, "--nodes", "8").stdout.splitlines() if "│" in line]
        assert [name for name in ("rollout", "inference", "actor") if any(name in line for line in chart)] == [
            "rollout",
            "inference",
            "actor",
        ]

    def test_json_has_everything(self, config: Path) -> None:
        found = json.loads(autoplace(config, "--nodes", "8", "-o", "json").stdout)
        assert found["cluster"]["component_placement"] == {"rollout,actor": "all", "reward": "all"}
        assert found["iteration_seconds"] == pytest.approx(186.4)
        assert found["lower_bound_seconds"] <= found["iteration_seconds"] * (1 + 1e-9)
        assert found["status"] == "OPTIMAL"
        assert {span["component"] for span in found["spans"]} == {"rollout", "inference", "actor"}
        assert found["unrestricted"]["iteration_seconds"] <= found["iteration_seconds"] * (1 + 1e-9)

    def test_yaml_is_the_section_alone(self, config: Path) -> None:
        shown = autoplace(config, "--nodes", "8", "-o", "yaml", "--quiet")
        assert list(yaml.safe_load(shown.stdout)) == ["cluster"]
        assert shown.stderr == ""

    def test_what_was_assumed_is_said(self, tmp_path: Path) -> None:
        file = written(tmp_path, REASONING.replace("    actor: 0-3      # training\n    rollout: 4-7\n", ""))
        assert "8 GPUs per node are assumed" in autoplace(file).stderr

    def test_the_same_input_gives_the_same_bytes(self, config: Path) -> None:
        first, second = (autoplace(config, "--nodes", "8").stdout for _ in range(2))
        assert first == second

    def test_ap_08_the_answer_is_the_same_bytes_under_any_hash_seed(self, tmp_path: Path) -> None:
        """Four components, three of them roots."""
        text = """\
workflow:
  chunks: 8
  components:
    reward: {seconds_by_gpus: {1: 20, 2: 11, 4: 6}}
    env: {seconds_by_gpus: {1: 20, 2: 11, 4: 6}}
    rollout: {seconds_by_gpus: {1: 40, 2: 21, 4: 12}}
    actor: {seconds_by_gpus: {1: 80, 2: 42, 4: 23}}
  edges: [[reward, actor, barrier], [env, actor, stream], [rollout, actor, stream]]
cluster: {nodes: [{gpus: 4}]}
"""
        line = [sys.executable, "-m", "callboard.cli", "autoplace", str(written(tmp_path, text)), "-o", "json"]
        seen = {
            subprocess.run(line, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
            for seed in ("0", "1", "2")
        }
        assert len(seen) == 1

    def test_mixed_proposes_what_rlinf_refuses(self, config: Path) -> None:
        free = json.loads(autoplace(config, "--nodes", "8", "-o", "json", "--mixed").stdout)
        bound = json.loads(autoplace(config, "--nodes", "8", "-o", "json").stdout)
        assert free["iteration_seconds"] == pytest.approx(bound["unrestricted"]["iteration_seconds"])


class TestGeneralForm:
    def test_ap_14_any_names_any_graph_and_cpu_only_components(self, tmp_path: Path) -> None:
        shown = autoplace(written(tmp_path, GENERAL), "-o", "json")
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        assert found["status"] == "OPTIMAL"
        reward = next(span for span in found["spans"] if span["component"] == "reward")
        assert reward["gpu_ranks"] == []

    def test_another_cluster_may_be_stated(self, tmp_path: Path) -> None:
        found = json.loads(autoplace(written(tmp_path, GENERAL), "-o", "json", "--nodes", "4").stdout)
        assert {rank for span in found["spans"] for rank in span["gpu_ranks"]} <= set(range(4))

    def test_where_batches_overlap_it_says_what_staleness_buys(self, tmp_path: Path) -> None:
        file = written(tmp_path, GENERAL + "objective: {async: {staleness: 1}}\n")
        lines = autoplace(file).stdout.splitlines()
        table = lines[lines.index(next(line for line in lines if line.startswith("staleness"))) + 1 :]
        assert [line.split()[0] for line in table] == ["0", "0.5", "1", "2"]
        found = json.loads(autoplace(file, "-o", "json").stdout)["by_staleness"]
        periods = [found[eta]["iteration_seconds"] for eta in ("0", "0.5", "1", "2")]
        assert periods == sorted(periods, reverse=True)

    def test_interpolations_are_resolved(self, tmp_path: Path) -> None:
        text = GENERAL.replace("{4: 50, 8: 26}", "'${workflow.components.rollout.seconds_by_gpus}'")
        found = json.loads(autoplace(written(tmp_path, text), "-o", "json").stdout)
        assert found["alternatives"]["collocated"] == pytest.approx(31 + 4 / 16 + 31)

    def test_ap_11_programs_learn_which_costs_are_assumed(self, tmp_path: Path) -> None:
        found = json.loads(autoplace(written(tmp_path, GENERAL), "-o", "json").stdout)
        assert found["estimated_counts"] == {"rollout": [5, 6, 7], "reward": [], "actor": [5, 6, 7]}

    def test_apply_is_refused_and_write_writes_the_section(self, tmp_path: Path) -> None:
        file, out = written(tmp_path, GENERAL), tmp_path / "placement.yaml"
        assert autoplace(file, "--apply").exit_code == 2
        assert autoplace(file, "--write", out).exit_code == 0
        assert list(yaml.safe_load(out.read_text())) == ["cluster"]
        assert file.read_text() == GENERAL
        shown = CliRunner().invoke(app, ["placement", "show", str(out), "--nodes", "8"])
        assert shown.exit_code == 0, shown.output

    def test_faults_have_lines(self, tmp_path: Path) -> None:
        shown = autoplace(written(tmp_path, GENERAL.replace("8: 31", "8: -31")))
        assert shown.exit_code == 2
        assert "4:" in shown.stderr


class TestFiles:
    def test_write_makes_a_new_file_with_everything_else_as_it_was(self, config: Path, tmp_path: Path) -> None:
        out = tmp_path / "new.yaml"
        assert autoplace(config, "--nodes", "8", "--write", out).exit_code == 0
        assert config.read_text() == REASONING
        assert "# our 7B run" in out.read_text()
        assert yaml.safe_load(out.read_text())["cluster"]["component_placement"]["rollout,actor"] == "all"

    def test_write_never_overwrites(self, config: Path, tmp_path: Path) -> None:
        out = tmp_path / "new.yaml"
        out.write_text("mine")
        assert autoplace(config, "--nodes", "8", "--write", out).exit_code == 2
        assert out.read_text() == "mine"

    def test_apply_and_write_are_one_or_the_other(self, config: Path, tmp_path: Path) -> None:
        assert autoplace(config, "--apply", "--write", tmp_path / "x.yaml").exit_code == 2
        assert config.read_text() == REASONING

    def test_plot_draws_svg(self, config: Path, tmp_path: Path) -> None:
        out = tmp_path / "plan.svg"
        assert autoplace(config, "--nodes", "8", "--plot", out).exit_code == 0
        texts = [text.text for text in ET.parse(out).getroot().iter("{http://www.w3.org/2000/svg}text")]
        assert "1 rollout" in texts

    @pytest.mark.parametrize("name", ["plan.gif", "plan.png", "plan"])
    def test_another_kind_of_picture_is_refused_before_the_search(
        self, config: Path, tmp_path: Path, name: str
    ) -> None:
        shown = autoplace(config, "--plot", tmp_path / name)
        assert shown.exit_code == 2
        assert f"{tmp_path / 'plan.svg'} instead" in " ".join(shown.stderr.split())

    def test_a_placement_from_another_file_is_not_applied(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text(REASONING)
        (tmp_path / "train.yaml").write_text("defaults: [base, _self_]\ndata: {rollout_batch_size: 64}\n")
        shown = autoplace("train", "--config-path", tmp_path, "--apply")
        assert shown.exit_code == 2
        assert "another file of its defaults" in shown.stderr
        assert autoplace("train", "--config-path", tmp_path).exit_code == 0

    def test_a_placement_that_another_file_would_change_is_taken_back(self, tmp_path: Path) -> None:
        """Hydra merges mappings: the entries of the other file would come back beside the new ones."""
        (tmp_path / "base.yaml").write_text(REASONING)
        text = "defaults: [base, _self_]\ncluster: {component_placement: {reward: 0-3}}\n"
        (tmp_path / "train.yaml").write_text(text)
        shown = autoplace("train", "--config-path", tmp_path, "--apply")
        assert shown.exit_code == 2
        assert "no effect" in shown.stderr
        assert (tmp_path / "train.yaml").read_text() == text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base.yaml", "train.yaml"]

    def test_a_composed_config_with_its_own_placement_gets_it(self, tmp_path: Path) -> None:
        (tmp_path / "algo.yaml").write_text("group_size: 16\nn_minibatches: 4\n")
        body = REASONING.replace("algorithm: {group_size: 16, n_minibatches: 4, recompute_logprobs: true}\n", "")
        (tmp_path / "train.yaml").write_text("defaults: [algo@algorithm, _self_]\n" + body)
        shown = autoplace("train", "--config-path", tmp_path, "--nodes", "8", "--apply")
        assert shown.exit_code == 0, shown.output
        assert "    # training\n    rollout,actor: all\n" in (tmp_path / "train.yaml").read_text()


class TestRefusals:
    def test_missing_profile_data_is_named_with_exit_code_2(self, tmp_path: Path) -> None:
        shown = autoplace(written(tmp_path, REASONING.replace("  inference_cost: 30.8\n", "")))
        assert shown.exit_code == 2
        assert "Profile data not provided" in shown.stderr
        assert "profile_data.inference_cost" in shown.stderr

    def test_no_profile_data_at_all_names_every_cost(self, tmp_path: Path) -> None:
        shown = autoplace(written(tmp_path, REASONING[: REASONING.index("profile_data")]))
        assert shown.exit_code == 2
        for key in ("actor_cost", "inference_cost", "rollout_cost"):
            assert f"profile_data.{key}" in shown.stderr

    def test_a_current_placement_beyond_the_cluster_is_refused(self, config: Path) -> None:
        shown = autoplace(config, "--nodes", "4")
        assert shown.exit_code == 2
        assert f"{config}:6:5: error: rank 7 doesn't exist" in shown.stderr
        assert "4 GPUs" in shown.stderr

    def test_ap_13_no_plan_ends_with_3_and_names_the_component_and_the_sizes(self, tmp_path: Path) -> None:
        text = REASONING.replace("    actor: 0-3      # training\n    rollout: 4-7\n", "")
        shown = autoplace(written(tmp_path, text), "--nodes", "3")
        assert shown.exit_code == 3
        assert "actor:" in shown.stderr
        assert "1, 2, 3 GPUs" in shown.stderr

    def test_ap_13_costs_that_are_missing_at_every_size_too(self, tmp_path: Path) -> None:
        text = GENERAL.replace("actor: {seconds_by_gpus: {4: 50, 8: 26}}", "actor: {seconds_by_gpus: {16: 14}}")
        shown = autoplace(written(tmp_path, text))
        assert shown.exit_code == 3
        assert "actor" in shown.stderr
        assert "16" in shown.stderr

    @pytest.mark.parametrize("nodes", ["eight", "8+", "0x8", ""])
    def test_a_cluster_that_is_none_is_refused(self, config: Path, nodes: str) -> None:
        shown = autoplace(config, "--nodes", nodes or " ")
        assert shown.exit_code == 2

    def test_two_clusters_are_one_too_many(self, config: Path) -> None:
        assert autoplace(config, "--nodes", "8", "--controller", "localhost:1").exit_code == 2

    def test_no_such_file(self, tmp_path: Path) -> None:
        assert autoplace(tmp_path / "nowhere.yaml").exit_code == 2


class TestEnding:
    def test_ctrl_c_ends_the_search_with_what_there_is(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []

        def patient(problem: Problem, *, stop: Callable[[], bool], **options: Any) -> Plan:
            asked.append(stop())
            os.kill(os.getpid(), signal.SIGINT)
            asked.append(stop())
            return search(problem)

        monkeypatch.setattr(autoplace_search, "search", patient)
        handler = signal.getsignal(signal.SIGINT)
        shown = autoplace(written(config.parent, GENERAL))
        assert shown.exit_code == 0, shown.output
        assert asked == [False, True]
        assert "Best placement" in shown.stdout
        assert "The search was ended" in shown.stderr
        assert signal.getsignal(signal.SIGINT) is handler

    def test_a_second_ctrl_c_is_pythons_own(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with autoplace_search.Searching(1.0, quiet=True) as searching:
            os.kill(os.getpid(), signal.SIGINT)
            assert searching.interrupted
            assert signal.getsignal(signal.SIGINT) is before

    def test_progress_says_the_best_so_far_and_what_can_still_be_gained(self) -> None:
        shown = autoplace_search.progress_text(200.0, 180.0)
        assert "200 s so far" in shown
        assert "no plan is below 180 s (10.0%)" in shown


class TestLiveCluster:
    @staticmethod
    def node(rank: int, gpus: int, state: Any = NodeState.NODE_STATE_READY, used: int = 0) -> Node:
        devices = [
            DeviceUse(device=Device(index=index, id=str(index)), used_milli=1000 if index < used else 0)
            for index in range(gpus)
        ]
        return Node(name=f"nodes/node-{rank}", rank=rank, state=state, devices=devices, revision=40 + rank)

    def test_ap_16_only_nodes_that_take_work_now_are_planned_for(
        self, run: Run, api: FakeApi, config: Path, tmp_path: Path
    ) -> None:
        lost = NodeState.NODE_STATE_LOST
        api.on(
            methods.LIST_NODES,
            ListNodesResponse(nodes=[self.node(0, 8, used=3), self.node(1, 8, lost)]),
        )
        shown = run("autoplace", str(config), "--controller", api.address, "-o", "json")
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        assert found["cluster"]["num_nodes"] == 1
        assert found["inventory_revision"] == 40
        text = run("autoplace", str(config), "--controller", api.address)
        assert "node-1 (lost)" in text.stderr
        assert "3 of the GPUs are in use" in text.stderr

    def test_a_node_that_is_only_cordoned_still_counts_where_ranks_are_read(
        self, run: Run, api: FakeApi, config: Path
    ) -> None:
        cordoned = self.node(0, 8, NodeState.NODE_STATE_CORDONED)
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[cordoned, self.node(1, 8)]))
        shown = run("autoplace", str(config), "--controller", api.address)
        assert shown.exit_code == 0, shown.output
        assert "counted without node-0" in shown.stderr

    def test_a_controller_without_gpus_has_no_plan(self, run: Run, api: FakeApi, config: Path) -> None:
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=[self.node(0, 0)]))
        assert run("autoplace", str(config), "--controller", api.address).exit_code == 3


class TestStarts:
    """A job starts with the placement, on real agents and worker processes."""

    @pytest.mark.slow
    async def test_planned_for_the_live_nodes_applied_shown_and_started(
        self, bare: RealCluster, embodied: Path
    ) -> None:
        await bare.add_node("n0", gpus=4)
        await bare.client.ensure_pool("rlhf", nominal={"cpu": 8, "gpu": 4})
        applied = await verb(bare, "autoplace", str(embodied), "--apply", "-o", "json")
        assert applied.exit_code == 0, applied.output
        placement = json.loads(applied.stdout)["cluster"]["component_placement"]
        shown = await verb(bare, "placement", "show", str(embodied))
        assert shown.exit_code == 0, shown.output
        started = await verb(
            bare, "job", "submit", "--config", str(embodied), "--name", "planned", "--pool", "rlhf", "-w"
        )
        assert started.exit_code == 0, started.output
        workers = (await bare.client.get_job("planned")).job.workers
        by_component: dict[str, set[str]] = {}
        for worker in workers:
            by_component.setdefault(worker.key.component, set()).update(d.id for d in worker.allocation.devices)
        for key, ranks in placement.items():
            first, _, last = ("0-3" if ranks == "all" else ranks).partition("-")
            for name in key.split(","):
                assert by_component[name] == {str(rank) for rank in range(int(first), int(last or first) + 1)}
