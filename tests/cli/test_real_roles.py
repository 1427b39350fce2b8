"""Roles, colocation and environments against a real controller, real agents and real worker processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from callboard.client.workers import NoActor
from tests.cli.cluster import RealCluster, verb

SECRETS = {"HF_TOKEN": "abc123-hf", "DB_URL": "postgres://u:hunter2@db"}


def part(name: str, actor: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "actor": f"tests.support.group_actors:{actor}", **keys}


def training(name: str = "train", **keys: Any) -> dict[str, Any]:
    components = [
        part("trainer", "Trainer", role="trainer", resources={"cpu": 2}, colocation_group="training", **keys),
        part("trajectories", "Pool", role="trajectory_pool", colocation_group="training"),
        part("sync", "Silent", role="weight_sync", colocation_group="training"),
        part("loader", "Loop", role="data_loader"),
    ]
    return {"name": name, "pool": "rlhf", "components": components}


async def running(cluster: RealCluster, spec: dict[str, Any]) -> Any:
    job = await cluster.client.submit(spec)
    await job.running(timeout=90)
    return job


def _holding(root: Path, text: str) -> list[Path]:
    """Files at or below a place that hold a text."""
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


class TestColocation:
    async def test_three_components_are_one_worker_and_shown_as_what_was_asked(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(training()))
        shown = await verb(shared, "job", "submit", str(file), "--wait", "--timeout", "40")
        job = await shared.client.get_job("train")
        assert job.state == "RUNNING", shown.output
        assert [(worker.key.component, list(worker.members)) for worker in job.job.workers] == [
            ("training", ["trainer", "trajectories", "sync"]),
            ("loader", []),
        ]
        assert job.job.workers[0].allocation.resources.cpu_milli == 2000
        assert job.job.workers[0].allocation.resources.gpu_milli == 1000
        spec = {component.name: component for component in job.job.spec.components}
        assert set(spec) == {"trainer", "trajectories", "sync", "loader"}
        assert (spec["trainer"].max_concurrency, spec["trajectories"].max_concurrency) == (1, 100)
        assert spec["trajectories"].resources.cpu_milli == 1000
        assert len(shared.processes()) == 2

        listed = await verb(shared, "worker", "list")
        assert "training: trainer, trajectories, sync" in listed.stdout
        assert "2/2" in (await verb(shared, "status")).stdout
        handles = job.workers("trajectories")
        assert [(handle.component, handle.member) for handle in handles] == [("training", "trajectories")]
        assert handles[0].put.method == "trajectories.put"
        assert [handle.member for handle in job.workers("training")] == [""]
        with pytest.raises(NoActor):
            handles[0].put.remote(1)

    async def test_its_loads_are_seen_by_member(self, shared: RealCluster) -> None:
        await running(shared, training())
        found = json.loads((await verb(shared, "top", "--once", "-o", "json")).stdout)
        group = next(each for each in found["workers"] if each["worker"]["component"] == "training")
        assert [(call["member"], call["limit"]) for call in group["calls"]] == [
            ("trainer", 1),
            ("trajectories", 100),
            ("sync", 10),
        ]
        assert int(group["memory_bytes"]) > 1 << 20
        assert "0/100" in (await verb(shared, "top", "--once")).stdout

    async def test_a_failing_member_is_named(self, shared: RealCluster) -> None:
        spec = training()
        spec["components"][1]["actor"] = "tests.support.actors:Broken"
        job = await shared.client.submit(spec)
        await job.finished(timeout=90)
        assert job.state == "FAILED"
        assert "trajectories: ValueError: no weights here" in job.job.state_reason


class TestSignals:
    async def test_reported_gauges_scale_an_elastic_component(self, shared: RealCluster) -> None:
        rules = [
            {"signal": "queue_depth", "above": 100, "action": "down"},
            {"signal": "pending_items", "above": 0, "action": "up", "step": 2},
        ]
        worker = part("rollout", "Silent", role="rollout_worker", min_workers=1, max_workers=3, scaling=rules)
        job = await running(shared, {"name": "roll", "pool": "rlhf", "components": [worker]})
        assert await shared.client.report("roll", {"pending_items": 7}) == {"rollout": 3}
        await job.until(lambda seen: len(seen.workers) == 3, "three workers", 40)
        assert await job.report({"queue_depth": 101.5}) == {"rollout": 2}
        await job.until(lambda seen: sorted(each.key.rank for each in seen.workers) == [0, 1], "two workers", 40)
        shown = await verb(shared, "top", "--once", "-o", "json")
        assert json.loads(shown.stdout)["gauges"] == {"roll": {"pending_items": 7, "queue_depth": 101.5}}

    async def test_what_is_no_gauge_is_refused(self, shared: RealCluster) -> None:
        from callboard.wire.refusals import InvalidRequest

        await running(shared, {"name": "x", "pool": "rlhf", "components": [part("a", "Silent")]})
        for bad in ({"a b": 1.0}, {"a": float("nan")}, {f"g{number}": 1.0 for number in range(65)}):
            with pytest.raises(InvalidRequest):
                await shared.client.report("x", bad)


class TestEnvironment:
    async def test_se_04_no_secret_value_is_found_anywhere(self, cluster: RealCluster, tmp_path: Path) -> None:
        component = part("a", "Silent", env={"HF_TOKEN": SECRETS["HF_TOKEN"]}, secret_env={"DB_URL": SECRETS["DB_URL"]})
        await running(cluster, {"name": "quiet", "pool": "rlhf", "components": [component]})
        careless = part("b", "Careless", secret_env={"DB": SECRETS["DB_URL"], "API_TOKEN": SECRETS["HF_TOKEN"]})
        failing = await cluster.client.submit({"name": "loud", "pool": "rlhf", "components": [careless]})
        await failing.finished(timeout=90)
        assert "can't log in with ********" in failing.job.state_reason
        shown = [
            (await verb(cluster, *line)).output
            for name in ("quiet", "loud")
            for line in (
                ("job", "get", name, "-o", "json"),
                ("job", "get", name, "-o", "wide"),
                ("job", "env", name, "-o", "yaml"),
                ("job", "logs", name),
                ("job", "explain", name),
            )
        ]
        lines = (("job", "list", "--all", "-o", "json"), ("status", "-o", "json"), ("events", "-o", "json"))
        shown += [
            (await verb(cluster, *line)).output for line in (*lines, ("worker", "list"), ("doctor",), ("top", "--once"))
        ]
        assert "quiet" in "".join(shown)
        for value in SECRETS.values():
            assert not [text for text in shown if value in text]
            assert _holding(tmp_path, value) == [], "nor in the agents' records of what they started"

    async def test_job_env_shows_what_a_worker_has_with_secrets_masked(self, shared: RealCluster) -> None:
        component = part("a", "Silent", env={"MODE": "fast", "HF_TOKEN": "abc123"}, secret_env={"DB": "hunter2"})
        await running(shared, {"name": "j", "pool": "rlhf", "components": [component]})
        (found,) = json.loads((await verb(shared, "job", "env", "j", "-o", "json")).stdout)
        environment = found["environment"]
        assert (environment["MODE"], environment["HF_TOKEN"], environment["DB"]) == ("fast", "********", "********")
        assert (environment["RANK"], environment["LOG_LEVEL"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", "INFO", "")
        shown = await verb(shared, "job", "env", "j", "--component", "a", "--rank", "0")
        assert "  MODE=fast" in shown.stdout

    async def test_of_five_thousand_variables_of_the_agent_a_worker_sees_the_allow_list(
        self, bare: RealCluster
    ) -> None:
        many = {f"HPC_MODULE_{number}": "x" * 1024 for number in range(5000)}
        await bare.add_node("hpc", variables={**many, "WANDB_PROJECT": "p", "PASSED": "yes"})
        await bare.client.ensure_pool("rlhf")
        component = part("a", "Silent", pass_env=["PASSED"])
        await running(bare, {"name": "j", "pool": "rlhf", "components": [component]})
        (found,) = json.loads((await verb(bare, "job", "env", "j", "-o", "json")).stdout)
        environment = found["environment"]
        assert (environment["WANDB_PROJECT"], environment["PASSED"]) == ("p", "yes")
        assert not [name for name in environment if name.startswith("HPC_")]
        (pid,) = bare.processes()
        assert not _holding(Path(f"/proc/{pid}/environ"), "HPC_MODULE")


class TestDoctor:
    async def test_finds_nothing_in_a_healthy_cluster(self, cluster: RealCluster) -> None:
        await running(cluster, training())
        shown = await verb(cluster, "doctor")
        assert shown.exit_code == 0, shown.output
        assert "Healthy" in shown.stdout

    async def test_names_what_waits_and_why(self, shared: RealCluster) -> None:
        await running(shared, training("first", max_concurrency=1))
        await shared.client.submit(training("second") | {"placement": "STRICT_PACK"})
        await shared.client.submit(training("third"))
        shown = await verb(shared, "doctor", "-o", "json")
        assert shown.exit_code == 1
        found = json.loads(shown.stdout)["findings"]
        assert any(each["kind"] == "pending" and "third waits" in each["what"] for each in found)

    async def test_a_worker_that_was_killed_is_reported_with_its_peak(self, shared: RealCluster) -> None:
        job = await running(shared, {"name": "j", "pool": "rlhf", "components": [part("a", "Silent")]})
        worker = job.job.workers[0]
        # Its tree is looked at every two seconds; `top` looks at once, and says the peak.
        found: dict[str, Any] = {}
        while int(found.get("peak_memory_bytes", 0)) == 0:
            (found,) = json.loads((await verb(shared, "top", "--once", "-o", "json")).stdout)["workers"]
        os.kill(worker.pid, signal.SIGKILL)
        await job.finished(timeout=90)
        assert "killed by signal 9" in job.job.state_reason
