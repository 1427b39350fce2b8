"""What does `callboard placement show` show, and what does it say of a bad file?"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from typer.testing import CliRunner, Result

from callboard.cli.main import app
from callboard.cli.show.file_faults import fault_lines, secret_spans
from callboard.client.calls import methods
from callboard.model.faults import Fault
from callboard.v1.common_pb2 import Device, Hardware, Resources
from callboard.v1.job_pb2 import GetJobResponse, Job, JobState, SubmitJobRequest, SubmitJobResponse
from callboard.v1.node_pb2 import DeviceUse, ListNodesResponse, Node, NodeState
from tests.cli.conftest import Run
from tests.cli.machine import ROOT
from tests.support.fake_api import FakeApi

CONFIG = """\
runner: {task_type: embodied}
cluster:
  num_nodes: 3
  component_placement:
    actor: {node_group: gpus, placement: 0-7}
    rollout: {node_group: gpus, placement: 0-3}
    env: {node_group: "gpus,franka", placement: "4-7:0-7,8"}
    agent: {node_group: node, placement: "0-1:0-3,2:4"}
  node_groups:
    - label: gpus
      node_ranks: 0-1
      env_configs:
        - {node_ranks: 0, env_vars: [{GLOO_SOCKET_IFNAME: eth0}, {HF_TOKEN: hf_secret}]}
    - {label: franka, node_ranks: 2, hardware: {type: Franka, configs: [{node_rank: 2, robot_ip: 10.10.10.1}]}}
"""
NODES = ("--nodes", "4+4+0")


def show(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["placement", "show", str(file), *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "train.yaml"
    written.write_text(CONFIG)
    return written


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [re.sub(r"[│╭╮╰╯├┤─┬┴┼ ]+", " ", line).strip() for line in result.stdout.splitlines()]


def test_a_drawing_keeps_the_ranks_of_long_names(tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("cluster: {component_placement: {a_component_with_quite_a_long_name: 0-3, b: 0}}")
    assert show(file, "--nodes", "4", "--svg", str(tmp_path / "p.svg")).exit_code == 0
    texts = [item.text or "" for item in ET.parse(tmp_path / "p.svg").getroot().iter() if item.tag.endswith("}text")]
    assert [text.partition("…")[2] for text in texts if text.startswith("a_comp") and "…" in text] == [
        " 0", " 1", " 2", " 3"
    ]  # fmt: skip


class TestSecrets:
    """SE-04: a fault is shown with its line, and what is secret in that line is not."""

    BAD = """\
name: j
cluster:
  component_placement: {env: {node_grp: g, placement: 9}}
  node_groups:
    - {label: g, node_ranks: 0, env_configs: [{node_ranks: 5, env_vars: [{RANK: hunter1}, {A: "hunter2"}, hunter3]}]}
    - label: h
      node_ranks: 0
      env_configs:
        - env_vars:
            - RANK: hunter4
            - {B: [hunter5], b: c}
components:
  - {name: env, env: {X: hunter6}, component_placement: 99, secret_env: {Y: hunter7}}
"""

    def test_values_of_variables_are_starred_and_nothing_else(self, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(self.BAD)
        result = show(file, "--nodes", "4")
        assert result.exit_code == 2
        assert "hunter" not in result.output
        assert "{env: {node_grp: g, placement: 9}}" in result.output
        assert "{name: env, env: {X: *******}, component_placement: 99, secret_env: {Y: *******}}" in result.output
        assert "[{RANK: *******}, {A: *********}, *******]" in result.output
        assert "- RANK: *******" in result.output

    def test_what_is_no_yaml_has_no_secrets_and_no_trouble(self) -> None:
        assert secret_spans("a: [") == {}
        assert secret_spans("[" * 100_000) == {}
        assert secret_spans("c: &c {env_vars: [{A: x}, *c]}") == {1: [(22, 23)]}


class TestPicture:
    """The map and the table."""

    def test_it_says_who_is_on_which_gpu(self, file: Path) -> None:
        shown = lines(show(file, *NODES))
        assert "Nodes 3 of 3 used" in shown
        assert "GPUs 8 of 8 used" in shown
        assert "actor 8 on 0-7 of gpus" in shown
        assert "0 node-0 actor 0 50% actor 1 50% actor 2 50% actor 3 50% agent 0-1" in shown
        assert "rollout 0 50% rollout 1 50% rollout 2 50% rollout 3 50%" in shown
        assert "env 0-1 2×33.3% env 2-3 2×33.3% env 4-5 2×33.3% env 6-7 2×33.3%" in shown
        assert "2 node-2 env 8 on Franka 0" in shown

    def test_it_says_what_each_rank_gets(self, file: Path) -> None:
        shown = lines(show(file, *NODES))
        assert "actor 0 0 node-0 0 of 4 0 0 500m gpus sets GLOO_SOCKET_IFNAME, HF_TOKEN" in shown
        assert "env 7 1 node-1 7 of 8 3 3 333m gpus" in shown
        assert "env 8 2 node-2 0 of 1 – – – franka Franka 0" in shown

    def test_gpus_that_nobody_uses_are_free(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("cluster: {component_placement: {actor: 1}}")
        assert "0 node-0 free actor 0" in lines(show(tmp_path / "a.yaml", "--nodes", "2"))

    def test_a_narrow_terminal_folds_gpus_into_rows(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        result = show(file, *NODES)
        assert max(len(line) for line in result.stdout.split("COMPONENT  RANK")[0].splitlines()) <= 80
        assert "GPU 3" in result.stdout

    def test_a_long_name_is_cut_in_the_map_alone(self, tmp_path: Path) -> None:
        name = "a_component_with_a_long_name"
        (tmp_path / "a.yaml").write_text(f"cluster: {{component_placement: {{{name}: all}}}}")
        shown = lines(show(tmp_path / "a.yaml", "--nodes", "2"))
        assert "0 node-0 a_component_with_a_… 0 a_component_with_a_… 1" in shown
        assert f"{name} 0 0 node-0 0 of 2 0 0 1000m cluster" in shown

    def test_large_clusters_are_cut_unless_everything_is_wanted(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("cluster: {component_placement: {actor: all}}")
        shown = lines(show(tmp_path / "a.yaml", "--nodes", "50x2"))
        assert "… and 10 more nodes; -o wide shows all of them" in shown
        assert "actor … 68 more ranks; -o wide shows all of them" in shown
        wide = lines(show(tmp_path / "a.yaml", "--nodes", "50x2", "-o", "wide"))
        assert "49 node-49 actor 98 actor 99" in wide
        assert "actor 99 49 node-49 1 of 2 1 1 1000m cluster" in wide

    def test_model_parallelism_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(
            "runner: {task_type: reasoning}\nrollout: {tensor_parallel_size: 2}\n"
            "actor: {model: {tensor_model_parallel_size: 4}}\n"
            'cluster: {component_placement: {"actor,rollout": all}}\n'
        )
        shown = lines(show(tmp_path / "a.yaml", "--nodes", "8"))
        assert "Mode COLLOCATED, weights by IPC" in shown
        assert "rollout 4 packed on 0-7, 2 each, stride 2" in shown

    def test_warnings_are_shown_where_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("cluster: {component_placement: {actor: all}}")
        result = show(tmp_path / "a.yaml", "--nodes", "0+0")
        assert result.exit_code == 0
        assert f"{tmp_path}/a.yaml:1:40: warning: component actor: no accelerators found on nodes 0-1" in result.stderr


class TestData:
    """JSON, YAML and SVG."""

    def test_json_holds_everything(self, file: Path) -> None:
        value = json.loads(show(file, *NODES, "-o", "json").stdout)
        assert value["mode"] == "HYBRID"
        actor = value["components"][0]
        assert (actor["name"], actor["world_size"], actor["placement"]) == ("actor", 8, "0-7")
        assert actor["workers"][4]["node_id"] == "node-1"
        assert actor["workers"][4]["visible_accelerators"] == ["0"]
        assert value["nodes"][0]["gpus"][0]["holders"] == [
            {"component": "actor", "ranks": [0], "milli": 500},
            {"component": "rollout", "ranks": [0], "milli": 500},
        ]
        assert value["demand"][0]["gpu_milli"] == 4000

    def test_yaml_says_the_same(self, file: Path) -> None:
        assert yaml.safe_load(show(file, *NODES, "-o", "yaml").stdout) == json.loads(
            show(file, *NODES, "-o", "json").stdout
        )

    @pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
    def test_se_04_no_secret_is_shown(self, file: Path, output: str, tmp_path: Path) -> None:
        result = show(file, *NODES, "-o", output, "--svg", str(tmp_path / "a.svg"))
        assert result.exit_code == 0
        assert "hf_secret" not in result.output + (tmp_path / "a.svg").read_text()

    def test_svg_draws_every_gpu(self, file: Path, tmp_path: Path) -> None:
        assert show(file, *NODES, "--svg", str(tmp_path / "a.svg")).exit_code == 0
        root = ET.parse(tmp_path / "a.svg").getroot()
        drawn = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert drawn.count("GPU 3") == 2
        assert {"actor 0", "env 6-7", "66.6%", "env 8 on Franka 0", "actor × 8"} <= set(drawn)

    def test_svg_takes_no_name_for_markup(self, tmp_path: Path) -> None:
        hostile = tmp_path / "<script>&.yaml"
        hostile.write_text("cluster: {component_placement: {actor: 0}}")
        assert show(hostile, "--nodes", "1", "--svg", str(tmp_path / "a.svg")).exit_code == 0
        assert "<script>" not in (tmp_path / "a.svg").read_text()

    def test_a_drawing_that_can_t_be_written_is_said(self, file: Path, tmp_path: Path) -> None:
        result = show(file, *NODES, "--svg", str(tmp_path / "no" / "a.svg"))
        assert result.exit_code == 2
        assert "can't be written" in result.stderr


class TestFaults:
    """A bad file is told as compilers do."""

    BAD = "cluster:\n  num_nodes: 2\n  component_placement:\n    actor: 0-1,1-2\n    env: 0-4:0-1\n    critic: 9\n"

    def test_every_fault_with_its_line_and_a_caret(self, tmp_path: Path) -> None:
        file = tmp_path / "bad.yaml"
        file.write_text(self.BAD)
        result = show(file, "--nodes", "4+1")
        assert result.exit_code == 2
        assert result.stdout == ""
        said = result.stderr.splitlines()
        assert f"{file}:4:16: error: component actor: segment '1-2' (column 5)" in said[0]
        assert said[1:3] == ["    4 |     actor: 0-1,1-2", "      |                ^"]
        assert f"{file}:5:14: error: component env: segment '0-4:0-1'" in said[3]
        assert f"{file}:6:13: error: component critic: segment '9' (column 1): GPU rank 9 does not exist" in said[6]
        assert said[-1] == f"error: {file} has 3 faults; nothing was done."

    def test_a_text_that_is_no_yaml(self, tmp_path: Path) -> None:
        file = tmp_path / "bad.yaml"
        file.write_text("cluster: {")
        result = show(file, "--nodes", "1")
        assert result.exit_code == 2
        assert "no YAML" in result.stderr

    def test_nodes_that_are_none_are_told_with_their_column(self, file: Path) -> None:
        result = show(file, "--nodes", "8+9z")
        assert result.exit_code == 2
        assert "--nodes:1:3: error: '9z' describes no node" in result.stderr
        assert "    1 | 8+9z" in result.stderr

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        result = show(tmp_path / "none.yaml", "--nodes", "1")
        assert result.exit_code == 2
        assert "can't be read" in result.stderr

    def test_where_no_controller_answers_nodes_can_be_described(self, file: Path) -> None:
        result = show(file, "--controller", "127.0.0.1:1")
        assert result.exit_code == 4
        assert "--nodes 8+8" in result.stderr

    def test_two_sources_of_nodes_are_one_too_many(self, file: Path) -> None:
        result = show(file, "--nodes", "1", "--controller", "127.0.0.1:1")
        assert result.exit_code == 2
        assert "not clear which nodes" in result.stderr

    def test_nothing_of_the_file_steers_the_terminal(self) -> None:
        hostile = "a: \x1b[31m\x07" + "x" * 500
        shown = [line.plain for line in fault_lines("f", hostile, [Fault("", "bad\x1b[2J\nnext", 1, 300)])]
        assert all(char.isprintable() for line in shown for char in line)
        assert shown[2].index("^") - shown[1].index("|") < 120

    @pytest.mark.parametrize(
        ("fault", "said"),
        [
            (Fault("workflow.cluster", "is required", 1, 1), "f:1:1: error: cluster is required"),
            (Fault("nodes[2].gpus", "is required", 1, 1), "f:1:1: error: gpus is required"),
            (Fault('labels["a.b"]', "needs a value", 1, 1), 'f:1:1: error: labels["a.b"] needs a value'),
            (Fault("nodes[2].gpus", "-1 is out of bounds", 1, 1), "f:1:1: error: -1 is out of bounds"),
            (Fault("nodes[2].gpus", "is required"), "f: error: nodes[2].gpus: is required"),
        ],
    )
    def test_what_is_missing_is_named(self, fault: Fault, said: str) -> None:
        """Its place is that of the mapping it is missing in, which does not name it."""
        assert next(fault_lines("f", "a: 1", [fault])).plain == said


class TestSources:
    """Where the nodes come from."""

    def test_the_input_may_be_the_file(self) -> None:
        result = CliRunner().invoke(app, ["placement", "show", "-", *NODES], input=CONFIG)
        assert result.exit_code == 0

    def test_the_file_may_describe_them(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("cluster: {nodes: 1+2, component_placement: {actor: all}}")
        assert "1 node-1 actor 1 actor 2" in lines(show(tmp_path / "a.yaml"))

    def test_else_the_controller_s(self, run: Run, api: FakeApi, tmp_path: Path) -> None:
        api.on(methods.LIST_NODES, ListNodesResponse(nodes=live()))
        (tmp_path / "a.yaml").write_text(
            "cluster: {component_placement: {actor: all, arm: {node_group: lab, placement: 0}}}"
        )
        shown = lines(run("placement", "show", str(tmp_path / "a.yaml")))
        assert "actor 0 1 gpu-node 0 of 2 0 GPU-a 1000m cluster" in shown
        assert "actor 1 1 gpu-node 1 of 2 1 GPU-b 1000m cluster" in shown
        assert "arm 0 2 robot-node 0 of 1 – – – lab Franka 0" in shown

    def test_a_job_file_is_understood(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(
            "name: train\npool: rlhf\ncomponents:\n"
            "  - {name: actor, actor: 'pkg.module:Actor', resources: {gpu: 1}, component_placement: 0-1}\n"
            "  - {name: env, actor: 'pkg.module:Env', component_placement: {node_group: node, placement: 0:0-2}}\n"
        )
        shown = lines(show(tmp_path / "job.yaml", "--nodes", "2"))
        assert "0 node-0 actor 0 actor 1 env 0-2" in shown

    @pytest.mark.parametrize(
        ("written", "said"),
        [
            ("component_placment: 0-1", "did you mean component_placement?"),
            ("resorces: {gpu: 1}, component_placement: 0-1", "did you mean resources?"),
            ("component_placement: 0-1, component_placement: 0", "component_placement"),
            ("component_placement: 0-1, workers: many", "'many' is not a whole number"),
        ],
    )
    def test_ft_i6_all_of_a_job_file_is_read_as_plan_and_submit_read_it(
        self, tmp_path: Path, run: Run, api: FakeApi, written: str, said: str
    ) -> None:
        job = tmp_path / "job.yaml"
        head = "name: train\npool: rlhf\ncomponents:\n"
        other = "  - {name: env, actor: 'pkg.module:Env', component_placement: 0}\n"
        job.write_text(f"{head}{other}  - {{name: actor, actor: 'pkg.module:Actor', {written}}}\n")
        verbs = (
            ("placement", "show", str(job), "--nodes", "2"),
            ("plan", str(job), "--nodes", "2"),
            ("job", "submit", str(job)),
            ("job", "submit", str(job), "--validate"),
        )
        for verb in verbs:
            refused = run(*verb)
            assert (refused.exit_code, said in refused.stderr) == (2, True), (verb, refused.stderr)
        job.write_text("name: train\npool: rlhf\ncomponnts:\n" + other + "cluster: {component_placement: {env: 0}}\n")
        for verb in verbs:
            refused = run(*verb)
            assert (refused.exit_code, "did you mean components?" in refused.stderr) == (2, True), (
                verb,
                refused.stderr,
            )


def live() -> list[Node]:
    """A head with nothing, a node with two GPUs, a node with a robot, and one that is gone."""

    def node(name: str, rank: int, *ids: str, group: str = "", cpus: int = 8000, gone: bool = False) -> Node:
        state = NodeState.NODE_STATE_LOST if gone else NodeState.NODE_STATE_READY
        devices = [DeviceUse(device=Device(index=i, id=found, model="NVIDIA H100")) for i, found in enumerate(ids)]
        capacity = Resources(cpu_milli=cpus, gpu_milli=1000 * len(ids))
        return Node(name=f"nodes/{name}", rank=rank, state=state, node_group=group, capacity=capacity, devices=devices)

    robot = node("robot-node", 2, group="lab")
    robot.hardware.append(Hardware(type="Franka", config_json='{"robot_ip":"10.0.0.1"}'))
    return [node("head", 0, cpus=0), node("gpu-node", 1, "GPU-a", "GPU-b"), robot, node("gone", 3, "0", gone=True)]


class TestConfigsOfHydra:
    """`placement show` and `job submit --config` take what `autoplace` and RLinf's launcher take."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "small.yaml").write_text(
            "# @package _global_\nsizes: {envs: 4-5}\n"
            "cluster: {num_nodes: 1, component_placement: {actor: 0-3, env: '${sizes.envs}'}}\n"
        )
        (tmp_path / "train.yaml").write_text("defaults: [{base: small}, _self_]\nrun_at: ${oc.env:CALLBOARD_NOT_SET}\n")
        return tmp_path

    @staticmethod
    def workers(*arguments: str) -> dict[str, int]:
        shown = CliRunner().invoke(app, ["placement", "show", *arguments, "--nodes", "8", "-o", "json"])
        assert shown.exit_code == 0, shown.output
        return {each["name"]: len(each["workers"]) for each in json.loads(shown.stdout)["components"]}

    def test_a_config_is_named_in_a_folder_and_composed(self, folder: Path) -> None:
        at = ("--config-path", str(folder))
        assert self.workers("train", *at) == {"actor": 4, "env": 2}
        assert self.workers(str(folder / "train.yaml")) == {"actor": 4, "env": 2}, "its placement is in another file"

    def test_overrides_are_hydras(self, folder: Path) -> None:
        at = ("--config-path", str(folder))
        assert self.workers("train", "cluster.component_placement.env=4-7", *at) == {"actor": 4, "env": 4}
        added = "+cluster.component_placement.reward=7"
        assert self.workers("train", added, *at) == {"actor": 4, "env": 2, "reward": 1}

    @pytest.mark.parametrize(("written", "workers"), [("1:0", 1), ("1:0-1", 2), ("0-1:0", 1)])
    def test_ps_01_a_pair_in_an_override_or_beside_one_is_no_number_in_base_60(
        self, tmp_path: Path, written: str, workers: int
    ) -> None:
        file = tmp_path / "pair.yaml"
        file.write_text("cluster:\n  component_placement:\n    env: 1:0\n    actor: 0\n")
        assert self.workers(str(file), f"cluster.component_placement.actor={written}", "--nodes", "4") == {
            "actor": workers,
            "env": 1,
        }

    def test_a_plain_file_takes_overrides_too(self, file: Path) -> None:
        shown = show(file, "cluster.component_placement.env=0-20", "--nodes", "4+4+0")
        assert shown.exit_code == 2
        assert f"{file} (composed):" in shown.stderr
        assert "env" in shown.stderr
        assert file.read_text() == CONFIG
        for wrong in ("cluster", "~cluster.num_nodes", "=3"):
            refused = show(file, wrong, "--nodes", "4")
            assert refused.exit_code == 2
            assert "Write for example cluster.component_placement.env=0-1." in refused.stderr

    def test_what_can_not_be_composed_says_why(self, folder: Path) -> None:
        for arguments, why in (
            (("trian", "--config-path", str(folder)), "Similar ones: train."),
            (("train", "cluster.component_placement.envs.x=1", "--config-path", str(folder)), "can't be composed"),
            (("-", "a=b"), "Overrides and folders of configs are for files."),
        ):
            shown = CliRunner().invoke(app, ["placement", "show", *arguments, "--nodes", "8"])
            assert shown.exit_code == 2
            assert why in shown.stderr, arguments

    def test_what_is_submitted_is_the_whole_config(self, run: Run, api: FakeApi, folder: Path) -> None:
        config = ("--config", "train", "--config-path", str(folder), "cluster.component_placement.env=4")
        actors = ("--actors", "env=pkg.mod:Env", "--kwargs", "env={seed: 3}")
        shown = run("job", "submit", *config, *actors)
        assert shown.exit_code == 0, shown.output
        (request,) = api.seen(SubmitJobRequest)
        placed = yaml.safe_load(request.spec.placement_config)["cluster"]["component_placement"]
        assert placed == {"actor": "0-3", "env": 4}
        assert [component.name for component in request.spec.components] == ["actor", "env"]
        assert json.loads(request.spec.components[1].kwargs_json) == {"seed": 3}
        for arguments, why in (("env=[1]", "reads COMPONENT"), ("actor={a: 1}", "with --actors")):
            assert why in run("job", "submit", *config, *actors, "--kwargs", arguments).stderr
        for wrong in (("a.yaml", "b.yaml"), ("--config", "x.yaml", "job.yaml"), ()):
            assert run("job", "submit", *wrong).exit_code == 2
        assert len(api.seen(SubmitJobRequest)) == 1

    def test_the_example_of_the_docs_is_taken(self, run: Run, api: FakeApi) -> None:
        page = (ROOT / "docs" / "placement.md").read_text()
        commands = [
            line
            for line in page.replace("\\\n", "").splitlines()
            if line.startswith("callboard job submit --config ex")
        ]
        assert commands
        job = Job(name="jobs/grpo", uid="j1", state=JobState.JOB_STATE_RUNNING)
        api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=job))
        api.on(methods.GET_JOB, GetJobResponse(job=job))
        for command in commands:
            shown = run(*shlex.split(command)[1:])
            assert shown.exit_code == 0, shown.output
        assert len(api.seen(SubmitJobRequest)) == len(commands)
