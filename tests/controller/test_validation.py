"""Bad values are refused with code, reason and field, before anything starts, and the controller lives on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from callboard.controller.server import Controller
from callboard.v1 import (
    common_pb2,
    event_pb2,
    job_pb2,
    node_pb2,
    placement_group_pb2,
    policy_pb2,
    pool_pb2,
    scheduler_pb2,
)
from callboard.wire.refusals import CallError, ErrorReason
from tests.controller.support import Api, job, pool, refusal_of
from tests.support.fake_agent import FakeAgent

UNKNOWN: Any = 9
"""A number that no enum knows."""

STRANGE_NAMES = ["../../x", "a/b", "a\n", "x" * 300, "🚀", "%s", "__proto__", "", " ", "-a", "1st"]


@pytest.fixture
async def shared(controller: Controller, api: Api) -> AsyncIterator[tuple[Controller, Api]]:
    """A controller with one pool and one node: no refusal may harm it."""
    await api.pools.CreatePool(pool(cpu=6000, gpu=6000))
    async with FakeAgent(controller.address):
        yield controller, api


def component(**fields: Any) -> job_pb2.JobSpec:
    """A job whose one component has some fields replaced."""
    spec = job("a")
    for name, value in fields.items():
        part = spec.components[0]
        part.ClearField(name)  # type: ignore[arg-type]
        part.MergeFrom(job_pb2.ComponentSpec(**{name: value}))
    return spec


def resources(**amounts: Any) -> job_pb2.JobSpec:
    """A job whose one worker asks these amounts."""
    return component(resources=common_pb2.Resources(**amounts))


def twice() -> job_pb2.JobSpec:
    """A job with one component name twice."""
    spec = job("a")
    spec.components.append(spec.components[0])
    return spec


JOBS: dict[str, tuple[job_pb2.JobSpec, str]] = {
    "a negative ask": (resources(cpu_milli=-1), "spec.components[0].resources.cpu_milli"),
    "an absurd ask": (resources(cpu_milli=1 << 60), "spec.components[0].resources.cpu_milli"),
    "a GPU and a half": (resources(gpu_milli=1500), "spec.components[0].resources.gpu_milli"),
    "a GPU named as custom": (resources(custom_milli={"gpu": 1}), "spec.components[0].resources.custom_milli"),
    "a strange resource": (resources(custom_milli={"a/b": 1}), "spec.components[0].resources.custom_milli"),
    "no component": (job("a", components=[]), "spec.components"),
    "no pool": (job("a", pool=""), "spec.pool"),
    "one component twice": (twice(), "spec.components[1].name"),
    "no import path": (component(actor="pkg"), "spec.components[0].actor"),
    "an import path with a call": (component(actor="os:system('x')"), "spec.components[0].actor"),
    "arguments that are no JSON": (component(args_json="[1,"), "spec.components[0].args_json"),
    "arguments that are no array": (component(args_json="{}"), "spec.components[0].args_json"),
    "keywords that are no object": (component(kwargs_json="[]"), "spec.components[0].kwargs_json"),
    "no workers at all": (component(workers=0), "spec.components[0].workers"),
    "too many workers": (component(workers=10**8), "spec.components[0].workers"),
    "the scheduler's variable": (
        component(env={"CUDA_VISIBLE_DEVICES": "0"}),
        "spec.components[0].env",
    ),
    "foreign code by variable": (component(env={"LD_PRELOAD": "x.so"}), "spec.components[0].env"),
    "a strange variable": (component(env={"A=B": "x"}), "spec.components[0].env"),
    "an option that Ray owns": (component(ray_options={"num_gpus": "1"}), "spec.components[0].ray_options"),
    "no concurrency": (component(max_concurrency=0), "spec.components[0].max_concurrency"),
    "a priority out of bounds": (job("a", priority_milli=10**9), "spec.priority_milli"),
    "a strange label": (job("a", labels={"a b": "c"}), "spec.labels"),
    "a label of 300 characters": (job("a", labels={"a": "x" * 300}), "spec.labels"),
    "a strange selector": (job("a", node_selector={"": "c"}), "spec.node_selector"),
    "an unknown strategy": (job("a", placement=77), "spec.placement"),
    "a negative time": (job("a", min_runtime_ms=-5), "spec.min_runtime_ms"),
    "an unknown role": (component(role="trianer"), "spec.components[0].role"),
}

POOLS: dict[str, tuple[pool_pb2.CreatePoolRequest, str]] = {
    "a negative quota": (
        pool("x", nominal=common_pb2.Resources(cpu_milli=-1), limited=["cpu"]),
        "spec.nominal.cpu_milli",
    ),
    "a limit on nothing": (pool("x", nominal=common_pb2.Resources(cpu_milli=1), limited=[]), "spec.nominal.cpu_milli"),
    "a strange limit": (pool("x", limited=["cpu", "gpu", "a/b"]), "spec"),
    "a strange label": (pool("x", labels={"a b": "c"}), "spec.labels"),
    "a strange cohort": (pool("x", cohort="a/b"), "spec.cohort"),
    "an unknown stop policy": (pool("x", stop_policy=9), "spec.stop_policy"),
    "too many dynamic groups": (
        pool("x", pg_pool=pool_pb2.PlacementGroupPool(max_dynamic=10**6)),
        "spec.pg_pool.max_dynamic",
    ),
    "a negative number of groups": (
        pool("x", pg_pool=pool_pb2.PlacementGroupPool(max_dynamic=-1)),
        "spec.pg_pool.max_dynamic",
    ),
    "a reserved GPU and a half": (
        pool("x", pg_pool=pool_pb2.PlacementGroupPool(reserved=[common_pb2.Resources(gpu_milli=1500)])),
        "spec.pg_pool.reserved[0]",
    ),
    "a slack below one": (
        pool("x", pg_pool=pool_pb2.PlacementGroupPool(reuse_slack_milli=500)),
        "spec.pg_pool.reuse_slack_milli",
    ),
    "a negative timeout": (
        pool("x", preemption=policy_pb2.PreemptionPolicy(cancel_timeout_ms=-1)),
        "spec.preemption.cancel_timeout_ms",
    ),
}


def rules(*beats: tuple[str, str]) -> policy_pb2.PreemptionPolicy:
    """A policy of label rules on one key."""
    policy = policy_pb2.PreemptionPolicy()
    for winner, loser in beats:
        policy.label_rules.keys["role"].winners[winner].values.append(loser)
    return policy


POLICIES: dict[str, tuple[policy_pb2.PreemptionPolicy, str]] = {
    "a cycle of rules": (rules(("train", "reward"), ("reward", "train")), "policy.label_rules"),
    "a value that beats itself": (rules(("train", "train")), "policy.label_rules"),
    "a strange value": (rules(("train", "a b")), "policy.label_rules"),
    "an unknown level": (policy_pb2.PreemptionPolicy(aggressiveness=UNKNOWN), "policy.aggressiveness"),
    "a negative timeout": (policy_pb2.PreemptionPolicy(kill_timeout_ms=-1), "policy.kill_timeout_ms"),
    "a negative threshold": (
        policy_pb2.PreemptionPolicy(cross_pool_threshold_milli=-1),
        "policy.cross_pool_threshold_milli",
    ),
    "a strange pool": (
        policy_pb2.PreemptionPolicy(protected_pools=policy_pb2.PoolNames(names=["a/b"])),
        "policy.protected_pools",
    ),
    "a negative bound": (policy_pb2.PreemptionPolicy(max_victims_per_round=-1), "policy.max_victims_per_round"),
}


def check(error: CallError, field: str) -> None:
    """The refusal names the field, with its code and reason."""
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", ErrorReason.INVALID_FIELD), error
    assert any(fault.field.startswith(field) for fault in error.faults), error.faults
    assert all(fault.message for fault in error.faults)
    assert error.message


class TestRefusals:
    @pytest.mark.parametrize("what", JOBS)
    async def test_jobs(self, shared: tuple[Controller, Api], what: str) -> None:
        controller, api = shared
        spec, field = JOBS[what]
        for validate_only in (True, False):
            request = job_pb2.SubmitJobRequest(spec=spec, validate_only=validate_only)
            check(await refusal_of(api.jobs.SubmitJob(request)), field)
        assert not controller.driver.state.jobs

    @pytest.mark.parametrize("what", POOLS)
    async def test_pools(self, shared: tuple[Controller, Api], what: str) -> None:
        controller, api = shared
        request, field = POOLS[what]
        check(await refusal_of(api.pools.CreatePool(request)), field)
        update = pool_pb2.UpdatePoolRequest(name="pools/rlhf", spec=request.spec)
        check(await refusal_of(api.pools.UpdatePool(update)), field)
        assert list(controller.driver.state.pools) == ["rlhf"]

    @pytest.mark.parametrize("what", POLICIES)
    async def test_policies(self, shared: tuple[Controller, Api], what: str) -> None:
        controller, api = shared
        policy, field = POLICIES[what]
        check(await refusal_of(api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=policy))), field)
        assert controller.driver.state.meta.policy_version == 1

    @pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
    async def test_se_05_names_at_every_entry(self, shared: tuple[Controller, Api], name: str) -> None:
        controller, api = shared
        calls: list[tuple[Callable[[Message], Any], Message, str]] = [
            (api.pools.CreatePool, pool(name), "pool_id"),
            (api.pools.GetPool, pool_pb2.GetPoolRequest(name=f"pools/{name}"), "name"),
            (api.pools.UpdatePool, pool_pb2.UpdatePoolRequest(name=f"pools/{name}"), "name"),
            (api.pools.DeletePool, pool_pb2.DeletePoolRequest(name=f"pools/{name}"), "name"),
            (api.jobs.SubmitJob, job_pb2.SubmitJobRequest(spec=job(name)), "spec.name"),
            (api.jobs.SubmitJob, job_pb2.SubmitJobRequest(spec=job("a", pool=name)), "spec.pool"),
            (api.jobs.SubmitJob, job_pb2.SubmitJobRequest(spec=component(name=name)), "spec.components[0].name"),
            (api.jobs.GetJob, job_pb2.GetJobRequest(name=f"jobs/{name}"), "name"),
            (api.jobs.CancelJob, job_pb2.CancelJobRequest(name=f"jobs/{name}"), "name"),
            (api.jobs.CompleteJob, job_pb2.CompleteJobRequest(name=f"jobs/{name}"), "name"),
            (api.jobs.ExplainJob, job_pb2.ExplainJobRequest(name=f"jobs/{name}"), "name"),
            (api.jobs.PreemptJob, job_pb2.PreemptJobRequest(name="jobs/a", for_job=f"jobs/{name}"), "for_job"),
            (api.nodes.GetNode, node_pb2.GetNodeRequest(name=f"nodes/{name}"), "name"),
            (api.nodes.CordonNode, node_pb2.CordonNodeRequest(name=f"nodes/{name}"), "name"),
            (api.nodes.UncordonNode, node_pb2.UncordonNodeRequest(name=f"nodes/{name}"), "name"),
            (
                api.groups.GetPlacementGroup,
                placement_group_pb2.GetPlacementGroupRequest(name=f"placementGroups/{name}"),
                "name",
            ),
            (
                api.groups.DeletePlacementGroup,
                placement_group_pb2.DeletePlacementGroupRequest(name=f"placementGroups/{name}"),
                "name",
            ),
        ]
        for call, request, field in calls:
            check(await refusal_of(call(request)), field)
        stats = await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())
        assert stats.stats.nodes == {"READY": 1}
        assert not controller.driver.state.jobs

    @pytest.mark.parametrize("name", ["rlhf", "jobs/rlhf", "/rlhf", "pools/", "pools", "pools/a/b", "Pools/rlhf"])
    async def test_resource_names_of_another_kind(self, shared: tuple[Controller, Api], name: str) -> None:
        _, api = shared
        check(await refusal_of(api.pools.GetPool(pool_pb2.GetPoolRequest(name=name))), "name")

    async def test_all_faults_are_told_at_once(self, shared: tuple[Controller, Api]) -> None:
        _, api = shared
        spec = component(actor="pkg", workers=0, args_json="{}")
        error = await refusal_of(api.submit(spec))
        assert {fault.field for fault in error.faults} >= {
            "spec.components[0].actor",
            "spec.components[0].workers",
            "spec.components[0].args_json",
        }

    async def test_long_texts(self, shared: tuple[Controller, Api]) -> None:
        _, api = shared
        check(await refusal_of(api.submit(job("a"), request_id="x" * 129)), "request_id")
        check(await refusal_of(api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a", reason="x" * 513))), "reason")
        wide = event_pb2.EventFilter(types=["job."] * 33)
        check(await refusal_of(api.events.ListEvents(event_pb2.ListEventsRequest(filter=wide))), "filter.types")
        check(await refusal_of(api.events.Watch(event_pb2.WatchRequest(filter=wide)).read()), "filter.types")

    async def test_an_unknown_pool(self, shared: tuple[Controller, Api]) -> None:
        _, api = shared
        error = await refusal_of(api.submit(job("a", pool="nowhere")))
        assert (error.code, error.reason) == ("NOT_FOUND", ErrorReason.NOT_FOUND)
        assert [fault.field for fault in error.faults] == ["spec.pool"]

    async def test_a_quota_that_can_never_hold_it(self, shared: tuple[Controller, Api]) -> None:
        _, api = shared
        error = await refusal_of(api.submit(job("a", cpu=7000)))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", ErrorReason.QUOTA_EXCEEDED)
        assert [violation.subject for violation in error.quota] == ["pools/rlhf"]
        assert "asks for 7 CPU" in error.message

    async def test_a_worker_that_no_node_can_hold(self, shared: tuple[Controller, Api]) -> None:
        _, api = shared
        error = await refusal_of(api.submit(job("a", gpu=4000)))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.UNSCHEDULABLE)
        assert any("2" in value for key, value in error.metadata.items() if key.startswith("reason"))
