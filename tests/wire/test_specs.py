"""How do specs become messages and come back? And what do messages get refused for, by which path?"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from callboard.model import requests
from callboard.model.describe import MASK, job_to_mapping
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import job_spec
from callboard.model.policy import PolicyOverrides, PreemptionPolicy
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec, StopPolicy
from callboard.v1 import common_pb2, job_pb2, policy_pb2, pool_pb2
from callboard.wire.amounts import labels_from_proto, resources_from_proto, resources_to_proto
from callboard.wire.enums import from_wire, to_wire
from callboard.wire.schema import written
from callboard.wire.specs import (
    job_spec_from_proto,
    job_spec_to_proto,
    overrides_from_proto,
    policy_from_proto,
    policy_to_proto,
    pool_spec_from_proto,
    pool_spec_to_proto,
)
from tests.support import specs


def job_message(**changes: Any) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(**{"name": "j", "pool": "p", "components": [component_message()], **changes})


def component_message(**changes: Any) -> job_pb2.ComponentSpec:
    return job_pb2.ComponentSpec(**{"name": "c", "actor": "a:B", **changes})


def faults_of(read: Any, *arguments: Any) -> list[Fault]:
    with pytest.raises(InvalidInput) as caught:
        read(*arguments)
    return list(caught.value.faults)


class TestRoundTrips:
    @given(specs.jobs())
    @settings(max_examples=100, deadline=None)
    def test_a_job(self, spec: JobSpec) -> None:
        sent = job_spec_to_proto(spec).SerializeToString()
        assert job_spec_from_proto(job_pb2.JobSpec.FromString(sent)) == spec

    @given(specs.pools)
    @settings(max_examples=100, deadline=None)
    def test_a_pool(self, spec: PoolSpec) -> None:
        sent = pool_spec_to_proto(spec).SerializeToString()
        assert pool_spec_from_proto(spec.name, pool_pb2.PoolSpec.FromString(sent)) == spec

    @given(specs.policies)
    @settings(max_examples=100, deadline=None)
    def test_a_policy(self, policy: PreemptionPolicy) -> None:
        message = policy_to_proto(policy)
        assert policy_from_proto(message) == policy
        assert all(message.HasField(field) for field in ("label_rules", "protected_pools", "kill_timeout_ms"))

    @given(specs.overrides)
    @settings(max_examples=100, deadline=None)
    def test_overrides(self, stated: PolicyOverrides) -> None:
        assert overrides_from_proto(written(stated, policy_pb2.PreemptionPolicy)) == stated

    @given(specs.resources, specs.labels)
    def test_amounts_and_labels(self, amounts: Resources, labels: Any) -> None:
        assert resources_from_proto(resources_to_proto(amounts)) == amounts
        assert labels_from_proto(dict(labels)) == labels

    def test_negative_amounts_of_the_controller_survive(self) -> None:
        over = Resources.of(cpu_milli=-1000, custom={"x": -1})
        assert resources_from_proto(resources_to_proto(over)) == over

    def test_json_of_other_languages_stays_as_it_was_written(self) -> None:
        text = '{ "lr" : 1.0e-5, "steps" : 4 }'
        read = job_spec_from_proto(job_message(components=[component_message(kwargs_json=text)]))
        assert read.components[0].kwargs_json == text

    def test_what_is_absent_takes_the_default_and_zero_is_said(self) -> None:
        plain = job_spec_from_proto(job_message())
        assert plain == JobSpec(name="j", pool="p", components=(ComponentSpec(name="c", actor="a:B"),))
        said = job_spec_from_proto(job_message(priority_milli=0, grace_ms=0, gang=False, wait_for_nodes_ms=0))
        assert (said.priority_milli, said.grace_ms, said.gang, said.wait_for_nodes_ms) == (0, 0, False, 0)
        assert pool_spec_from_proto("p", pool_pb2.PoolSpec()) == PoolSpec(name="p")
        assert policy_from_proto(policy_pb2.PreemptionPolicy()) == PreemptionPolicy()

    def test_secrets_are_masked_where_asked(self) -> None:
        spec = JobSpec(name="j", pool="p", components=(ComponentSpec(name="c", actor="a:B", env=(("K_TOKEN", "s3"),)),))
        assert job_spec_to_proto(spec, mask=True).components[0].env["K_TOKEN"] == MASK
        assert job_spec_to_proto(spec).components[0].env["K_TOKEN"] == "s3"


class TestEnums:
    @pytest.mark.parametrize("policy", StopPolicy)
    def test_names_are_equal_but_for_the_prefix(self, policy: StopPolicy) -> None:
        number = to_wire(pool_pb2.StopPolicy, policy)
        assert pool_pb2.StopPolicy.Name(number) == f"STOP_POLICY_{policy}"
        assert from_wire(pool_pb2.StopPolicy, number, StopPolicy) is policy

    def test_zero_is_not_said_and_unknown_numbers_are_refused(self) -> None:
        assert from_wire(pool_pb2.StopPolicy, 0, StopPolicy) is None
        with pytest.raises(ValueError, match="99"):
            from_wire(pool_pb2.StopPolicy, 99, StopPolicy)
        with pytest.raises(ValueError, match="NOWHERE"):
            to_wire(job_pb2.JobState, "NOWHERE")


RES = common_pb2.Resources
REFUSED_JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "../../x"}, "spec.name", "names match"),
    ({"name": ""}, "spec.name", "names match"),
    ({"pool": "a/b"}, "spec.pool", "names match"),
    ({"priority_milli": 1_000_001}, "spec.priority_milli", "1000.001 is out of bounds"),
    ({"session_lease_ms": -1}, "spec.session_lease_ms", "out of bounds"),
    ({"min_runtime_ms": -5}, "spec.min_runtime_ms", "-5ms is out of bounds"),
    ({"grace_ms": 1 << 62}, "spec.grace_ms", "out of bounds"),
    ({"wait_for_nodes_ms": -1}, "spec.wait_for_nodes_ms", "out of bounds"),
    ({"start_timeout_ms": 0}, "spec.start_timeout_ms", "out of bounds"),
    ({"ttl_after_finished_ms": -1}, "spec.ttl_after_finished_ms", "out of bounds"),
    ({"starvation_after_ms": -1}, "spec.starvation_after_ms", "out of bounds"),
    ({"estimated_duration_ms": -1}, "spec.estimated_duration_ms", "out of bounds"),
    ({"labels": {"priority": "a b"}}, "spec.labels.priority", "labels match"),
    ({"node_selector": {"a b": "x"}}, 'spec.node_selector["a b"]', "labels match"),
    ({"placement": 99}, "spec.placement", "99 is unknown"),
    ({"fencing": 99}, "spec.fencing", "99 is unknown"),
    ({"on_preempt": 99}, "spec.on_preempt", "99 is unknown"),
    ({"components": []}, "spec.components", "at least one"),
    ({"components": [component_message()] * 100}, "spec.components", "too many; 64"),
    ({"restart": job_pb2.RestartPolicy(max_restarts=-1)}, "spec.restart.max_restarts", "0 to 10000"),
    ({"restart": job_pb2.RestartPolicy(backoff_base_ms=0)}, "spec.restart.backoff_base_ms", "out of bounds"),
    ({"restart": job_pb2.RestartPolicy(window_ms=-1)}, "spec.restart.window_ms", "out of bounds"),
]
REFUSED_COMPONENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "%s"}, "name", "names match"),
    ({"actor": "x"}, "actor", "import path"),
    ({"workers": 0}, "workers", "1 to 100000"),
    ({"workers": -1}, "workers", "1 to 100000"),
    ({"workers": 1, "max_workers": 2}, "workers", "either"),
    ({"resources": RES(gpu_milli=1500)}, "resources.gpu_milli", "only whole ones"),
    ({"resources": RES(cpu_milli=-1)}, "resources.cpu_milli", "negative"),
    ({"resources": RES(memory_bytes=-1)}, "resources.memory_bytes", "negative"),
    ({"resources": RES(custom_milli={"x": -1})}, "resources.custom_milli.x", "negative"),
    ({"resources": RES(custom_milli={"a b": 1})}, 'resources.custom_milli["a b"]', "not a resource"),
    ({"resources": RES(custom_milli={"gpu": 1})}, "resources.custom_milli.gpu", "no custom resource"),
    ({"resources": RES(cpu_milli=1 << 62)}, "resources.cpu_milli", "larger than"),
    ({"resources": RES(gpu_model="\n")}, "resources.gpu_model", "not the model of a GPU"),
    ({"resources": RES(gpu_memory_min_bytes=-1)}, "resources.gpu_memory_min_bytes", "negative"),
    ({"resources": RES(custom_milli={"gpu_model": 1})}, "resources.custom_milli.gpu_model", "no custom resource"),
    ({"args_json": "{}"}, "args_json", "not a list"),
    ({"args_json": "[NaN]"}, "args_json[0]", "not a finite number"),
    ({"args_json": "[1e999]"}, "args_json[0]", "not a finite number"),
    ({"args_json": "[" * 100_000}, "args_json", "nested deeper"),
    ({"args_json": "[" * 80 + "]" * 80}, "args_json[0][0][0][0][0][0][0][0]", "nested deeper"),
    ({"args_json": "[" + "1" * 5000 + "]"}, "args_json", "digits"),
    ({"args_json": "nope"}, "args_json", "no JSON"),
    ({"kwargs_json": "[]"}, "kwargs_json", "not a mapping"),
    ({"kwargs_json": '{"a": 1, "a": 2}'}, "kwargs_json", "occurs twice"),
    ({"kwargs_json": '{"a": "' + "x" * (1 << 20) + '"}'}, "kwargs_json", "too many"),
    ({"kwargs_json": '{"a": "\\ud800"}'}, "kwargs_json.a", "surrogate"),
    ({"max_concurrency": 0}, "max_concurrency", "1 to 10000"),
    ({"env": {"RANK": "1"}}, "env.RANK", "the scheduler sets"),
    ({"env": {"LD_PRELOAD": "x"}}, "env.LD_PRELOAD", "foreign code"),
    ({"pass_env": ["CUDA_VISIBLE_DEVICES"]}, "pass_env[0]", "the scheduler sets"),
    ({"ray_options": {"num_gpus": "1"}}, "ray_options.num_gpus", "is refused"),
    ({"ray_options": {"name": "a/b"}}, "ray_options.name", "names match"),
    ({"interpreter": "sh"}, "interpreter", "absolute path"),
]
PG = pool_pb2.PlacementGroupPool
POLICY = policy_pb2.PreemptionPolicy
RULES = policy_pb2.LabelRuleSet(
    keys={"role": policy_pb2.LabelRules(winners={"a": policy_pb2.Losers(values=["b", "a b"])})}
)
REFUSED_POOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"nominal": RES(cpu_milli=-1), "limited": ["cpu"]}, "spec.nominal.cpu_milli", "negative"),
    ({"nominal": RES(cpu_milli=1)}, "spec.nominal.cpu_milli", "limited does not name cpu"),
    ({"lend_limit": RES(custom_milli={"x": 1})}, "spec.lend_limit.custom_milli.x", "lend_limited does not name x"),
    ({"limited": ["a b"]}, 'spec.nominal.custom_milli["a b"]', "not a resource"),
    ({"cohort": "a/b"}, "spec.cohort", "names match"),
    ({"stop_policy": 9}, "spec.stop_policy", "9 is unknown"),
    ({"pg_pool": PG(reserved=[RES(cpu_milli=1), RES()])}, "spec.pg_pool.reserved[1]", "shape is empty"),
    ({"pg_pool": PG(reserved=[RES(gpu_milli=1001)])}, "spec.pg_pool.reserved[0].gpu_milli", "only whole ones"),
    ({"pg_pool": PG(max_dynamic=-1)}, "spec.pg_pool.max_dynamic", "0 to 10000"),
    ({"pg_pool": PG(reuse_slack_milli=1)}, "spec.pg_pool.reuse_slack_milli", "out of bounds"),
    ({"pg_pool": PG(idle_ttl_ms=-1)}, "spec.pg_pool.idle_ttl_ms", "out of bounds"),
    ({"pg_pool": PG(retry_attempts=0)}, "spec.pg_pool.retry_attempts", "1 to 1000"),
    ({"pg_pool": PG(retry_base_ms=0)}, "spec.pg_pool.retry_base_ms", "out of bounds"),
    ({"pg_pool": PG(reserved_min_priority_milli=1 << 40)}, "spec.pg_pool.reserved_min_priority_milli", "out of bounds"),
    ({"preemption": POLICY(cancel_timeout_ms=-1)}, "spec.preemption.cancel_timeout_ms", "out of bounds"),
    ({"preemption": POLICY(aggressiveness=9)}, "spec.preemption.aggressiveness", "9 is unknown"),  # type: ignore[arg-type]
    (
        {"preemption": POLICY(label_rules=RULES)},
        "spec.preemption.label_rules.keys.role.winners.a.values[1]",
        "labels match",
    ),
]


class TestWhatIsRefused:
    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_JOBS)
    def test_of_jobs(self, changes: dict[str, Any], field: str, reason: str) -> None:
        (fault,) = faults_of(job_spec_from_proto, job_message(**changes))
        assert fault.field == field
        assert reason in fault.message

    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_COMPONENTS)
    def test_of_components(self, changes: dict[str, Any], field: str, reason: str) -> None:
        message = job_message(components=[component_message(**changes)])
        (fault,) = faults_of(job_spec_from_proto, message)
        assert fault.field == f"spec.components[0].{field}"
        assert reason in fault.message

    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_POOLS)
    def test_of_pools(self, changes: dict[str, Any], field: str, reason: str) -> None:
        (fault,) = faults_of(pool_spec_from_proto, "p", pool_pb2.PoolSpec(**changes))
        assert fault.field == field
        assert reason in fault.message

    @pytest.mark.parametrize("name", ["../../x", "a/b", "a\n", "x" * 300, "🎭", "%s", "", "__proto__"])
    def test_names_of_pools_by_the_requests_own_field(self, name: str) -> None:
        (fault,) = faults_of(pool_spec_from_proto, name, pool_pb2.PoolSpec())
        assert fault.field == "pool_id"

    def test_of_policies(self) -> None:
        message = POLICY(cross_pool_threshold_milli=-1, protected_pools=policy_pb2.PoolNames(names=["ok", "a/b"]))
        assert [fault.field for fault in faults_of(policy_from_proto, message)] == [
            "policy.cross_pool_threshold_milli",
            "policy.protected_pools.names[1]",
        ]

    def test_faults_of_the_message_and_of_the_models_together(self) -> None:
        message = job_message(name="%s", fencing=99, components=[component_message(ray_options={"x": "y"}, workers=0)])
        assert {fault.field for fault in faults_of(job_spec_from_proto, message)} == {
            "spec.fencing",
            "spec.components[0].ray_options.x",
            "spec.name",
            "spec.components[0].workers",
        }


class TestCommands:
    """A component runs an actor, a command or a script, and says so once."""

    @staticmethod
    def component(**keys: object) -> ComponentSpec:
        return job_spec({"name": "j", "pool": "p", "components": [{"name": "c", **keys}]}).components[0]

    def test_a_command_is_the_same_from_a_file_python_and_a_message(self) -> None:
        written = ["python", "-m", "pkg", "--lr", "1e-5"]
        spec = self.component(command=written)
        assert spec.command == tuple(written)
        assert (spec.actor, spec.entry, spec.stop_signal) == ("callboard:Program", "run", "SIGTERM")
        job = job_spec(requests.JobSpec(name="j", pool="p", components=[requests.ComponentSpec("c", command=written)]))
        assert job.components == (spec,)
        message = job_spec_to_proto(job)
        assert (list(message.components[0].command), message.components[0].actor) == (written, "")
        assert job_spec_from_proto(message) == job
        assert job_to_mapping(job)["components"] == [{"name": "c", "command": written, "workers": 1}]

    @pytest.mark.parametrize("size", [{"workers": 1}, {"min_workers": 1, "max_workers": 2}], ids=["fixed", "elastic"])
    def test_a_ray_cluster_of_its_own_comes_through(self, size: dict[str, int]) -> None:
        component = {"name": "c", "command": ["x"], "ray": True, **size}
        job = job_spec({"name": "j", "pool": "p", "components": [component]})
        assert (job.components[0].ray, job.components[0].stop_signal) == (True, "")
        assert job.components[0].kwargs_json == ('{"elastic":true}' if len(size) > 1 else "{}")
        assert job_spec_from_proto(job_spec_to_proto(job)) == job
        assert job_to_mapping(job)["components"] == [component]

    def test_a_script_is_run_by_a_shell_that_stops_at_the_first_error(self) -> None:
        assert self.component(script="cd x\n./train").command == ("/bin/sh", "-ec", "cd x\n./train")
        assert self.component(script="#!/usr/bin/env bash\n./train", stop_signal="SIGINT").stop_signal == "SIGINT"

    REFUSED: tuple[tuple[dict[str, object], str, str], ...] = (
        ({}, "actor", "is required; or state command or script"),
        ({"actor": "a:B", "command": ["x"]}, "command", "is stated beside actor; state one of them"),
        ({"actor": "a:B", "ray": True}, "ray", "is for a command or script"),
        ({"command": ["x"], "ray": True, "stop_signal": "SIGINT"}, "stop_signal", "is SIGTERM"),
        ({"command": ["x"], "script": "y"}, "script", "is stated beside command"),
        ({"actor": "callboard:Program"}, "actor", "runs a command; state command"),
        ({"command": []}, "command", "names no program"),
        ({"command": "python train.py"}, "command", "list"),
        ({"command": ["sleep", 3]}, "command[1]", "put it in quotes"),
        ({"command": ["x", "y" * 131_072]}, "command[1]", "131072 bytes are too many for one argument"),
        ({"command": ["x" * 100_000] * 3}, "command", "is 300000 characters long"),
        ({"script": "#!/usr/bin/env python3\nprint()"}, "script", "is run by a shell"),
        ({"script": " "}, "script", "an empty script does nothing"),
        ({"command": ["x"], "kwargs": {"lr": 1}}, "kwargs", "is for actors"),
        ({"script": "x", "colocation_group": "g"}, "colocation_group", "is for actors"),
    )

    @pytest.mark.parametrize(("keys", "field", "why"), REFUSED)
    def test_what_makes_no_sense_is_refused_where_it_stands(
        self, keys: dict[str, object], field: str, why: str
    ) -> None:
        with pytest.raises(InvalidInput) as caught:
            self.component(**keys)
        fault = caught.value.faults[0]
        assert fault.field == f"components[0].{field}"
        assert why in fault.message
