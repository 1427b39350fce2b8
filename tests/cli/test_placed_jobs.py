"""Are placed jobs submitted from files and RLinf configs, and is every fault shown where it stands?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from callboard.v1.job_pb2 import Job
from tests.cli.cluster import ACTOR, RealCluster, real_cluster, verb

JOB = """\
name: placed
pool: rlhf
components:
  - {name: actor, actor: "tests.support.actors:Plain"}
  - {name: env, actor: "tests.support.actors:Plain"}
cluster:
  num_nodes: 1
  component_placement:
    actor: 0-1
    env: "0-1:0-3"
"""


def seen(job: Job) -> dict[tuple[str, int], tuple[str, str]]:
    return {(w.key.component, w.key.rank): (w.allocation.node_id, w.visible_devices) for w in job.workers}


class TestPlacedJobs:
    async def test_a_job_file_with_a_cluster_runs_as_it_is_placed(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(JOB)
        result = await verb(shared, "job", "submit", str(file), "--wait")
        assert result.exit_code == 0, result.output
        job = (await shared.client.get_job("placed")).job
        assert seen(job) == {
            ("actor", 0): ("n0", "0"),
            ("actor", 1): ("n0", "1"),
            ("env", 0): ("n0", "0"),
            ("env", 1): ("n0", "0"),
            ("env", 2): ("n0", "1"),
            ("env", 3): ("n0", "1"),
        }

    async def test_a_placement_may_stand_at_its_component(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        text = """\
        name: short
        pool: rlhf
        components:
          - {name: actor, actor: "tests.support.actors:Plain", component_placement: 1:0}
        """
        file.write_text(text)
        result = await verb(shared, "job", "submit", str(file), "--wait")
        assert result.exit_code == 0, result.output
        assert seen((await shared.client.get_job("short")).job) == {("actor", 0): ("n0", "1")}

    async def test_an_rlinf_config_runs_with_probes_and_named_classes(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "grpo.yaml"
        file.write_text("runner: {task_type: embodied}\ncluster: {component_placement: {'actor,env': all}}\n")
        actors = ("--actors", "env=tests.support.actors:Plain")
        result = await verb(
            shared, "job", "submit", "--config", str(file), "--pool", "rlhf", "--name", "rl", *actors, "--wait"
        )
        assert result.exit_code == 0, result.output
        job = (await shared.client.get_job("rl")).job
        assert [component.actor for component in job.spec.components] == [
            "callboard.agents.probe:Probe",
            "tests.support.actors:Plain",
        ]
        assert seen(job)["actor", 1] == ("n0", "1")

    async def test_an_rlinf_config_is_told_from_a_job(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "grpo.yaml"
        file.write_text("defaults: [_self_]\nrunner: {}\ncluster: {component_placement: {actor: all}}\n")
        result = await verb(shared, "job", "submit", str(file))
        assert result.exit_code == 2
        assert f"callboard job submit --config {file} --pool POOL" in result.output.replace("\n", "")
        file.write_text("name: j\ncluster: {component_placement: {actor: all}}\n")
        result = await verb(shared, "job", "submit", str(file))
        assert "pool: is required" in result.output

    async def test_every_fault_is_shown_at_its_line(self, cluster: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "bad.yaml"
        names = [f"component_with_a_long_name_{n}" for n in range(40)]
        lines = "".join(f"    {name}: 0-{n + 2}\n" for n, name in enumerate(names))
        file.write_text(f"cluster:\n  component_placement:\n{lines}")
        result = await verb(cluster, "job", "submit", "--config", str(file), "--pool", "rlhf")
        assert result.exit_code == 2
        for line in range(3, 43):
            assert f"bad.yaml:{line}:" in result.output, result.output
        assert not await cluster.client.list_jobs()

    async def test_what_makes_no_sense_is_refused_before_anything_is_sent(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        config = tmp_path / "config.yaml"
        config.write_text("cluster: {component_placement: {actor: 0}}\n")
        nothing = tmp_path / "nothing.yaml"
        nothing.write_text("runner: {}\n")
        for arguments, said in (
            ((), "either FILE or --config"),
            (("--config", str(nothing)), "places no components"),
            (("--config", str(config), "--actors", "actr=a:B"), "there is no component 'actr'"),
            (("--config", str(config), "--actors", "actor=a"), "reads COMPONENT=pkg.module:Class"),
        ):
            result = await verb(shared, "job", "submit", *arguments)
            assert result.exit_code == 2, result.output
            assert said in " ".join(result.output.split()), result.output

    @pytest.mark.parametrize(
        ("config", "places"),
        [
            ("component_placement: {actor: 1}\nnum_nodes: 1\n", {("actor", 0): ("n0", "1")}),
            ("p: {'actor, env': 0}\ncluster: {component_placement: '${p}'}\n", {
                ("actor", 0): ("n0", "0"), ("env", 0): ("n0", "0")}),
            ("p: &p {actor: 0}\ncluster:\n  component_placement:\n    <<: *p\n", {
                ("actor", 0): ("n0", "0")}),
        ],
        ids=["section", "interpolated", "merged"],
    )  # fmt: skip
    async def test_a_config_may_name_its_components_in_any_form(
        self, shared: RealCluster, tmp_path: Path, config: str, places: dict[tuple[str, int], tuple[str, str]]
    ) -> None:
        file = tmp_path / "config.yaml"
        file.write_text(config)
        result = await verb(shared, "job", "submit", "--config", str(file), "--pool", "rlhf", "--name", "any", "--wait")
        assert result.exit_code == 0, result.output
        assert seen((await shared.client.get_job("any")).job) == places

    @pytest.mark.parametrize(
        ("config", "shown"),
        [
            ("cluster: {component_placement: {1a: 0, 'b c': 1}}\n", ("bad.yaml:1:33: error", "bad.yaml:1:41: error")),
            ("cluster:\n  component_placement: {a: 0, a: 1}\n", ("bad.yaml:2:31: error",)),
            ("cluster:\n\tx: 1\n", ("bad.yaml:2:1: error", "a tab stands here")),
        ],
    )
    async def test_a_config_whose_names_can_t_be_read_is_shown_with_its_lines(
        self, shared: RealCluster, tmp_path: Path, config: str, shown: tuple[str, ...]
    ) -> None:
        file = tmp_path / "bad.yaml"
        file.write_text(config)
        result = await verb(shared, "job", "submit", "--config", str(file), "--pool", "rlhf")
        assert result.exit_code == 2
        for part in shown:
            assert part in result.output

    async def test_ps_13_what_was_accepted_and_may_not_be_meant_is_said(
        self, cluster: RealCluster, tmp_path: Path
    ) -> None:
        await cluster.add_node("bare", gpus=0)
        file = tmp_path / "config.yaml"
        file.write_text("cluster:\n  component_placement:\n    actor: all\n")
        line = ("job", "submit", "--config", str(file), "--pool", "rlhf")
        for more in (("--validate",), ("--name", "warned")):
            result = await verb(cluster, *line, *more)
            assert result.exit_code == 0, result.output
            assert "config.yaml:3:12: warning: component actor: node 1 of the group cluster left out" in result.stderr
        quiet = await verb(cluster, *line, "--name", "quiet", "--quiet")
        assert "warning" not in quiet.stderr

    async def test_faults_at_components_are_at_their_own_lines(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(
            "name: j\npool: rlhf\ncluster: {node_groups: [{label: g, node_ranks: 0}]}\ncomponents:\n"
            f"  - {{name: a, actor: '{ACTOR}', component_placement: {{node_group: gg, placement: 0}}}}\n"
            f"  - name: b\n    actor: {ACTOR}\n    component_placement: 0-7\n"
        )
        result = await verb(shared, "job", "submit", str(file))
        assert result.exit_code == 2
        first = file.read_text().splitlines()[4].index("gg") + 1
        assert f"job.yaml:5:{first}: error: component a: unknown node group 'gg'; did you mean g?" in result.output
        assert "job.yaml:8:26: error: component b: segment '0-7'" in result.output

    async def test_faults_of_a_json_job_are_at_their_own_columns(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.json"
        job = {"name": "j", "pool": "rlhf", "components": [{"name": "a", "actor": ACTOR, "component_placement": "0,9"}]}
        file.write_text(json.dumps(job))
        result = await verb(shared, "job", "submit", str(file))
        assert result.exit_code == 2
        assert f"job.json:1:{file.read_text().index('0,9') + 3}: error" in result.output

    async def test_what_the_job_says_otherwise_is_told_at_its_lines(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(
            "name: j\npool: rlhf\ncluster:\n  component_placement: {a: 0, b: 1}\ncomponents:\n"
            f"  - name: a\n    actor: {ACTOR}\n    workers: 3\n"
            f"  - {{name: b, actor: '{ACTOR}', resources: {{gpu: 2}}}}\n"
        )
        result = await verb(shared, "job", "submit", str(file))
        assert result.exit_code == 2
        column = file.read_text().splitlines()[8].index("gpu") + 1
        assert "8:5: components[0].workers: a states 3 workers, its placement makes 1" in result.output
        assert f"9:{column}: components[1].resources.gpu: b asks 2 GPU a worker" in result.output
        file.write_text(file.read_text().replace("{a: 0, b: 1}", "{c: 1}").replace("    workers: 3\n", ""))
        result = await verb(shared, "job", "submit", str(file))
        assert "4:3: cluster.component_placement: places c, but the job's components are a, b" in result.output

    async def test_show_and_submit_read_a_job_alike(self, shared: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(
            "name: both\npool: rlhf\ncomponents:\n"
            f"  - {{name: a, actor: '{ACTOR}'}}\n"
            f"  - {{name: b, actor: '{ACTOR}', component_placement: {{node_group: g, placement: 1}}}}\n"
            "cluster:\n  component_placement: {a: 0}\n  node_groups: [{label: g, node_ranks: 0}]\n"
        )
        shown = await verb(shared, "placement", "show", str(file), "-o", "json")
        assert {part["name"] for part in json.loads(shown.stdout)["components"]} == {"a", "b"}
        assert (await verb(shared, "job", "submit", str(file), "--wait")).exit_code == 0
        assert seen((await shared.client.get_job("both")).job) == {("a", 0): ("n0", "0"), ("b", 0): ("n0", "1")}


def placed_job(name: str, placement: object, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "pool": "rlhf",
        "components": [{"name": "w", "actor": ACTOR, "component_placement": placement}],
    } | more


def charged(job: Job) -> list[tuple[str, str, list[int]]]:
    return [
        (w.allocation.node_id, w.visible_devices, [device.milli for device in w.allocation.devices])
        for w in job.workers
    ]


class TestLives:
    """What becomes of placed jobs when others come, and when nodes go."""

    async def test_stated_shares_share_a_gpu_until_it_is_full(self, shared: RealCluster) -> None:
        first = await shared.client.submit(placed_job("s1", {"placement": 0, "share": 500}))
        second = await shared.client.submit(placed_job("s2", {"placement": 0, "share": 0.5}))
        await first.running(30)
        await second.running(30)
        third = await shared.client.submit(placed_job("s3", {"placement": 0, "share": 100}))
        why = await verb(shared, "job", "explain", "s3")
        assert "w/0 must have 0.1 of device 0 on n0, of which 0 is free; s1, s2 use it" in why.output
        await first.cancel()
        await third.running(30)
        assert charged(third.job) == [("n0", "0", [100])]
        assert charged(second.job) == [("n0", "0", [500])]

    async def test_a_preempted_job_comes_back_to_its_own_places(self, shared: RealCluster) -> None:
        low = await shared.client.submit(placed_job("low", "1"))
        await low.running(30)
        high = await shared.client.submit(placed_job("high", "0-1", priority=9))
        await high.running(30)
        await high.cancel()
        low = await shared.client.get_job("low")
        await low.running(30)
        assert charged(low.job) == [("n0", "1", [1000])]

    async def test_a_job_waits_for_the_node_that_its_places_name(self, tmp_path: Path) -> None:
        async with real_cluster(tmp_path, "n0", "n1", lease_ms=4_000, heartbeat_ms=1_000) as cluster:
            await cluster.client.set_policy({"kill_timeout": 1})  # It is added to the silence that is borne.
            await cluster.client.ensure_pool("rlhf", nominal={"cpu": 8})
            job = await cluster.client.submit(placed_job("wide", "1-2", restart={"max_restarts": 3}))
            await job.running(30)
            revision = (await cluster.client.stats()).revision
            await cluster.kill_node("n1")
            async for event in cluster.client.watch(start_revision=revision + 1, subject="jobs/wide"):
                if event.state == "PENDING":
                    break
            why = await verb(cluster, "job", "explain", "wide")
            assert "its placement names n1, which is LOST" in why.output
            await cluster.add_node("n1")
            job = await cluster.client.get_job("wide")
            await job.running(60)
            assert charged(job.job) == [("n0", "1", [1000]), ("n1", "0", [1000])]

    async def test_workers_are_given_the_hardware_that_their_node_declared(
        self, cluster: RealCluster, tmp_path: Path
    ) -> None:
        arms = ('Franka={"robot_ip": "10.0.0.1"}', 'Franka={"robot_ip": "10.0.0.2"}', "ZED=2")
        options = [part for arm in arms for part in ("--hardware", arm)]
        await cluster.add_node("lab", *options, "--rank", "7", gpus=0)
        file = tmp_path / "config.yaml"
        file.write_text("""\
cluster:
  component_placement:
    env: {node_group: arms, placement: all}
    both: {node_group: arms, placement: "0-1:0"}
    stated: {node_group: other, placement: 1}
    camera: {node_group: "gpus,eyes", placement: "0,3"}
  node_groups:
    - {label: arms, node_ranks: 7, hardware: {type: Franka}}
    - {label: eyes, node_ranks: 7, hardware: {type: ZED}}
    - {label: gpus, node_ranks: 0}
    - {label: other, node_ranks: 0, hardware: {type: Arm, configs: [{node_rank: 0, n: 1}, {node_rank: 0, n: 2}]}}
""")
        submitted = await verb(
            cluster, "job", "submit", "--config", str(file), "--pool", "rlhf", "--name", "robots", "--wait"
        )
        assert submitted.exit_code == 0, submitted.output
        logs = await verb(cluster, "job", "logs", "robots")
        reports = [json.loads(line[line.index("{") :]) for line in logs.stdout.splitlines() if '"hardware"' in line]
        told = {(r["component"], r["rank"]): (r["node_rank"], r["devices"], r["hardware"]) for r in reports}
        left, right = {"robot_ip": "10.0.0.1"}, {"robot_ip": "10.0.0.2"}
        assert told == {
            ("env", 0): (7, [], [left]),
            ("env", 1): (7, [], [right]),
            ("both", 0): (7, [], [left, right]),
            ("stated", 0): (0, [], [{"n": 2}]),
            ("camera", 0): (0, ["0"], []),
            ("camera", 1): (7, [], [{}]),
        }

    async def test_a_placed_job_is_shown_by_its_text_and_shared_devices_once(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(JOB)
        await verb(shared, "job", "submit", str(file), "--wait")
        shown = (await verb(shared, "job", "get", "placed")).stdout
        assert "actor 0-1, env 0-1:0-3" in shown
        assert "actor 0.668 GPU in all as placed" in shown  # a third of each, the others are env's
        listed = (await verb(shared, "job", "list")).stdout
        assert "n0 GPU 0,1" in listed
        status = (await verb(shared, "status")).stdout
        assert "placed ×3" in status
