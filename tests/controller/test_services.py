"""The API: what each call answers, page by page, and that repeating it costs nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from callboard.controller.options import Limits
from callboard.controller.server import Controller
from callboard.model.describe import MASK
from callboard.model.specs import PoolSpec, StopPolicy
from callboard.scheduler.records.events import PoolCreated
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
from callboard.wire.refusals import ErrorReason
from tests.controller.support import Api, all_done, api_at, job, options_for, pool, refusal_of, running
from tests.support.crowd import Crowd
from tests.support.fake_agent import FakeAgent

SECRET = "hunter2"


class TestPools:
    async def test_an_equal_one_is_returned_and_another_is_refused(self, api: Api) -> None:
        first = (await api.pools.CreatePool(pool())).pool
        assert (await api.pools.CreatePool(pool())).pool == first
        error = await refusal_of(api.pools.CreatePool(pool(cpu=1000)))
        assert (error.code, error.reason) == ("ALREADY_EXISTS", ErrorReason.ALREADY_EXISTS)
        assert "nominal" in error.message

    async def test_a_mask_changes_what_it_names_and_nothing_else(self, api: Api) -> None:
        before = (await api.pools.CreatePool(pool(labels={"team": "a"}))).pool
        request = pool_pb2.UpdatePoolRequest(
            name="pools/rlhf",
            spec=pool_pb2.PoolSpec(nominal=common_pb2.Resources(cpu_milli=9000), limited=["cpu"], cohort="ignored"),
            update_mask=FieldMask(paths=["nominal"]),
        )
        after = (await api.pools.UpdatePool(request)).pool
        assert after.spec.nominal == common_pb2.Resources(cpu_milli=9000)
        assert list(after.spec.limited) == ["cpu"]
        assert dict(after.spec.labels) == {"team": "a"}
        assert not after.spec.cohort
        assert after.etag != before.etag

    async def test_an_unknown_path_in_a_mask_is_refused(self, api: Api) -> None:
        await api.pools.CreatePool(pool())
        request = pool_pb2.UpdatePoolRequest(name="pools/rlhf", update_mask=FieldMask(paths=["spec.nominal"]))
        error = await refusal_of(api.pools.UpdatePool(request))
        assert [fault.field for fault in error.faults] == ["update_mask"]

    async def test_a_stale_etag_changes_nothing(self, api: Api) -> None:
        await api.pools.CreatePool(pool())
        update = pool_pb2.UpdatePoolRequest(
            name="pools/rlhf", spec=pool(cpu=1000).spec, update_mask=FieldMask(paths=["nominal"]), etag="1"
        )
        await api.pools.UpdatePool(update)
        for etag in ("1", "7", "nonsense", "0", "-1"):
            update.etag = etag
            error = await refusal_of(api.pools.UpdatePool(update))
            assert (error.code, error.reason) == ("ABORTED", ErrorReason.ETAG_MISMATCH), etag
            delete = pool_pb2.DeletePoolRequest(name="pools/rlhf", etag=etag)
            assert (await refusal_of(api.pools.DeletePool(delete))).reason is ErrorReason.ETAG_MISMATCH

    async def test_validate_only_keeps_nothing(self, api: Api) -> None:
        request = pool()
        request.validate_only = True
        planned = (await api.pools.CreatePool(request)).pool
        assert planned.name == "pools/rlhf"
        assert not (await api.pools.ListPools(pool_pb2.ListPoolsRequest())).pools
        await api.pools.CreatePool(pool())
        update = pool_pb2.UpdatePoolRequest(name="pools/rlhf", spec=pool(cpu=1).spec, validate_only=True)
        assert (await api.pools.UpdatePool(update)).pool.spec.nominal.cpu_milli == 1
        kept = (await api.pools.GetPool(pool_pb2.GetPoolRequest(name="pools/rlhf"))).pool
        assert kept.spec.nominal.cpu_milli == 6000
        different = pool(cpu=1)
        different.validate_only = True
        assert (await refusal_of(api.pools.CreatePool(different))).reason is ErrorReason.ALREADY_EXISTS

    async def test_one_in_use_is_deleted_by_force_only(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            await api.submit(job("a"))
            await api.until_job("a", "RUNNING")
            error = await refusal_of(api.pools.DeletePool(pool_pb2.DeletePoolRequest(name="pools/rlhf")))
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.POOL_IN_USE)
            forced = await api.pools.DeletePool(pool_pb2.DeletePoolRequest(name="pools/rlhf", force=True))
            assert forced.pool.deleting
            await api.until(lambda event: event.type == "pool.deleted")
            error = await refusal_of(api.pools.GetPool(pool_pb2.GetPoolRequest(name="pools/rlhf")))
            assert error.reason is ErrorReason.NOT_FOUND

    async def test_they_are_listed_by_name_page_by_page(self, api: Api) -> None:
        names = [f"p{number:02d}" for number in range(25)]
        for name in reversed(names):
            await api.pools.CreatePool(pool(name))
        found: list[str] = []
        token = ""
        while True:
            page = await api.pools.ListPools(pool_pb2.ListPoolsRequest(page_size=10, page_token=token))
            found += [one.name.removeprefix("pools/") for one in page.pools]
            token = page.next_page_token
            if not token:
                break
        assert found == names


class TestJobs:
    async def test_a_repeated_request_id_returns_the_first_job(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            first = await api.submit(job("a"), request_id="r1")
            again = await api.submit(job("a"), request_id="r1")
            assert again.uid == first.uid
            error = await refusal_of(api.submit(job("b"), request_id="r1"))
            assert (error.code, error.reason) == ("ALREADY_EXISTS", ErrorReason.REQUEST_ID_REUSED)
            error = await refusal_of(api.submit(job("a"), request_id="r2"))
            assert error.reason is ErrorReason.ALREADY_EXISTS

    async def test_secret_values_are_masked(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        spec = job("a")
        spec.components[0].env.update({"WANDB_API_KEY": SECRET, "PLAIN": "shown"})
        async with FakeAgent(controller.address) as agent:
            submitted = await api.submit(spec)
            listed = await api.jobs.ListJobs(job_pb2.ListJobsRequest())
            for shown in (submitted, await api.job("a"), listed.jobs[0]):
                assert dict(shown.spec.components[0].env) == {"WANDB_API_KEY": MASK, "PLAIN": "shown"}
            start = await agent.command("start_worker")
            assert start.start_worker.env["WANDB_API_KEY"] == SECRET  # the worker gets it
            events = await api.events.ListEvents(event_pb2.ListEventsRequest())
            assert SECRET not in str(events)

    async def test_validate_only_says_what_would_happen(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            response = await api.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job("a", gpu=1000), validate_only=True))
            assert not response.HasField("job")
            assert response.plan.verdict == "START"
            assert [worker.node_id for worker in response.plan.workers] == ["n0"]
            assert not (await api.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
            request = job_pb2.SubmitJobRequest(spec=job("a", gpu=3000), validate_only=True)
            error = await refusal_of(api.jobs.SubmitJob(request))
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.UNSCHEDULABLE)
            await api.submit(job("a", gpu=1000))
            for validate_only in (True, False):
                request = job_pb2.SubmitJobRequest(spec=job("a", gpu=1000), validate_only=validate_only)
                error = await refusal_of(api.jobs.SubmitJob(request))
                assert (error.code, error.reason) == ("ALREADY_EXISTS", ErrorReason.ALREADY_EXISTS)

    async def test_a_waiting_one_says_why(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool(cpu=1500))
        async with FakeAgent(controller.address):
            await api.submit(job("a"))
            await api.submit(job("b"))
            waiting = await api.job("b")
            assert waiting.state == job_pb2.JOB_STATE_PENDING
            assert [reason.code for reason in waiting.waiting_for if reason.subject == "pools/rlhf"] == ["QUOTA_SHORT"]
            explained = await api.jobs.ExplainJob(job_pb2.ExplainJobRequest(name="jobs/b"))
            assert explained.explanation.verdict == "WAIT"
            assert explained.explanation.queue_position == 1
            assert "raise pool rlhf cpu by 500m" in explained.explanation.unblock

    async def test_cancel_and_complete_are_idempotent_in_every_state(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, hold={"start_worker"}) as agent:
            await api.submit(job("a"))
            for _ in range(3):
                await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a", reason="no longer needed"))
            await api.until_job("a", "CANCELLED")
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
            await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name="jobs/a"))
            assert (await api.job("a")).state == job_pb2.JOB_STATE_CANCELLED
            agent.hold.clear()
            second = await api.submit(job("a"))
            await api.until(lambda event: event.state == "RUNNING" and event.subject == "jobs/a")
            await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name=f"jobs/{second.uid}"))
            await api.until_job("a", "SUCCEEDED")

    async def test_preempting_by_hand(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, cpu_milli=1000) as agent:
            await api.submit(job("a"))
            await api.until_job("a", "RUNNING")
            await api.submit(job("b"))
            agent.hold.add("stop_worker")
            request = job_pb2.PreemptJobRequest(name="jobs/a", for_job="jobs/b", reason="please")
            preempted = (await api.jobs.PreemptJob(request)).job
            assert preempted.state == job_pb2.JOB_STATE_PREEMPTING
            waiting = await api.job("b")
            assert waiting.nominated
            assert [victim.victim for victim in waiting.victims] == ["a"]
            await agent.reported(agent.obey(await agent.command("stop_worker")))
            await api.until_job("b", "RUNNING")
            error = await refusal_of(api.jobs.PreemptJob(job_pb2.PreemptJobRequest(name="jobs/a")))
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", ErrorReason.WRONG_STATE)

    @pytest.mark.parametrize("call", ["GetJob", "CancelJob", "CompleteJob", "PreemptJob", "ExplainJob"])
    async def test_an_unknown_one_is_not_found(self, api: Api, call: str) -> None:
        request = getattr(job_pb2, f"{call}Request")(name="jobs/nobody")
        error = await refusal_of(getattr(api.jobs, call)(request))
        assert (error.code, error.reason) == ("NOT_FOUND", ErrorReason.NOT_FOUND)
        assert error.metadata["subject"] == "jobs/nobody"

    async def test_they_are_listed_newest_first_and_filtered(self, controller: Controller, api: Api) -> None:
        for name in ("p1", "p2"):
            await api.pools.CreatePool(pool(name))
        async with FakeAgent(controller.address, cpu_milli=64_000):
            for number in range(6):
                await api.submit(job(f"j{number}", pool=f"p{1 + number % 2}"))
            await api.until_job("j5", "RUNNING")
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/j0"))
            await api.until_job("j0", "CANCELLED")
            everything = await api.jobs.ListJobs(job_pb2.ListJobsRequest())
            assert [one.name for one in everything.jobs] == [f"jobs/j{number}" for number in range(5, -1, -1)]
            of_pool = await api.jobs.ListJobs(job_pb2.ListJobsRequest(pool="p1"))
            assert [one.name for one in of_pool.jobs] == ["jobs/j4", "jobs/j2", "jobs/j0"]
            ended = await api.jobs.ListJobs(job_pb2.ListJobsRequest(states=[job_pb2.JOB_STATE_CANCELLED]))
            assert [one.name for one in ended.jobs] == ["jobs/j0"]
            error = await refusal_of(api.jobs.ListJobs(job_pb2.ListJobsRequest(states=[job_pb2.JOB_STATE_UNSPECIFIED])))
            assert [fault.field for fault in error.faults] == ["states"]

    async def test_a_page_neither_repeats_nor_skips_when_jobs_come_in_between(
        self, controller: Controller, api: Api
    ) -> None:
        await api.pools.CreatePool(pool(cpu=10**9))
        async with FakeAgent(controller.address, cpu_milli=10_000_000):
            for number in range(10):
                await api.submit(job(f"j{number}"))
            first = await api.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=4))
            await api.submit(job("newer"))
            second = await api.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=100, page_token=first.next_page_token))
            names = [one.name for one in [*first.jobs, *second.jobs]]
            assert names == [f"jobs/j{number}" for number in range(9, -1, -1)]
            assert not second.next_page_token

    async def test_gc_09_a_page_ends_before_it_gets_too_large(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, limits=Limits(page_bytes=50_000))
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool(cpu=10**9))
            async with FakeAgent(controller.address, cpu_milli=10_000_000):
                for number in range(9):
                    spec = job(f"j{number}")
                    spec.components[0].args_json = f'["{"x" * 20_000}"]'
                    await api.submit(spec)
                found: list[str] = []
                token = ""
                sizes = []
                while True:
                    page = await api.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=1000, page_token=token))
                    sizes.append(page.ByteSize())
                    found += [one.name for one in page.jobs]
                    token = page.next_page_token
                    if not token:
                        break
                assert found == [f"jobs/j{number}" for number in range(8, -1, -1)]
                assert max(sizes) < 60_000

    async def test_gc_09_too_large_a_submit_is_refused_with_the_limit(self, api: Api) -> None:
        spec = job("a")
        spec.components[0].args_json = f'["{"x" * (5 << 20)}"]'
        error = await refusal_of(api.submit(spec))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert str(4 << 20) in error.message


class TestPageTokens:
    async def test_one_of_another_list_or_none_at_all_is_refused(self, controller: Controller, api: Api) -> None:
        for number in range(3):
            await api.pools.CreatePool(pool(f"p{number}"))
        token = (await api.pools.ListPools(pool_pb2.ListPoolsRequest(page_size=1))).next_page_token
        assert token
        calls: list[Any] = [
            api.jobs.ListJobs(job_pb2.ListJobsRequest(page_token=token)),
            api.nodes.ListNodes(node_pb2.ListNodesRequest(page_token=token)),
            api.groups.ListPlacementGroups(placement_group_pb2.ListPlacementGroupsRequest(page_token=token)),
            api.pools.ListPools(pool_pb2.ListPoolsRequest(page_token="rubbish")),
            api.pools.ListPools(pool_pb2.ListPoolsRequest(page_token=token[:-4] + "AAAA")),
            api.pools.ListPools(pool_pb2.ListPoolsRequest(page_token="AAAA" + token[4:])),
        ]
        for call in calls:
            error = await refusal_of(call)
            assert (error.code, error.reason) == ("INVALID_ARGUMENT", ErrorReason.BAD_PAGE_TOKEN)

    async def test_one_with_other_filters_is_refused(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            for number in range(3):
                await api.submit(job(f"j{number}"))
            token = (await api.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=1, pool="rlhf"))).next_page_token
            error = await refusal_of(api.jobs.ListJobs(job_pb2.ListJobsRequest(page_token=token)))
            assert error.reason is ErrorReason.BAD_PAGE_TOKEN

    @pytest.mark.parametrize("size", [-1, 1001])
    async def test_a_size_out_of_bounds_is_refused(self, api: Api, size: int) -> None:
        error = await refusal_of(api.pools.ListPools(pool_pb2.ListPoolsRequest(page_size=size)))
        assert [fault.field for fault in error.faults] == ["page_size"]


class TestGroupsAndNodes:
    async def test_groups(self, controller: Controller, api: Api) -> None:
        reserved = pool_pb2.PlacementGroupPool(reserved=[common_pb2.Resources(cpu_milli=500)] * 3, max_dynamic=2)
        await api.pools.CreatePool(pool(pg_pool=reserved))
        async with FakeAgent(controller.address):
            await api.until(lambda event: event.type == "group.ready" and event.subject == "placementGroups/pg-3")
            page = await api.groups.ListPlacementGroups(
                placement_group_pb2.ListPlacementGroupsRequest(page_size=2, pool="rlhf")
            )
            assert [group.name for group in page.placement_groups] == ["placementGroups/pg-1", "placementGroups/pg-2"]
            rest = await api.groups.ListPlacementGroups(
                placement_group_pb2.ListPlacementGroupsRequest(pool="rlhf", page_token=page.next_page_token)
            )
            assert [group.name for group in rest.placement_groups] == ["placementGroups/pg-3"]
            delete = placement_group_pb2.DeletePlacementGroupRequest(name="placementGroups/pg-1")
            await api.groups.DeletePlacementGroup(delete)
            await api.until(lambda event: event.type == "group.removed")
            error = await refusal_of(
                api.groups.GetPlacementGroup(placement_group_pb2.GetPlacementGroupRequest(name="placementGroups/pg-1"))
            )
            assert error.reason is ErrorReason.NOT_FOUND

    async def test_a_cordon(self, controller: Controller, api: Api) -> None:
        async with FakeAgent(controller.address):
            cordoned = (await api.nodes.CordonNode(node_pb2.CordonNodeRequest(name="nodes/n0"))).node
            assert cordoned.state == node_pb2.NODE_STATE_CORDONED
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
            assert dict(stats.nodes) == {"CORDONED": 1}
            back = (await api.nodes.UncordonNode(node_pb2.UncordonNodeRequest(name="nodes/n0"))).node
            assert back.state == node_pb2.NODE_STATE_READY

    async def test_a_devices_users_are_named(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            await api.submit(job("a", gpu=1000))
            await api.until_job("a", "RUNNING")
            node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
            assert [[user.job for user in device.workers] for device in node.devices] == [["a"], []]
            assert [device.used_milli for device in node.devices] == [1000, 0]

    async def test_mu_04_every_snapshot_adds_up(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool(cpu=10**6, gpu=10**6))
        async with FakeAgent(controller.address, cpu_milli=8000, gpus=4):
            seen = 0

            async def look() -> None:
                nonlocal seen
                while True:
                    node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n0"))).node
                    parts = [node.used, node.held, node.free, node.quarantined]
                    assert sum(part.gpu_milli for part in parts) == node.capacity.gpu_milli
                    assert sum(part.cpu_milli for part in parts) == node.capacity.cpu_milli
                    jobs = [one.name for one in (await api.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs]
                    assert len(jobs) == len(set(jobs))
                    seen += 1

            looking = asyncio.create_task(look())
            for number in range(15):
                await api.submit(job(f"j{number}", gpu=4000))
                await api.until_job(f"j{number}", "RUNNING")
                await api.jobs.CancelJob(job_pb2.CancelJobRequest(name=f"jobs/j{number}"))
                await api.until_job(f"j{number}", "CANCELLED")
            looking.cancel()
            await all_done(looking)
            assert looking.cancelled(), looking.exception()
            assert seen > 10


class TestOverview:
    async def test_what_needs_attention_and_both_ends_of_the_queue_come_first(
        self, controller: Controller, api: Api
    ) -> None:
        crowd = Crowd(controller)
        await crowd.pools(16)
        await crowd.nodes(6, gpus=2)
        runs = [await crowd.job(f"runs-{number}", pool="rlhf", workers=1, ask={"gpu": 1}) for number in range(4)]
        await crowd.send(PoolCreated, spec=PoolSpec(name="batch", stop_policy=StopPolicy.HOLD))
        for number, priority in enumerate((3000, 9000, 5000)):
            await crowd.job(f"waits-{number}", pool="batch", priority_milli=priority)
        await api.nodes.CordonNode(node_pb2.CordonNodeRequest(name="nodes/node-5"))
        shown = await api.scheduler.GetOverview(scheduler_pb2.GetOverviewRequest(max_nodes=3, max_jobs=4))
        assert [node.name for node in shown.nodes] == ["nodes/node-0", "nodes/node-1", "nodes/node-5"]
        assert (shown.more_nodes, shown.more_jobs, shown.more_pools) == (3, 3, 0)
        assert [job.spec.name for job in shown.jobs] == ["waits-2", "waits-1", "runs-3", "runs-2"]
        assert {job.uid for job in shown.jobs} >= set(runs[2:])
        assert shown.ray_nodes["00000004"] == "node-4"
        everything = await api.scheduler.GetOverview(scheduler_pb2.GetOverviewRequest())
        assert list(everything.nodes) == list((await api.nodes.ListNodes(node_pb2.ListNodesRequest())).nodes)
        assert list(everything.jobs) == list((await api.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs)
        pools = (await api.pools.ListPools(pool_pb2.ListPoolsRequest())).pools
        assert list(everything.pools) == list(pools)
        assert {pool.name: (pool.pending_jobs, pool.active_jobs) for pool in pools} == {
            "pools/agents": (0, 0),
            "pools/batch": (3, 0),
            "pools/evals": (0, 0),
            "pools/interactive": (0, 0),
            "pools/rlhf": (0, 4),
        }
        assert everything.stats.jobs == {"RUNNING": 4, "PENDING": 3}

    @pytest.mark.parametrize("most", [1, 2, 5])
    async def test_jobs_of_one_kind_take_the_room_of_the_other(
        self, controller: Controller, api: Api, most: int
    ) -> None:
        crowd = Crowd(controller)
        await crowd.pools(16)
        await crowd.nodes(1, gpus=8)
        for number in range(3):
            await crowd.job(f"runs-{number}", pool="rlhf", workers=1, ask={"gpu": 1})
        shown = await api.scheduler.GetOverview(scheduler_pb2.GetOverviewRequest(max_jobs=most))
        assert [job.spec.name for job in shown.jobs] == ["runs-2", "runs-1", "runs-0"][:most]
        assert shown.more_jobs == max(0, 3 - most)

    async def test_a_size_out_of_bounds_is_refused_by_its_own_name(self, api: Api) -> None:
        error = await refusal_of(api.scheduler.GetOverview(scheduler_pb2.GetOverviewRequest(max_jobs=1001)))
        assert [fault.field for fault in error.faults] == ["max_jobs"]


class TestPolicy:
    async def test_it_is_replaced_whole_and_shown_with_every_default(self, api: Api) -> None:
        before = await api.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest())
        assert before.policy.cancel_timeout_ms == 30_000
        changed = policy_pb2.PreemptionPolicy(cancel_timeout_ms=500, enable_cross_pool=False)
        after = await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=changed, etag=before.etag))
        assert (after.policy.cancel_timeout_ms, after.policy.kill_timeout_ms) == (500, 10_000)
        assert not after.policy.enable_cross_pool
        assert await api.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest()) == scheduler_pb2.GetPolicyResponse(
            policy=after.policy, etag=after.etag
        )
        error = await refusal_of(
            api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=changed, etag=before.etag))
        )
        assert error.reason is ErrorReason.ETAG_MISMATCH

    async def test_validate_only_keeps_nothing(self, api: Api) -> None:
        changed = policy_pb2.PreemptionPolicy(cancel_timeout_ms=500)
        await api.scheduler.SetPolicy(scheduler_pb2.SetPolicyRequest(policy=changed, validate_only=True))
        kept = await api.scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest())
        assert kept.policy.cancel_timeout_ms == 30_000


class TestEvents:
    async def test_a_watch_gives_every_event_once_and_in_order(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            await api.submit(job("a"))
            last = (await api.until_job("a", "RUNNING")).revision
            revisions: list[int] = []
            watch = api.events.Watch(event_pb2.WatchRequest(start_revision=1))
            async for response in watch:
                revisions += [event.revision for event in response.events]
                assert response.revision >= revisions[-1]
                if revisions[-1] >= last:
                    break
            watch.cancel()
            assert revisions == sorted(set(revisions))
            assert revisions[0] == 1

    async def test_a_filter_selects_by_type_and_subject(self, controller: Controller, api: Api) -> None:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address):
            await api.submit(job("a"))
            await api.until_job("a", "RUNNING")
            only = event_pb2.EventFilter(subject="jobs/a", types=["job.", "worker.ready"])
            found = await api.events.ListEvents(event_pb2.ListEventsRequest(filter=only))
            assert [event.type for event in found.events] == [
                "job.pending",
                "job.starting",
                "worker.ready",
                "job.running",
            ]
            newest = await api.events.ListEvents(event_pb2.ListEventsRequest(filter=only, newest=True, page_size=2))
            assert [event.type for event in newest.events] == ["worker.ready", "job.running"]

    async def test_pages_go_on_where_the_last_ended(self, controller: Controller, api: Api) -> None:
        for number in range(12):
            await api.pools.CreatePool(pool(f"p{number}"))
        found: list[int] = []
        start = 0
        while True:
            page = await api.events.ListEvents(event_pb2.ListEventsRequest(start_revision=start, page_size=5))
            found += [event.revision for event in page.events]
            start = page.next_revision
            if not start:
                break
        assert found == list(range(1, 14))

    async def test_a_compacted_start_is_refused(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, limits=Limits(events_in_memory=4, events_on_disk=8))
        async with running(options) as controller, api_at(controller.address) as api:
            for number in range(30):
                await api.pools.CreatePool(pool(f"p{number}"))
            watch = api.events.Watch(event_pb2.WatchRequest(start_revision=1))
            error = await refusal_of(watch.read())
            assert (error.code, error.reason) == ("OUT_OF_RANGE", ErrorReason.REVISION_COMPACTED)
            oldest = int(error.metadata["oldest_revision"])
            revisions: list[int] = []
            watch = api.events.Watch(event_pb2.WatchRequest(start_revision=oldest))
            async for response in watch:  # from disk, then from memory
                revisions += [event.revision for event in response.events]
                if revisions[-1] == 31:
                    break
            watch.cancel()
            assert revisions == list(range(oldest, 32))
            listed = await api.events.ListEvents(event_pb2.ListEventsRequest())
            assert listed.events[0].revision == oldest
            error = await refusal_of(api.events.ListEvents(event_pb2.ListEventsRequest(start_revision=1)))
            assert error.reason is ErrorReason.REVISION_COMPACTED

    async def test_a_start_in_the_future_is_refused(self, api: Api) -> None:
        error = await refusal_of(api.events.Watch(event_pb2.WatchRequest(start_revision=10_000)).read())
        assert [fault.field for fault in error.faults] == ["start_revision"]

    async def test_an_idle_watch_says_that_it_is_alive(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path, progress_ms=5)) as controller, api_at(controller.address) as api:
            watch = api.events.Watch(event_pb2.WatchRequest())
            marks = [await watch.read() for _ in range(3)]
            assert [mark.revision for mark in marks] == [1, 1, 1]
            assert not any(mark.events for mark in marks)
            watch.cancel()

    async def test_there_is_a_bound_on_watches(self, tmp_path: Path) -> None:
        options = options_for(tmp_path, limits=Limits(watchers=2))
        async with running(options) as controller, api_at(controller.address) as api:
            watches = [api.events.Watch(event_pb2.WatchRequest()) for _ in range(2)]
            for watch in watches:
                await watch.read()
            error = await refusal_of(api.events.Watch(event_pb2.WatchRequest()).read())
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", ErrorReason.LIMIT_REACHED)
            for watch in watches:
                watch.cancel()
