"""Are placed jobs submitted from files and RLinf configs, and is every fault shown where it stands?"""

from __future__ import annotations

from pathlib import Path

from callboard.v1.job_pb2 import Job
from tests.cli.cluster import RealCluster, verb

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
    async def test_a_job_file_with_a_cluster_runs_as_it_is_placed(self, cluster: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        file.write_text(JOB)
        result = await verb(cluster, "job", "submit", str(file), "--wait")
        assert result.exit_code == 0, result.output
        job = (await cluster.client.get_job("placed")).job
        assert seen(job) == {
            ("actor", 0): ("n0", "0"),
            ("actor", 1): ("n0", "1"),
            ("env", 0): ("n0", "0"),
            ("env", 1): ("n0", "0"),
            ("env", 2): ("n0", "1"),
            ("env", 3): ("n0", "1"),
        }

    async def test_a_placement_may_stand_at_its_component(self, cluster: RealCluster, tmp_path: Path) -> None:
        file = tmp_path / "job.yaml"
        text = """\
        name: short
        pool: rlhf
        components:
          - {name: actor, actor: "tests.support.actors:Plain", component_placement: 1:0}
        """
        file.write_text(text)
        result = await verb(cluster, "job", "submit", str(file), "--wait")
        assert result.exit_code == 0, result.output
        assert seen((await cluster.client.get_job("short")).job) == {("actor", 0): ("n0", "1")}

    async def test_an_rlinf_config_runs_with_probes_and_named_classes(
        self, cluster: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "grpo.yaml"
        file.write_text("runner: {task_type: embodied}\ncluster: {component_placement: {'actor,env': all}}\n")
        actors = ("--actors", "env=tests.support.actors:Plain")
        result = await verb(
            cluster, "job", "submit", "--config", str(file), "--pool", "rlhf", "--name", "rl", *actors, "--wait"
        )
        assert result.exit_code == 0, result.output
        job = (await cluster.client.get_job("rl")).job
        assert [component.actor for component in job.spec.components] == [
            "callboard.agents.probe:Probe",
            "tests.support.actors:Plain",
        ]
        assert seen(job)["actor", 1] == ("n0", "1")

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
        self, cluster: RealCluster, tmp_path: Path
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
            result = await verb(cluster, "job", "submit", *arguments)
            assert result.exit_code == 2, result.output
            assert said in " ".join(result.output.split()), result.output
