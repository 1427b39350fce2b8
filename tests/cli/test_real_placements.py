"""Do the workers of a placed job see what the plan says, written by hand or searched for? On a real Ray cluster of two
agents with two GPUs each.

Each layout is submitted as an RLinf config; the workers' own reports are compared with the plan that the pure package
makes of the same text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.ray.ray_command import free_port
from callboard.placement import Cluster, plan_placement
from tests.cli.machine import ROOT, Machine

REASONING = """
runner: {task_type: reasoning}
algorithm: {recompute_logprobs: true}
actor: {model: {tensor_model_parallel_size: 2}}
rollout: {tensor_parallel_size: 1}
"""

LAYOUTS = {
    "collocated": "cluster: {num_nodes: 2, component_placement: {'actor,rollout': all}}",
    "disaggregated": "cluster: {num_nodes: 2, component_placement: {actor: 0-1, rollout: 2-3}}",
    "hybrid": "cluster: {num_nodes: 2, component_placement: {actor: 0-3, rollout: 1-2, env: '3:0-1'}}",
    "shared": "cluster: {num_nodes: 2, component_placement: {env: '0-1:0-3', rollout: '2-3:0'}}",
    "strided": REASONING + "cluster: {num_nodes: 2, component_placement: {'actor,rollout,reward': all}}",
    "node-only": "cluster: {num_nodes: 2, component_placement: {agent: {node_group: node, placement: '0-1:0-3'}}}",
    "two-groups": """
cluster:
  num_nodes: 2
  component_placement:
    actor: {node_group: back, placement: 0-1}
    env: {node_group: front, placement: '1:0-1'}
  node_groups:
    - {label: front, node_ranks: 0}
    - label: back
      node_ranks: 1
      env_configs: [{node_ranks: 1, env_vars: [{GLOO_SOCKET_IFNAME: lo}]}]
""",
}

SEARCHED = """\
# Trains on two nodes.
runner:
  task_type: reasoning   # GRPO
algorithm: {group_size: 8, n_minibatches: 2, recompute_logprobs: true}
data:
  rollout_batch_size: 64
rollout: {tensor_parallel_size: 1, pipeline_parallel_size: 1, max_running_requests: 600}
actor:
  model: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
cluster:
  num_nodes: 2       # both
  num_gpus_per_node: 2
  component_placement:
    actor,rollout: all   # where it was measured
    reward: all

profile_data:
  actor_cost: 95.7
  inference_cost: 30.8
  rollout_cost: 59.9   # one engine takes all requests at once
"""

DRIVER = """
import json, sys, ray
from callboard import SyncClient
reports = {}
with SyncClient() as cb:
    cb.connect_ray()
    for name in sys.argv[1:]:
        job = cb.get_job(name)
        job.running(timeout=90)
        calls = [(h, h.report.remote(), h.variables.remote(["GLOO_SOCKET_IFNAME"])) for h in job.workers()]
        reports[name] = [ray.get(report, timeout=60) | ray.get(more, timeout=60) for _, report, more in calls]
        job.complete()
print(json.dumps(reports))
"""


def reports_of(*jobs: str) -> dict[str, list[dict[str, Any]]]:
    """What every worker of some jobs reports, one job after the other."""
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, *jobs], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def planned(config: str) -> dict[tuple[str, int], dict[str, Any]]:
    """What each worker should see."""
    plan = plan_placement(config, Cluster.from_nodes("2+2"))
    return {
        (worker.component, worker.placement.rank): {
            "node_rank": worker.placement.cluster_node_rank,
            "local_rank": worker.placement.local_rank,
            "local_world_size": worker.placement.local_world_size,
            "world_size": plan.by_name[worker.component].world_size,
            "devices": list(worker.placement.visible_accelerators),
            "CUDA_VISIBLE_DEVICES": ",".join(worker.placement.visible_accelerators),
            "node_group": worker.placement.node_group_label,
            "GLOO_SOCKET_IFNAME": dict(worker.env).get("GLOO_SOCKET_IFNAME"),
        }
        for worker in plan.workers
    }


def seen(reports: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The same from the reports."""
    keys = ("node_rank", "local_rank", "local_world_size", "world_size", "devices", "node_group", "GLOO_SOCKET_IFNAME")
    return {
        (report["component"], report["rank"]): {key: report[key] for key in keys}
        | {"CUDA_VISIBLE_DEVICES": report["variables"]["CUDA_VISIBLE_DEVICES"]}
        for report in reports
    }


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_workers_reports_equal_the_plan_of_every_layout_and_of_autoplace(machine: Machine, tmp_path: Path) -> None:
    started = machine.run("up", "--detach", "--agents", "2", "--gpus-per-node", "2", "--port", str(free_port()))
    assert started.returncode == 0, started.stderr
    try:
        assert machine.run("pool", "create", "rl").returncode == 0
        for name, config in LAYOUTS.items():
            file = tmp_path / f"{name}.yaml"
            file.write_text(config)
            # All at once: the GPUs are the same, so each waits for the one before.
            submitted = machine.run("job", "submit", "--config", str(file), "--name", name, "--pool", "rl")
            assert submitted.returncode == 0, submitted.stderr
        reports = reports_of(*LAYOUTS)
        for name, config in LAYOUTS.items():
            assert seen(reports[name]) == planned(config), name
        _search_and_start(machine, tmp_path / "train.yaml")
    finally:
        ended = machine.run("down")
        assert ended.returncode == 0, ended.stderr


def _search_and_start(machine: Machine, config: Path) -> None:
    """What autoplace applied is shown, and starts on the nodes it was planned for."""
    config.write_text(SEARCHED)
    (cluster,) = machine.clusters()
    searched = machine.run("autoplace", str(config), "--controller", cluster.controller, "--apply", "-o", "json")
    assert searched.returncode == 0, searched.stderr
    found = json.loads(searched.stdout)
    assert (found["status"], found["layout"]) == ("OPTIMAL", "disaggregated")
    text = config.read_text()
    assert text == SEARCHED.replace(
        "    actor,rollout: all   # where it was measured\n    reward: all\n",
        "    # where it was measured\n    rollout: 0-0\n    inference: 1-1\n    actor: 2-3\n    reward: 0-0\n",
    )

    shown = machine.run("placement", "show", str(config), "--controller", cluster.controller)
    assert shown.returncode == 0, shown.stderr

    submit = ("job", "submit", "--config", str(config), "--pool", "rl", "--planned-at")
    revision = str(found["inventory_revision"])
    running = machine.run(*submit, revision, "--name", "placed", "--wait", "--timeout", "45")
    assert running.returncode == 0, running.stderr
    assert seen(reports_of("placed")["placed"]) == planned(text)

    # AP-16: a node goes after the plan was made, so the plan is for GPUs that are not there.
    drained = machine.run("node", "drain", "node-1")
    assert drained.returncode == 0, drained.stderr
    stale = machine.run(*submit, revision, "--name", "stale")
    assert stale.returncode == 1
    assert "Plan again with `callboard autoplace`" in stale.stderr
    assert machine.run("job", "get", "stale").returncode == 1
