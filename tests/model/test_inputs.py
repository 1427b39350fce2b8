"""What did the user mean, and what is refused? Every bad value with its field and the reason."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs import job_spec, pool_spec, preemption_policy
from callboard.model.inputs.located import Misfits
from callboard.model.inputs.reading import Input, check, keys_of, table_of
from callboard.model.inputs.role_file import role_file
from callboard.model.names import NAME_PATTERN
from callboard.model.policy import Aggressiveness, PolicyOverrides
from callboard.model.quantities import Resources
from callboard.model.specs import NO_PG_POOL, Fencing, PgPoolSpec, RestartPolicy, StopPolicy, Strategy
from tests.support.specs import policy_overrides

GIB = 1 << 30
BAD_NAMES = ["../../x", "a/b", "a\n", "x" * 300, "🎭", "%s", "", "__proto__", " a", "1a", "a b", "a\x00"]

JOB: dict[str, Any] = {"name": "j", "pool": "p", "components": [{"name": "c", "actor": "pkg.mod:Class"}]}
POOL: dict[str, Any] = {"name": "p"}


def job(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(JOB) | changes


def component(**changes: Any) -> dict[str, Any]:
    return job(components=[JOB["components"][0] | changes])


def faults_of(read: Any, mapping: Any) -> list[Fault]:
    with pytest.raises(InvalidInput) as caught:
        read(mapping)
    return list(caught.value.faults)


def only_fault(read: Any, mapping: Any) -> Fault:
    faults = faults_of(read, mapping)
    assert len(faults) == 1, faults
    return faults[0]


class TestHumanForms:
    @pytest.mark.parametrize("text", [1.5, "1.5", "1500m", " 1.5 "], ids=repr)
    def test_cpu(self, text: Any) -> None:
        assert job_spec(component(resources={"cpu": text})).components[0].resources.cpu_milli == 1500

    @pytest.mark.parametrize("text", ["2GiB", "2048MiB", 2 * GIB, "2Gi", "2 gib"])
    def test_memory(self, text: Any) -> None:
        assert job_spec(component(resources={"memory": text})).components[0].resources.memory_bytes == 2 * GIB

    @pytest.mark.parametrize(
        ("read", "field"),
        [
            (lambda memory: job_spec(component(resources={"memory": memory})), "components[0].resources.memory"),
            (lambda memory: job_spec(component(ray_options={"memory": memory})), "components[0].ray_options.memory"),
            (lambda memory: pool_spec(POOL | {"nominal": {"memory": memory}}), "nominal.memory"),
            (
                lambda memory: pool_spec(POOL | {"pg_pool": {"reserved": [{"cpu": 1, "memory": memory}]}}),
                "pg_pool.reserved[0].memory",
            ),
            (lambda memory: role_file({"roles": {"r": {"memory": memory}}}), "roles.r.memory"),
        ],
    )
    @pytest.mark.parametrize(
        ("memory", "meant"),
        [(2048, "2048MiB"), ("2048", "2048MiB"), (16, "16GiB"), (1.0, "1.0GiB"), (2**20 - 1, "MiB")],
        ids=repr,
    )
    def test_ft_i2_memory_that_forgot_its_unit_is_refused(self, read: Any, field: str, memory: Any, meant: str) -> None:
        fault = only_fault(read, memory)
        assert fault.field == field
        assert "without a unit means bytes" in fault.message
        assert meant in fault.message
        for written in ("2048B", "2KiB", "1MiB", 2**20, str(2**20)):
            read(written)

    @pytest.mark.parametrize(
        ("text", "ms"),
        [
            ("30s", 30_000),
            ("500ms", 500),
            ("5m", 300_000),
            ("1h", 3_600_000),
            (0.5, 500),
            (7, 7_000),
            ("1h30m", 5_400_000),
        ],
    )
    def test_durations(self, text: Any, ms: int) -> None:
        assert job_spec(job(grace=text)).grace_ms == ms

    def test_custom_resources_keep_their_names(self) -> None:
        asked = job_spec(component(resources={"worker_unit": 1, "cpu": 0.1, "idle": 0})).components[0].resources
        assert asked == Resources.of(cpu_milli=100, custom={"worker_unit": 1000})

    def test_which_gpus_is_no_amount(self) -> None:
        stated = {"gpu": 1, "gpu_model": " A100 80GB ", "gpu_memory_min": "80GiB"}
        asked = job_spec(component(resources=stated)).components[0].resources
        assert asked == Resources(gpu_milli=1000, gpu_model="A100 80GB", gpu_memory_min_bytes=80 << 30)
        assert asked.items() == [("gpu", 1000)]
        assert asked + asked == Resources(gpu_milli=2000)
        assert not asked - Resources(gpu_milli=1000)
        reserved = pool_spec(POOL | {"pg_pool": {"reserved": [stated]}}).pg_pool.reserved
        assert reserved == (asked,)

    def test_priorities_have_decimals_and_a_sign(self) -> None:
        assert job_spec(job(priority=8.5)).priority_milli == 8500
        assert job_spec(job(priority=-3)).priority_milli == -3000
        assert job_spec(JOB).priority_milli == 5000

    @pytest.mark.parametrize("word", ["low", "Low", "LOW"])
    def test_words_in_any_case(self, word: str) -> None:
        assert preemption_policy({"aggressiveness": word}).aggressiveness is Aggressiveness.LOW

    def test_words_with_dashes(self) -> None:
        assert pool_spec(POOL | {"stop_policy": "hold-and-drain"}).stop_policy is StopPolicy.HOLD_AND_DRAIN
        assert job_spec(job(placement="strict_pack")).placement is Strategy.STRICT_PACK
        assert job_spec(job(fencing="strict")).fencing is Fencing.STRICT

    def test_owner(self) -> None:
        assert job_spec(job(owner="detached")).session_lease_ms == 0
        assert job_spec(job(owner={"session": {"lease": "30s"}})).session_lease_ms == 30_000

    def test_wait_for_nodes(self) -> None:
        assert job_spec(JOB).wait_for_nodes_ms is None
        assert job_spec(job(wait_for_nodes="5m")).wait_for_nodes_ms == 300_000
        assert job_spec(job(wait_for_nodes={"timeout": "5m"})).wait_for_nodes_ms == 300_000

    def test_restart(self) -> None:
        assert job_spec(job(restart={"max_restarts": 3, "window": "1h"})).restart == RestartPolicy(
            max_restarts=3, window_ms=3_600_000
        )

    def test_workers_or_bounds(self) -> None:
        assert not job_spec(component(workers=4)).components[0].elastic
        elastic = job_spec(component(min_workers=2, max_workers=8)).components[0]
        assert (elastic.min_workers, elastic.max_workers) == (2, 8)
        assert job_spec(JOB).components[0].max_workers == 1

    def test_arguments_become_json_that_keeps_its_types(self) -> None:
        read = job_spec(component(args=[4, 4.0, "x", None], kwargs={"lr": 0.1, "b": [True]})).components[0]
        assert read.args_json == '[4,4.0,"x",null]'
        assert read.kwargs_json == '{"lr":0.1,"b":[true]}'

    def test_ray_options_fill_in_what_is_not_stated(self) -> None:
        options = {"name": "trainer", "memory": "2GiB", "max_concurrency": 7}
        read = job_spec(component(ray_options=options, resources={"cpu": 1})).components[0]
        assert (read.alias, read.max_concurrency) == ("trainer", 7)
        assert read.resources == Resources(cpu_milli=1000, memory_bytes=2 * GIB)

    def test_null_is_not_stated(self) -> None:
        assert job_spec(job(grace=None, labels=None, priority=None)) == job_spec(JOB)

    def test_label_rules(self) -> None:
        rules = {"role": {"train": ["rollout", "reward", "reward"], "idle": []}}
        assert preemption_policy({"label_rules": rules}).label_rules == (("role", (("train", ("reward", "rollout")),)),)

    def test_unlimited_is_a_word(self) -> None:
        assert preemption_policy({"max_victims_per_round": "unlimited"}).max_victims_per_round == 0

    def test_overrides_tell_no_rules_from_not_said(self) -> None:
        assert policy_overrides({}) == PolicyOverrides()
        assert policy_overrides({"label_rules": {}, "protected_pools": []}) == PolicyOverrides(
            label_rules=(), protected_pools=()
        )

    def test_the_pool_of_the_acts(self) -> None:
        shape = {"cpu": 2, "memory": "2GiB", "gpu": 1}
        read = pool_spec(
            {
                "name": "rlhf",
                "nominal": {"cpu": 6, "memory": "8GiB", "gpu": 6},
                "pg_pool": {"enable": True, "reserved": [shape, shape], "max_dynamic": 2, "retries": {"attempts": 3}},
            }
        )
        assert read.nominal == (("cpu", 6000), ("gpu", 6000), ("memory", 8 * GIB))
        bundle = Resources(cpu_milli=2000, gpu_milli=1000, memory_bytes=2 * GIB)
        assert read.pg_pool == PgPoolSpec(reserved=(bundle, bundle), max_dynamic=2, retry_attempts=3)

    def test_a_pool_without_pg_pool_keeps_none(self) -> None:
        assert pool_spec(POOL).pg_pool == NO_PG_POOL
        assert pool_spec(POOL | {"pg_pool": {}}).pg_pool == PgPoolSpec()
        assert not pool_spec(POOL | {"pg_pool": {"enable": False}}).pg_pool.reuse

    def test_a_quota_of_zero_is_a_limit_and_an_ask_of_zero_is_none(self) -> None:
        assert pool_spec(POOL | {"nominal": {"gpu": 0}}).nominal == (("gpu", 0),)
        assert not job_spec(component(resources={"gpu": 0})).components[0].resources

    def test_a_quota_may_be_a_part_of_a_device(self) -> None:
        assert pool_spec(POOL | {"nominal": {"gpu": 1.5}}).nominal == (("gpu", 1500),)


class TestNames:
    """SE-05: refused by a documented pattern at every entry."""

    @pytest.mark.parametrize("bad", BAD_NAMES, ids=ascii)
    def test_of_jobs_pools_components_and_more(self, bad: str) -> None:
        places = {
            "name": (job_spec, job(name=bad)),
            "pool": (job_spec, job(pool=bad)),
            "components[0].name": (job_spec, component(name=bad)),
            "components[0].role": (job_spec, component(role=bad)),
            "components[0].pool": (job_spec, component(pool=bad)),
            "components[0].colocation_group": (job_spec, component(colocation_group=bad)),
            "components[0].ray_options.name": (job_spec, component(ray_options={"name": bad})),
            "cohort": (pool_spec, POOL | {"cohort": bad}),
            "protected_pools[0]": (preemption_policy, {"protected_pools": [bad]}),
        }
        for field, (read, mapping) in places.items():
            fault = only_fault(read, mapping)
            assert fault.field == field
            assert NAME_PATTERN in fault.message or "no variable or message can carry" in fault.message
            assert len(fault.message) < 250
            assert fault.message.isprintable()

    @pytest.mark.parametrize("bad", ["../x", "a/b/", "", "é", "__proto__", "x" * 64, "a\n"])
    def test_of_labels(self, bad: str) -> None:
        for mapping in (job(labels={bad: "v"}), job(labels={"k": bad}), job(node_selector={"k": bad})):
            fault = only_fault(job_spec, mapping)
            assert "labels match" in fault.message


REFUSED_OF_COMPONENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"actor": "os.system"}, "actor", "write pkg.module:Class"),
    ({"actor": "a b:C"}, "actor", "import path"),
    ({"actor": "a:C" + "x" * 600}, "actor", "import path"),
    ({"actor": 3}, "actor", "3 is not a text"),
    ({"entry": "__init__"}, "entry", "public method"),
    ({"entry": "run()"}, "entry", "public method"),
    ({"workers": 0}, "workers", "1 to 100000"),
    ({"workers": 100_001}, "workers", "1 to 100000"),
    ({"workers": True}, "workers", "true (true or false) is not a whole number"),
    ({"workers": 1.0}, "workers", "not a whole number"),
    ({"workers": "4"}, "workers", "'4' is not a whole number"),
    ({"workers": 10**400}, "workers", "many digits"),
    ({"workers": 2, "min_workers": 1}, "workers", "either"),
    ({"min_workers": 1}, "max_workers", "together"),
    ({"min_workers": 3, "max_workers": 2}, "min_workers", "3 is more than max_workers, 2"),
    ({"resources": {"gpu": 1.5}}, "resources.gpu", "only whole ones, e.g. 1"),
    ({"resources": {"gpu": -1}}, "resources.gpu", "-1 is negative"),
    ({"resources": {"gpu": True}}, "resources.gpu", "true (true or false)"),
    ({"resources": {"cpu": float("nan")}}, "resources.cpu", "not a finite number"),
    ({"resources": {"cpu": float("inf")}}, "resources.cpu", "not a finite number"),
    ({"resources": {"cpu": "NaN"}}, "resources.cpu", "not a quantity"),
    ({"resources": {"cpu": 0.0001}}, "resources.cpu", "finer than a thousandth"),
    ({"resources": {"cpu": 1e30}}, "resources.cpu", "larger than"),
    ({"resources": {"cpu": 10**400}}, "resources.cpu", "out of bounds"),
    ({"resources": {"cpu": [1]}}, "resources.cpu", "a list is not an amount"),
    ({"resources": {"memory": "2 elephants"}}, "resources.memory", "not an amount of memory"),
    ({"resources": {"memory": "2QiB"}}, "resources.memory", "unknown unit"),
    ({"resources": {"memory": -1}}, "resources.memory", "negative"),
    ({"resources": {"memory": False}}, "resources.memory", "false (true or false)"),
    ({"resources": {"GPU": 1}}, "resources.GPU", "did you mean gpu?"),
    ({"resources": {"gpu": 1, "gpu_model": 3}}, "resources.gpu_model", "3 is not a text"),
    ({"resources": {"gpu": 1, "gpu_model": ""}}, "resources.gpu_model", "not the model of a GPU"),
    ({"resources": {"gpu": 1, "gpu_model": "x" * 101}}, "resources.gpu_model", "not the model of a GPU"),
    ({"resources": {"gpu": 1, "gpu_model": "a\nb"}}, "resources.gpu_model", "not the model of a GPU"),
    ({"resources": {"gpu": 1, "gpu_memory_min": "lots"}}, "resources.gpu_memory_min", "not an amount of memory"),
    ({"resources": {"gpu": 1, "gpu_memory_min": -1}}, "resources.gpu_memory_min", "negative"),
    ({"resources": {"GPU_model": "H200"}}, "resources.GPU_model", "did you mean gpu_model?"),
    ({"resources": {"a b": 1}}, 'resources["a b"]', "not a resource"),
    ({"resources": {"__proto__": 1}}, "resources.__proto__", "not a resource"),
    ({"resources": [1]}, "resources", "not a mapping"),
    ({"max_concurrency": 0}, "max_concurrency", "1 to 10000"),
    ({"in_bundle": "yes"}, "in_bundle", "neither true nor false"),
    ({"in_bundle": 1}, "in_bundle", "neither true nor false"),
    ({"interpreter": "python3"}, "interpreter", "absolute path"),
    ({"interpreter": "/opt/../bin/sh"}, "interpreter", "absolute path"),
    ({"args": {"a": 1}}, "args", "a mapping is not a list"),
    ({"args": "x"}, "args", "not a list"),
    ({"args": [float("nan")]}, "args[0]", "not a finite number"),
    ({"kwargs": {"a": [1, {"b": float("inf")}]}}, "kwargs.a[1].b", "not a finite number"),
    ({"kwargs": {"a": object()}}, "kwargs.a", "not a JSON value"),
    ({"kwargs": {"a": {1: 2}}}, "kwargs.a", "the key 1 is not a text"),
    ({"kwargs": {"a": "\ud800"}}, "kwargs.a", "surrogate"),
    ({"kwargs": {"a": "x" * (1 << 20)}}, "kwargs", "bytes of JSON are too many"),
    ({"kwargs": [1]}, "kwargs", "a list is not a mapping"),
    ({"pass_env": ["A-B"]}, "pass_env[0]", "not the name of a variable"),
    ({"pass_env": "A"}, "pass_env", "not a list"),
    ({"pass_env": ["NEXRL*"]}, "pass_env[0]", "such as NEXRL_*"),
    ({"pass_env": ["*"]}, "pass_env[0]", "pass on too much"),
    ({"pass_env": ["A-_*"]}, "pass_env[0]", "not the name of a variable"),
    ({"pass_env": ["RAY_*"]}, "pass_env[0]", "the scheduler sets"),
    ({"ray_options": {"num_gpus": 1}}, "ray_options.num_gpus", "the scheduler decides"),
    ({"ray_options": {"runtime_env": {}}}, "ray_options.runtime_env", "the scheduler decides"),
    ({"ray_options": {"memory": "x"}}, "ray_options.memory", "not an amount of memory"),
    ({"ray_options": {"memory": "1GiB"}, "resources": {"memory": "2GiB"}}, "ray_options.memory", "state one of them"),
    ({"ray_options": {"max_concurrency": 1}, "max_concurrency": 2}, "ray_options.max_concurrency", "state one of them"),
    ({"worker": 4}, "worker", "did you mean workers?"),
    ({"working_dir": "/tmp"}, "working_dir", "is not a package; a client packs and sends"),
    ({"py_modules": ["x"]}, "py_modules[0]", "is not a package; a client packs and sends"),
    ({"scaling": [{"signal": "q", "above": 1, "action": "up"}]}, "scaling", "needs min_workers and max_workers"),
    ({"colocation_total": {"cpu": 2}}, "colocation_total", "is for members of a colocation_group"),
    ({"env": {"A": "1"}, "secret_env": {"A": "2"}}, "secret_env.A", "state it in one of them"),
    ({"secret_env": {"RANK": "1"}}, "secret_env.RANK", "the scheduler sets this variable itself"),
    ({"secret_env": ["A"]}, "secret_env", "not a mapping"),
]

REFUSED_OF_JOBS: list[tuple[dict[str, Any], str, str]] = [
    ({"priority": 1001}, "priority", "-1000 to 1000"),
    ({"priority": -1000.001}, "priority", "-1000 to 1000"),
    ({"priority": True}, "priority", "true (true or false)"),
    ({"priority": "high"}, "priority", "not a quantity"),
    ({"priority": float("nan")}, "priority", "finite"),
    ({"components": []}, "components", "at least one component"),
    ({"components": {"a": 1}}, "components", "not a list"),
    ({"components": JOB["components"] * 65}, "components", "65 items are too many; 64"),
    ({"components": JOB["components"] * 2}, "components[1].name", "components[0] too"),
    ({"components": [3]}, "components[0]", "3 is not a component"),
    ({"placement": "near"}, "placement", "PACK or SPREAD or STRICT_PACK or STRICT_SPREAD"),
    ({"gang": "true"}, "gang", "neither true nor false"),
    ({"owner": "session"}, "owner", "use detached or"),
    ({"owner": {"session": {}}}, "owner.session.lease", "required"),
    ({"owner": {"session": {"lease": 0}}}, "owner.session.lease", "out of bounds"),
    ({"grace": "25h"}, "grace", "0s to 1d"),
    ({"grace": -1}, "grace", "negative"),
    ({"grace": "-1s"}, "grace", "not a duration"),
    ({"grace": "1 fortnight"}, "grace", "not a duration"),
    ({"grace": False}, "grace", "false (true or false)"),
    ({"grace": float("inf")}, "grace", "finite"),
    ({"grace": 0.0001}, "grace", "finer than a millisecond"),
    ({"start_timeout": 0}, "start_timeout", "1ms to 1d"),
    ({"wait_for_nodes": True}, "wait_for_nodes", "not a mapping"),
    ({"wait_for_nodes": "soon"}, "wait_for_nodes.timeout", "not a duration"),
    ({"on_preempt": "retry"}, "on_preempt", "REQUEUE or CANCEL"),
    ({"fencing": 3}, "fencing", "RELAXED or STRICT"),
    ({"restart": {"max_restarts": -1}}, "restart.max_restarts", "0 to 10000"),
    ({"restart": {"backoff_base": "2m"}}, "restart.backoff_base", "longer than backoff_max"),
    ({"restart": 3}, "restart", "not a mapping"),
    ({"labels": {"role": True}}, "labels.role", "not a text"),
    ({"labels": {1: "a"}}, "labels", "1 is not a text, but keys are"),
    ({"labels": {f"k{i}": "v" for i in range(65)}}, "labels", "65 entries are too many"),
    ({"request_id": "x"}, "request_id", "unknown key"),
]

REFUSED_OF_POOLS: list[tuple[dict[str, Any], str, str]] = [
    ({"nominal": {"cpu": -1}}, "nominal.cpu", "-1 is negative"),  # QL-04
    ({"nominal": {"memory": "-1GiB"}}, "nominal.memory", "not an amount"),
    ({"nominal": {"cpu": True}}, "nominal.cpu", "true (true or false)"),
    ({"nominal": {"cpu": float("nan")}}, "nominal.cpu", "finite"),
    ({"nominal": 6}, "nominal", "6 is not a mapping"),
    ({"nominal": {"gpu_model": "H200"}}, "nominal.gpu_model", "which GPUs a worker may have"),
    ({"borrow_limit": {"gpu": -0.5}}, "borrow_limit.gpu", "negative"),
    ({"lend_limit": {"GPU": 1}}, "lend_limit.GPU", "did you mean gpu?"),
    ({"protected": 0}, "protected", "neither true nor false"),
    ({"stop_policy": "stop"}, "stop_policy", "NONE or HOLD or HOLD_AND_DRAIN"),
    ({"pgpool": {}}, "pgpool", "did you mean pg_pool?"),
    ({"pg_pool": []}, "pg_pool", "a list is not a mapping"),
    ({"preload": "torch"}, "preload", "not a list"),
    ({"preload": ["import torch"]}, "preload[0]", "not the name of a module"),
    ({"preload": ["torch", ".nn"]}, "preload[1]", "not the name of a module"),
    ({"preload": ["os"] * 17}, "preload", "17 "),
    ({"pg_pool": {"reserved": [{}]}}, "pg_pool.reserved[0]", "shape is empty"),
    ({"pg_pool": {"reserved": [{"cpu": 0}]}}, "pg_pool.reserved[0]", "shape is empty"),
    ({"pg_pool": {"reserved": [{"cpu": 1}, {"gpu": 2.5}]}}, "pg_pool.reserved[1].gpu", "e.g. 2"),
    ({"pg_pool": {"reserved": {"cpu": 1}}}, "pg_pool.reserved", "not a list"),
    ({"pg_pool": {"max_dynamic": -1}}, "pg_pool.max_dynamic", "0 to 10000"),
    ({"pg_pool": {"max_dynamic": 10_001}}, "pg_pool.max_dynamic", "0 to 10000"),
    ({"pg_pool": {"reuse_slack": 0.9}}, "pg_pool.reuse_slack", "1 to 1000"),
    ({"pg_pool": {"idle_ttl": "never"}}, "pg_pool.idle_ttl", "not a duration"),
    ({"pg_pool": {"creation_timeout": 0}}, "pg_pool.creation_timeout", "1ms to 1d"),
    ({"pg_pool": {"retries": {"attempts": 0}}}, "pg_pool.retries.attempts", "1 to 1000"),
    ({"pg_pool": {"retries": 3}}, "pg_pool.retries", "not a mapping"),
    ({"pg_pool": {"enable": False, "reserved": [{"cpu": 1}]}}, "pg_pool.reserved", "needs enable: true"),
    ({"preemption": {"agressiveness": "LOW"}}, "preemption.agressiveness", "did you mean aggressiveness?"),
]

REFUSED_OF_POLICIES: list[tuple[dict[str, Any], str, str]] = [
    ({"aggressiveness": "EXTREME"}, "aggressiveness", "'EXTREME' is unknown; use LOW or MEDIUM or HIGH"),
    ({"aggressiveness": None, "cancel_timeout_ms": 3}, "cancel_timeout_ms", "did you mean cancel_timeout?"),
    ({"label_rules": {"role": {"a": ["b"], "b": ["a"]}}}, "label_rules.role", "a beats b beats a"),
    ({"label_rules": {"role": {"a": ["b"], "b": ["c"], "c": ["a"]}}}, "label_rules.role", "go in a circle"),
    ({"label_rules": {"role": {"a": ["a"]}}}, "label_rules.role.a", "can't beat itself"),
    ({"label_rules": {"role": {"a": "b"}}}, "label_rules.role.a", "not a list"),
    ({"label_rules": {"role": ["a"]}}, "label_rules.role", "not a mapping"),
    ({"label_rules": {"role": {"a": ["b", "../x"]}}}, "label_rules.role.a[1]", "labels match"),
    ({"label_rules": {"ro le": {"a": ["b"]}}}, 'label_rules["ro le"]', "labels match"),
    ({"cross_pool_threshold": -1}, "cross_pool_threshold", "0 to 2000"),
    ({"cancel_timeout": "25h"}, "cancel_timeout", "0s to 1d"),
    ({"kill_timeout": True}, "kill_timeout", "true (true or false)"),
    ({"max_victims_per_round": -1}, "max_victims_per_round", "0 to 1000000"),
    ({"enable_cross_pool": "no"}, "enable_cross_pool", "neither true nor false"),
]


class TestWhatIsRefused:
    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_OF_COMPONENTS)
    def test_of_components(self, changes: dict[str, Any], field: str, reason: str) -> None:
        fault = only_fault(job_spec, component(**changes))
        assert fault.field == f"components[0].{field}"
        assert reason in fault.message

    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_OF_JOBS)
    def test_of_jobs(self, changes: dict[str, Any], field: str, reason: str) -> None:
        fault = faults_of(job_spec, job(**changes))[0]
        assert fault.field == field
        assert reason in fault.message

    @pytest.mark.parametrize(("changes", "field", "reason"), REFUSED_OF_POOLS)
    def test_of_pools(self, changes: dict[str, Any], field: str, reason: str) -> None:
        fault = only_fault(pool_spec, POOL | changes)
        assert fault.field == field
        assert reason in fault.message

    @pytest.mark.parametrize("read", [preemption_policy, policy_overrides])
    @pytest.mark.parametrize(("mapping", "field", "reason"), REFUSED_OF_POLICIES)
    def test_of_policies(self, read: Any, mapping: dict[str, Any], field: str, reason: str) -> None:
        fault = only_fault(read, mapping)
        assert fault.field == field
        assert reason in fault.message

    @pytest.mark.parametrize("odd", [None, [], "name: x", 3, True])
    def test_whatever_is_no_mapping(self, odd: Any) -> None:
        for read in (job_spec, pool_spec, preemption_policy, policy_overrides):
            fault = only_fault(read, odd)
            assert "is not a mapping" in fault.message

    def test_what_is_missing(self) -> None:
        assert [fault.field for fault in faults_of(job_spec, {})] == ["name", "pool", "components"]
        assert only_fault(pool_spec, {}).message == "is required"

    def test_all_faults_at_once_in_the_order_of_the_input(self) -> None:
        wrong = {
            "priority": 2000,
            "pool": "a/b",
            "components": [{"workers": 0, "actor": "x", "name": "%s"}, {"name": "ok", "actor": "a:B", "nam": 1}],
            "labels": {"a b": "x", "ok": "a b"},
            "name": "",
        }
        assert [fault.field for fault in faults_of(job_spec, wrong)] == [
            "priority",
            "pool",
            "components[0].workers",
            "components[0].actor",
            "components[0].name",
            "components[1].nam",
            'labels["a b"]',
            "labels.ok",
            "name",
        ]

    def test_a_flood_of_faults_is_cut(self) -> None:
        faults = faults_of(job_spec, component(env={f"A-{i}": "x" for i in range(1000)}))
        assert len(faults) == 101
        assert faults[-1].message == "and 900 more faults"

    def test_more_workers_than_a_job_may_have(self) -> None:
        part = {"actor": "a:B", "workers": 60_000}
        fault = only_fault(job_spec, job(components=[part | {"name": "a"}, part | {"name": "b"}]))
        assert (fault.field, "120000 workers" in fault.message) == ("components", True)

    def test_colocated_components_of_unequal_size(self) -> None:
        part = {"actor": "a:B", "colocation_group": "g"}
        fault = only_fault(
            job_spec, job(components=[part | {"name": "a", "workers": 2}, part | {"name": "b", "workers": 3}])
        )
        assert fault.message == ("All roles in colocation group 'g' must have the same count. Got: {'a': 2, 'b': 3}")


class TestVariables:
    """SE-06: what the scheduler owns, and what runs foreign code, is refused, not merged."""

    @pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "RANK", "MASTER_ADDR", "CALLBOARD_JOB", "RAY_ADDRESS"])
    def test_the_schedulers_own_are_refused(self, name: str) -> None:
        for mapping, field in (
            (component(env={name: "0"}), f"components[0].env.{name}"),
            (component(pass_env=[name]), "components[0].pass_env[0]"),
        ):
            fault = only_fault(job_spec, mapping)
            assert fault.field == field
            assert "the scheduler sets this variable itself" in fault.message

    @pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP"])
    def test_those_that_load_foreign_code_are_refused(self, name: str) -> None:
        assert "foreign code" in only_fault(job_spec, component(env={name: "some.so"})).message

    @pytest.mark.parametrize("name", ["", "A=B", "A B", "1A", "A\n", "é", "a" * 300])
    def test_names_that_are_none(self, name: str) -> None:
        assert "names match" in only_fault(job_spec, component(env={name: "x"})).message

    @pytest.mark.parametrize("value", [1, 1.5, True, None, ["x"], "a\x00b", "\ud800"])
    def test_values_that_are_no_text(self, value: Any) -> None:
        assert only_fault(job_spec, component(env={"A": value})).field == "components[0].env.A"

    def test_their_size_is_bounded_one_by_one_and_together(self) -> None:
        assert "Linux allows" in only_fault(job_spec, component(env={"A": "x" * 131_072})).message
        many = {f"A{i}": "x" * 120_000 for i in range(9)}
        fault = only_fault(job_spec, component(env=many))
        assert (fault.field, "in total" in fault.message) == ("components[0].env", True)

    SECRET = "hunter2-hunter2"

    @pytest.mark.parametrize(
        "stated",
        [
            {"env": {"MY_TOKEN": SECRET + "\x00", "RANK": SECRET, "X": SECRET}},
            {"env": f"MY_TOKEN={SECRET}", "secret_env": SECRET},
            {"secret_env": [SECRET]},
            {"secret_env": {"A": [SECRET], "B": {"c": SECRET}}},
        ],
    )
    def test_no_fault_and_no_traceback_shows_a_value(self, stated: dict[str, Any]) -> None:
        secret = self.SECRET
        wrong = component(**stated, workers=0)
        with pytest.raises(InvalidInput) as caught:
            job_spec(wrong)
        assert secret not in str(caught.value)
        assert caught.value.__cause__ is None
        context = caught.value.__context__
        while context is not None:
            assert secret not in str(context)
            context = context.__context__


@pytest.mark.parametrize(
    ("stated", "bounds"),
    [
        ({"workers": 4}, (1, 4)),
        ({"min_workers": 3, "max_workers": 3}, (1, 3)),
        ({"min_workers": 2, "max_workers": 4}, (2, 4)),
        ({}, (1, 1)),
    ],
)
def test_a_job_that_is_no_gang_starts_with_one_worker_of_each_component(
    stated: dict[str, int], bounds: tuple[int, int]
) -> None:
    (found,) = job_spec(component(**stated) | {"gang": False}).components
    assert (found.min_workers, found.max_workers) == bounds
    (whole,) = job_spec(component(**stated) | {"gang": True}).components
    assert whole.min_workers == stated.get("min_workers", stated.get("workers", 1))


def test_workers_with_places_start_whole_all_the_same() -> None:
    places = [{"node": "n1", "devices": [0]}, {"node": "n1", "devices": [1]}]
    spec = job_spec(job(gang=False, components=[{"name": "a", "actor": "a:B", "places": places}]))
    assert (spec.components[0].min_workers, spec.components[0].max_workers) == (2, 2)


def test_models_can_be_built_before_they_are_needed() -> None:
    program = """
import callboard.wire.specs
from callboard.model.inputs import reading
from callboard.model.inputs.job import JobInput
print(reading.plan_of.cache_info().currsize)
reading.build_inputs()
built = reading.plan_of.cache_info().currsize
reading.check(JobInput, {"name": "j", "pool": "p", "components": [{"name": "c", "actor": "a:B"}]})
print(built > 5, reading.plan_of.cache_info().currsize == built)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["0", "True", "True"]


def every_model() -> list[type[Input]]:
    kinds = Input.__subclasses__()
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds


@pytest.mark.parametrize("model", every_model(), ids=lambda model: model.__name__)
def test_ft_e2_suggestions_are_keys_that_people_write(model: type[Input]) -> None:
    keys = set(keys_of(model))
    hidden = {*model.internal, *(field.name for field in table_of(model).values())} - keys
    for name in hidden | keys:
        for typo in (name[:-1], f"{name}s", f"x{name}", name.replace("_", "")):
            try:
                check(model, {typo: object()})
            except Misfits as error:
                said = [misfit.message for misfit in error.found if misfit.message.startswith("unknown key")]
            else:
                said = []  # another key is called so
            for message in said:
                assert not set(re.split(r"\W+", message.partition(";")[2])) & hidden, message


def test_ft_e2_a_strategy_of_one_component() -> None:
    found = job_spec(
        {
            "name": "j",
            "pool": "p",
            "components": [
                {"name": "a", "actor": "m:A", "placement": "spread"},
                {"name": "b", "actor": "m:B"},
            ],
        }
    )
    assert [component.placement for component in found.components] == [Strategy.SPREAD, None]
    assert found.placement is Strategy.PACK
    with pytest.raises(InvalidInput, match="STRICT_SPREAD"):
        job_spec({"name": "j", "pool": "p", "components": [{"name": "a", "actor": "m:A", "placement": "SCATTER"}]})
