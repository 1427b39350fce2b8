"""Does a placement that was searched for start on a real Ray cluster, and only on the nodes that it was planned for?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from callboard.cli.local.ports import free_port
from tests.cli.machine import Machine
from tests.cli.test_real_placements import planned, reports_of, seen

CONFIG = """\
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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_autoplace_applied_is_shown_and_starts_on_the_nodes_it_was_planned_for(
    machine: Machine, tmp_path: Path
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(CONFIG)
    started = machine.run("up", "--detach", "--agents", "2", "--gpus-per-node", "2", "--port", str(free_port()))
    assert started.returncode == 0, started.stderr
    try:
        assert machine.run("pool", "create", "rl").returncode == 0
        (cluster,) = machine.clusters()
        searched = machine.run("autoplace", str(config), "--controller", cluster.controller, "--apply", "-o", "json")
        assert searched.returncode == 0, searched.stderr
        found = json.loads(searched.stdout)
        assert (found["status"], found["layout"]) == ("OPTIMAL", "disaggregated")
        text = config.read_text()
        assert text == CONFIG.replace(
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
    finally:
        ended = machine.run("down")
        assert ended.returncode == 0, ended.stderr
