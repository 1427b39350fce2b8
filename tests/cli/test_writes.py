"""What do verbs that change something send, and what do they say when it fails?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.client.calls import methods
from callboard.model.inputs import job_spec, pool_spec
from callboard.model.policy import PreemptionPolicy
from callboard.v1.job_pb2 import (
    CancelJobRequest,
    CancelJobResponse,
    Explanation,
    GetJobResponse,
    JobState,
    ListJobsResponse,
    PreemptJobRequest,
    PreemptJobResponse,
    SubmitJobRequest,
    SubmitJobResponse,
)
from callboard.v1.node_pb2 import ListNodesResponse
from callboard.v1.pool_pb2 import (
    CreatePoolRequest,
    CreatePoolResponse,
    GetPoolResponse,
    Pool,
    UpdatePoolRequest,
    UpdatePoolResponse,
)
from callboard.v1.scheduler_pb2 import (
    GetOverviewResponse,
    GetPolicyResponse,
    GetStatsResponse,
    SetPolicyRequest,
    SetPolicyResponse,
    Stats,
)
from callboard.wire.refusals import NotFound, QuotaExceeded, QuotaViolation, Unschedulable
from callboard.wire.specs import job_spec_to_proto, policy_from_proto, policy_to_proto, pool_spec_to_proto
from tests.cli import objects
from tests.cli.conftest import Run
from tests.support.fake_api import FakeApi

JOB = """\
name: train-00
pool: rlhf
priority: 9
components:
  - name: actor
    actor: pkg.module:Class
    resources: {cpu: 1.5, memory: 1GiB, gpu: 1}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def refusing(error: Exception) -> Any:
    def refuse(_: Any) -> Any:
        raise error

    return refuse


def test_a_file_is_submitted(run: Run, api: FakeApi, job_file: Path) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    shown = run("job", "submit", str(job_file), "--request-id", "r1")
    assert shown.exit_code == 0, shown.output
    (request,) = api.seen(SubmitJobRequest)
    assert request.spec.components[0].resources.cpu_milli == 1500
    assert request.request_id == "r1"


def test_the_input_is_submitted(run: Run, api: FakeApi) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    assert run("job", "submit", "-", stdin=JOB).exit_code == 0
    assert len(api.seen(SubmitJobRequest)) == 1


def test_quiet_prints_nothing_and_json_the_job(run: Run, api: FakeApi, job_file: Path) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    assert run("job", "submit", str(job_file), "-q").output == ""
    assert json.loads(run("job", "submit", str(job_file), "-o", "json").stdout)["uid"] == "uid-4711"


def test_faults_name_line_and_column_and_nothing_is_sent(run: Run, api: FakeApi, job_file: Path) -> None:
    job_file.write_text(JOB.replace("priority: 9", "priority: high").replace("gpu: 1", "gpu: 1.5"))
    shown = run("job", "submit", str(job_file))
    assert shown.exit_code == 2
    assert "3:" in shown.stderr
    assert "priority" in shown.stderr
    assert "gpu" in shown.stderr
    assert api.seen(SubmitJobRequest) == []


def test_a_missing_file_is_bad_input(run: Run) -> None:
    shown = run("job", "submit", "/nowhere.yaml")
    assert shown.exit_code == 2
    assert "can't be read" in shown.stderr


def test_what_can_never_run_has_an_exit_code_of_its_own(run: Run, api: FakeApi, job_file: Path) -> None:
    unblock = {"unblock.0": "7 more GPU on n1"}
    api.on(methods.SUBMIT_JOB, refusing(Unschedulable("no node has 9 GPUs", metadata=unblock)))
    shown = run("job", "submit", str(job_file))
    assert shown.exit_code == 3
    assert "The smallest change that would help: 7 more GPU on n1." in shown.stderr.replace("\n", " ")
    unblock |= {"unblock.1": "raise pool rlhf gpu by 1"}
    api.on(methods.SUBMIT_JOB, refusing(Unschedulable("no node has 9 GPUs", metadata=unblock)))
    together = "changes that would help, all together: 7 more GPU on n1; raise pool rlhf gpu by 1."
    assert together in run("job", "submit", str(job_file)).stderr.replace("\n", " ")
    short = QuotaExceeded("too much", quota=(QuotaViolation("pools/rlhf", "asks 9 CPU of 6"),))
    api.on(methods.SUBMIT_JOB, refusing(short))
    shown = run("job", "submit", str(job_file))
    assert shown.exit_code == 3
    assert "pools/rlhf: asks 9 CPU of 6" in shown.stderr


def test_a_refusal_says_what_why_what_to_do_and_by_whom(run: Run, api: FakeApi) -> None:
    """MU-07: with the controller's address and its nodes."""
    api.on(methods.GET_JOB, refusing(NotFound("job nope does not exist")))
    api.on(methods.GET_OVERVIEW, GetOverviewResponse(nodes=[objects.node()], more_nodes=4))
    shown = run("job", "get", "nope")
    assert shown.exit_code == 1
    for part in ("error:", "why:", "do:", api.address, "node-1 and 4 more"):
        assert part in shown.stderr


@pytest.mark.parametrize(
    ("subject", "command"),
    [
        ("pools/default", "callboard pool create default"),
        ("jobs/x", "callboard job list --all"),
        ("nodes/x", "callboard node list --all"),
        ("placementGroups/x", "callboard pg list"),
    ],
)
def test_what_is_not_there_comes_with_the_command_that_helps(
    run: Run, api: FakeApi, job_file: Path, subject: str, command: str
) -> None:
    api.on(methods.SUBMIT_JOB, refusing(NotFound("there is none", metadata={"subject": subject})))
    assert f"`{command}`" in run("job", "submit", str(job_file)).stderr


def test_a_submit_that_waits_for_the_end_ends_as_the_job_does(run: Run, api: FakeApi, job_file: Path) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    for state, code in ((JobState.JOB_STATE_SUCCEEDED, 0), (JobState.JOB_STATE_FAILED, 1)):
        api.on(methods.GET_JOB, GetJobResponse(job=objects.job(state=state, state_reason="it said so")))
        shown = run("job", "submit", "--wait=end", str(job_file))
        assert shown.exit_code == code, shown.output
        assert ("it said so" in shown.stderr) == (code == 1)


def test_a_pool_states_what_it_borrows_and_lends(run: Run, api: FakeApi) -> None:
    api.on(methods.CREATE_POOL, CreatePoolResponse(pool=objects.pool()))
    limits = ("--cohort", "all", "--borrow-limit", "cpu=2,memory=1GiB", "--lend-limit", "gpu=0")
    assert run("pool", "create", "rlhf", "--cpu", "6", *limits).exit_code == 0
    spec = api.seen(CreatePoolRequest)[0].spec
    assert (spec.cohort, spec.borrow_limit.cpu_milli, spec.borrow_limit.memory_bytes) == ("all", 2000, 1 << 30)
    assert (list(spec.lend_limited), spec.lend_limit.gpu_milli) == (["gpu"], 0)
    assert run("pool", "create", "rlhf", "--lend-limit", "2").exit_code == 2


def test_names_are_completed_from_what_there_is(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[objects.job("train-00"), objects.job("eval")]))
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=[objects.node()]))
    for words, found in (("job get tr", "train-00"), ("node drain ", "node-1"), ("job cancel zz", "")):
        monkeypatch.setenv("_CALLBOARD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"callboard {words}")
        monkeypatch.setenv("COMP_CWORD", "3")
        assert run().stdout.strip() == found, words
    monkeypatch.setenv("CALLBOARD_CONTROLLER", "127.0.0.1:1")
    assert run().stdout.strip() == "", "nobody to ask is no error while a line is written"


def test_rays_own_tools_find_the_cluster(run: Run, api: FakeApi) -> None:
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(ray_address="10.0.0.1:6379")))
    assert run("ray-env").stdout.strip() == "export RAY_ADDRESS=10.0.0.1:6379"
    assert json.loads(run("ray-env", "-o", "json").stdout) == {"RAY_ADDRESS": "10.0.0.1:6379"}
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats()))
    refused = run("ray-env")
    assert refused.exit_code == 1
    assert "This cluster has no Ray." in refused.stderr


def test_a_plan_that_can_never_start_has_an_exit_code_of_its_own(run: Run, api: FakeApi, job_file: Path) -> None:
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(plan=Explanation(verdict="START", summary="on node-1")))
    assert run("job", "submit", str(job_file), "--validate").exit_code == 0
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(plan=Explanation(verdict="UNSCHEDULABLE", summary="too large")))
    assert run("job", "submit", str(job_file), "--validate").exit_code == 3
    assert all(request.validate_only for request in api.seen(SubmitJobRequest))


def test_waiting_for_a_job_that_fails_says_why(run: Run, api: FakeApi, job_file: Path) -> None:
    failed = objects.job(state=JobState.JOB_STATE_FAILED, state_reason="constructor raised", traceback="ZeroDivision")
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    api.on(methods.GET_JOB, GetJobResponse(job=failed))
    shown = run("job", "submit", str(job_file), "--wait")
    assert shown.exit_code == 1
    assert "constructor raised" in shown.stderr
    assert "ZeroDivision" in shown.stderr


def test_cancel_and_preempt_name_the_job_they_found(run: Run, api: FakeApi) -> None:
    api.on(methods.GET_JOB, GetJobResponse(job=objects.job()))
    api.on(methods.CANCEL_JOB, CancelJobResponse(job=objects.job(state=JobState.JOB_STATE_STOPPING)))
    api.on(methods.PREEMPT_JOB, PreemptJobResponse(job=objects.job(state=JobState.JOB_STATE_PREEMPTING)))
    assert "is STOPPING" in run("job", "cancel", "train-00", "--reason", "enough").stderr
    assert "yields to eval" in run("job", "preempt", "train-00", "--for", "eval").stderr
    assert api.seen(CancelJobRequest)[0].name == "jobs/uid-4711"
    assert api.seen(PreemptJobRequest)[0].for_job == "jobs/eval"


def test_a_pool_is_made_from_quotas_or_from_a_file(run: Run, api: FakeApi, tmp_path: Path) -> None:
    api.on(methods.CREATE_POOL, CreatePoolResponse(pool=objects.pool()))
    assert run("pool", "create", "rlhf", "--cpu", "6", "--memory", "8GiB").exit_code == 0
    file = tmp_path / "pool.yaml"
    file.write_text("name: rlhf\nnominal: {cpu: 6}\npg_pool: {reserved: [{cpu: 2, gpu: 1}], max_dynamic: 2}\n")
    assert run("pool", "create", "--file", str(file)).exit_code == 0
    first, second = api.seen(CreatePoolRequest)
    assert first.spec.nominal.memory_bytes == 8 << 30
    assert second.spec.pg_pool.reserved[0].gpu_milli == 1000


@pytest.mark.parametrize("arguments", [(), ("a/b", "--cpu", "1"), ("rlhf", "--cpu", "lots"), ("x" * 300,)])
def test_a_bad_pool_is_refused_before_anything_is_sent(run: Run, api: FakeApi, arguments: tuple[str, ...]) -> None:
    assert run("pool", "create", *arguments).exit_code == 2
    assert api.seen(CreatePoolRequest) == []


def test_what_policy_get_prints_can_be_given_to_policy_set(run: Run, api: FakeApi, tmp_path: Path) -> None:
    policy = PreemptionPolicy(
        label_rules=(("role", (("train", ("reward", "rollout")),)),), cancel_timeout_ms=500, enable_cross_pool=False
    )
    api.on(methods.GET_POLICY, GetPolicyResponse(policy=policy_to_proto(policy)))
    api.on(methods.SET_POLICY, lambda request: SetPolicyResponse(policy=request.policy))
    printed = run("policy", "get", "-o", "yaml").stdout
    assert yaml.safe_load(printed)["cancel_timeout"] == "500ms"
    file = tmp_path / "policy.yaml"
    file.write_text(printed)
    assert run("policy", "set", str(file)).exit_code == 0
    assert policy_from_proto(api.seen(SetPolicyRequest)[0].policy) == policy
    assert "train beats reward, rollout" in run("policy", "get").stdout


def test_single_fields_of_the_policy_are_changed(run: Run, api: FakeApi) -> None:
    policy = PreemptionPolicy(cancel_timeout_ms=500)
    api.on(methods.GET_POLICY, GetPolicyResponse(policy=policy_to_proto(policy)))
    api.on(methods.SET_POLICY, lambda request: SetPolicyResponse(policy=request.policy))
    assert run("policy", "set", "aggressiveness=HIGH", "protected_pools=[a, b]").exit_code == 0
    changed = policy_from_proto(api.seen(SetPolicyRequest)[0].policy)
    assert (changed.aggressiveness, changed.protected_pools, changed.cancel_timeout_ms) == ("HIGH", ("a", "b"), 500)


@pytest.mark.parametrize("change", ["agressiveness=HIGH", "aggressiveness=HIGHER", "cancel_timeout=-1", "x=[", "a=1=2"])
def test_a_wrong_field_of_the_policy_is_bad_input(run: Run, api: FakeApi, change: str) -> None:
    api.on(methods.GET_POLICY, GetPolicyResponse(policy=policy_to_proto(PreemptionPolicy())))
    assert run("policy", "set", change, "min_runtime=0").exit_code == 2
    assert api.seen(SetPolicyRequest) == []


def test_without_a_controller_it_says_how_to_start_one() -> None:
    shown = CliRunner().invoke(app, ["status"])
    assert shown.exit_code == 4
    assert "callboard up" in shown.stderr


def test_a_dead_address_is_named() -> None:
    """MU-07."""
    shown = CliRunner().invoke(app, ["status", "--controller", "127.0.0.1:1"])
    assert shown.exit_code == 4
    assert "127.0.0.1:1" in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("pool", "create", "p", "--memory", "2048"),
        ("up", "--memory-per-node", "2048"),
        ("demo", "rlhf", "--memory-per-node", "2048"),
        ("agent", "--memory", "2048"),
        ("autoscale", "--node", "cpu=4,memory=2048"),
    ],
    ids=" ".join,
)
def test_ft_i2_no_option_takes_memory_without_a_unit_for_bytes(
    run: Run, api: FakeApi, arguments: tuple[str, ...]
) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "2048MiB" in refused.stderr
    assert not api.seen(CreatePoolRequest)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_ft_h1_what_job_get_prints_can_be_submitted(run: Run, api: FakeApi, tmp_path: Path, form: str) -> None:
    spec = job_spec(
        yaml.safe_load(JOB)
        | {
            "placement": "SPREAD",
            "on_preempt": "cancel",
            "restart": {"max_restarts": 3},
            "labels": {"team": "a"},
            "ttl_after_finished": "1h",
        }
    )
    api.on(methods.SUBMIT_JOB, SubmitJobResponse(job=objects.job()))
    api.on(methods.GET_JOB, GetJobResponse(job=objects.job(spec=job_spec_to_proto(spec, mask=True))))
    file = tmp_path / "printed"
    file.write_text(run("job", "get", "train-00", "-o", form).stdout)
    submitted = run("job", "submit", str(file))
    assert submitted.exit_code == 0, submitted.output
    assert api.seen(SubmitJobRequest)[-1].spec == job_spec_to_proto(spec)
    planned = run("plan", str(file), "--nodes", "(1gpu,4cpu,8gib)")
    assert planned.exit_code == 0, planned.output


def test_ft_h1_a_printed_job_with_hidden_values_says_which(run: Run, api: FakeApi, tmp_path: Path) -> None:
    spec = job_spec(yaml.safe_load(JOB.replace("    resources", "    env: {HF_TOKEN: hunter2, A: b}\n    resources")))
    api.on(methods.GET_JOB, GetJobResponse(job=objects.job(spec=job_spec_to_proto(spec, mask=True))))
    file = tmp_path / "printed"
    file.write_text(run("job", "get", "train-00", "-o", "yaml").stdout)
    refused = run("job", "submit", str(file))
    assert refused.exit_code == 2
    assert "env.HF_TOKEN: is hidden where jobs are printed" in refused.stderr
    assert not api.seen(SubmitJobRequest)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_ft_h1_what_pool_get_prints_makes_and_changes_a_pool(run: Run, api: FakeApi, tmp_path: Path, form: str) -> None:
    spec = pool_spec(
        {
            "name": "rlhf",
            "nominal": {"cpu": 6, "memory": "8GiB", "gpu": 0},
            "borrow_limit": {"cpu": 2},
            "cohort": "all",
            "pg_pool": {"reserved": [{"cpu": 2, "gpu": 1}], "max_dynamic": 4},
            "preemption": {"preemption_delay": "1m", "aggressiveness": "high"},
        }
    )
    message = pool_spec_to_proto(spec)
    api.on(methods.GET_POOL, GetPoolResponse(pool=Pool(name="pools/rlhf", spec=message, etag="e1", revision=7)))
    api.on(methods.CREATE_POOL, CreatePoolResponse(pool=Pool(name="pools/rlhf")))
    api.on(methods.UPDATE_POOL, UpdatePoolResponse(pool=Pool(name="pools/rlhf")))
    file = tmp_path / "printed.yaml"
    file.write_text(run("pool", "get", "rlhf", "-o", form).stdout)
    made, renamed = run("pool", "create", "--file", str(file)), run("pool", "create", "other", "--file", str(file))
    changed = run("pool", "set", "rlhf", str(file))
    assert [done.exit_code for done in (made, renamed, changed)] == [0, 0, 0], made.output + renamed.output
    first, second = api.seen(CreatePoolRequest)
    assert (first.pool_id, second.pool_id) == ("rlhf", "other")
    (third,) = api.seen(UpdatePoolRequest)
    assert first.spec == second.spec == third.spec == message
