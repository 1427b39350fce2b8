"""What do verbs that steer jobs, pools, groups and nodes send, and what do they say?"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from callboard.client.calls import methods
from callboard.v1.common_pb2 import Resources
from callboard.v1.event_pb2 import Event, WatchRequest, WatchResponse
from callboard.v1.job_pb2 import (
    GetJobResponse,
    JobState,
    OutputGap,
    ReadJobOutputRequest,
    ReadJobOutputResponse,
    ScaleJobRequest,
    ScaleJobResponse,
)
from callboard.v1.node_pb2 import (
    CordonNodeResponse,
    DrainNodeRequest,
    DrainNodeResponse,
    UncordonNodeRequest,
    UncordonNodeResponse,
)
from callboard.v1.placement_group_pb2 import DeletePlacementGroupRequest, DeletePlacementGroupResponse
from callboard.v1.pool_pb2 import (
    DeletePoolRequest,
    DeletePoolResponse,
    GetPoolResponse,
    UpdatePoolRequest,
    UpdatePoolResponse,
)
from callboard.wire.refusals import EtagMismatch, PoolInUse
from tests.cli import objects
from tests.cli.conftest import Run
from tests.support.fake_api import FakeApi


def refusing(error: Exception) -> Any:
    def refuse(_: Any) -> Any:
        raise error

    return refuse


def watched(api: FakeApi, state: JobState.ValueType, **fields: Any) -> None:
    """A job that runs, and ends as ``state`` once it is watched."""
    api.on(methods.GET_JOB, GetJobResponse(job=objects.job()))

    async def watch(request: WatchRequest) -> AsyncIterator[WatchResponse]:
        api.on(methods.GET_JOB, GetJobResponse(job=objects.job(state=state, **fields)))
        events = [
            Event(revision=1, type="worker.stopped", subject="jobs/train-00/workers/actor/0", state="STOPPED"),
            Event(
                revision=2,
                type="job.ended",
                subject="jobs/train-00",
                state=JobState.Name(state).removeprefix("JOB_STATE_"),
            ),
        ]
        yield WatchResponse(revision=2, events=events)

    api.on(methods.WATCH, watch)


class TestJobs:
    @pytest.mark.parametrize(
        ("state", "code"),
        [
            (JobState.JOB_STATE_SUCCEEDED, 0),
            (JobState.JOB_STATE_FAILED, 1),
            (JobState.JOB_STATE_CANCELLED, 1),
        ],
    )
    def test_the_outcome_of_a_watched_job_is_the_exit_code(
        self, run: Run, api: FakeApi, state: JobState.ValueType, code: int
    ) -> None:
        watched(api, state, state_reason="so it ended", traceback="Traceback: here")
        shown = run("job", "watch", "train-00")
        assert shown.exit_code == code, shown.output
        assert "Job train-00 is RUNNING" in shown.stdout
        assert "train-00/actor/0" in shown.stdout
        assert shown.stdout.splitlines()[-2].endswith("so it ended")
        assert shown.stdout.splitlines()[-1] == "Traceback: here"

    def test_a_job_that_has_ended_is_not_watched(self, run: Run, api: FakeApi) -> None:
        ended = objects.job(state=JobState.JOB_STATE_FAILED, state_reason="constructor raised")
        api.on(methods.GET_JOB, GetJobResponse(job=ended))
        shown = run("job", "watch", "train-00")
        assert (shown.exit_code, api.seen(WatchRequest)) == (1, [])
        assert "constructor raised" in shown.stdout

    def test_a_watch_for_programs_is_one_event_a_line(self, run: Run, api: FakeApi) -> None:
        watched(api, JobState.JOB_STATE_SUCCEEDED)
        shown = run("job", "watch", "train-00", "-o", "json")
        assert [json.loads(line)["state"] for line in shown.stdout.splitlines()] == ["STOPPED", "SUCCEEDED"]

    def test_a_component_is_scaled(self, run: Run, api: FakeApi) -> None:
        api.on(methods.GET_JOB, GetJobResponse(job=objects.job()))
        api.on(methods.SCALE_JOB, ScaleJobResponse(job=objects.job()))
        shown = run("job", "scale", "train-00", "rollout", "4")
        assert shown.exit_code == 0
        assert "4 × rollout" in shown.stderr
        (request,) = api.seen(ScaleJobRequest)
        assert (request.name, request.component, request.workers) == ("jobs/uid-4711", "rollout", 4)

    def test_ft_a1_output_that_cannot_be_read_is_named_and_what_the_failure_kept_is_shown(
        self, run: Run, api: FakeApi
    ) -> None:
        async def gone(_: ReadJobOutputRequest) -> AsyncIterator[ReadJobOutputResponse]:
            why = "n1 is LOST (not heard of for 60.0 s): their output is on host gpu-box-9"
            yield ReadJobOutputResponse(gap=OutputGap(node_id="n1", rank=-1, code="NODE_GONE", message=why))

        job = objects.job()
        job.stderr_tail = "CUDA error: device-side assert triggered"
        api.on(methods.GET_JOB, GetJobResponse(job=job))
        api.on(methods.READ_JOB_OUTPUT, gone)
        shown = run("job", "logs", "train-00", "--rank", "3", "--attempt", "2", "--since", "10m")
        assert shown.exit_code == 1
        for part in ("n1 is LOST", "host gpu-box-9", "CUDA error: device-side assert triggered"):
            assert part in shown.stderr
        (request,) = api.seen(ReadJobOutputRequest)
        asked = request.selection
        assert (asked.rank, asked.first_attempt, asked.last_attempt, asked.since_ms) == (3, 2, 2, 600_000)


class TestPools:
    @pytest.fixture(autouse=True)
    def pool(self, api: FakeApi) -> None:
        api.on(methods.GET_POOL, GetPoolResponse(pool=objects.pool()))
        api.on(methods.UPDATE_POOL, lambda request: UpdatePoolResponse(pool=objects.pool()))

    def test_single_fields_are_changed_in_what_was_read(self, run: Run, api: FakeApi) -> None:
        assert run("pool", "set", "rlhf", "nominal.cpu=8", "pg_pool.max_dynamic=4").exit_code == 0
        (request,) = api.seen(UpdatePoolRequest)
        assert request.spec.nominal == Resources(cpu_milli=8000, memory_bytes=8 << 30)
        assert request.spec.pg_pool.max_dynamic == 4
        assert list(request.update_mask.paths) == ["nominal", "pg_pool"]
        assert request.etag == "etag-9"

    def test_null_takes_a_quota_away(self, run: Run, api: FakeApi) -> None:
        assert run("pool", "set", "rlhf", "nominal.memory=null").exit_code == 0
        assert list(api.seen(UpdatePoolRequest)[0].spec.limited) == ["cpu"]

    def test_a_file_is_the_whole_spec(self, run: Run, api: FakeApi, tmp_path: Path) -> None:
        file = tmp_path / "pool.yaml"
        file.write_text("nominal: {gpu: 2}\n")
        assert run("pool", "set", "rlhf", str(file), "--etag", "e1", "--validate").exit_code == 0
        (request,) = api.seen(UpdatePoolRequest)
        assert (list(request.spec.limited), list(request.update_mask.paths)) == (["gpu"], [])
        assert (request.etag, request.validate_only) == ("e1", True)

    @pytest.mark.parametrize("change", ["nominal.cpu=lots", "quota=1", "nominal", ".cpu=1", "nominal=["])
    def test_a_wrong_field_is_bad_input_and_nothing_is_sent(self, run: Run, api: FakeApi, change: str) -> None:
        assert run("pool", "set", "rlhf", change, "protected=true").exit_code == 2
        assert api.seen(UpdatePoolRequest) == []

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            (("nominal.cpu=8", "nominal.cpu=9"), "nominal.cpu is changed twice"),
            (("nominal={cpu: 8, cpu: 9}",), "the key 'cpu' occurs twice"),
            (("nominal.cpu=010",), "010 is 8 here"),
        ],
    )
    def test_a_change_that_says_two_things_is_refused(
        self, run: Run, api: FakeApi, changes: tuple[str, ...], why: str
    ) -> None:
        done = run("pool", "set", "rlhf", *changes)
        assert done.exit_code == 2
        assert why in done.output
        assert api.seen(UpdatePoolRequest) == []

    def test_a_change_in_between_is_said(self, run: Run, api: FakeApi) -> None:
        api.on(methods.UPDATE_POOL, refusing(EtagMismatch("pool rlhf is at version 10")))
        shown = run("pool", "set", "rlhf", "nominal.cpu=8")
        assert shown.exit_code == 1
        assert "changed since it was read" in shown.stderr

    def test_a_pool_in_use_is_deleted_only_by_force(self, run: Run, api: FakeApi) -> None:
        api.on(methods.DELETE_POOL, refusing(PoolInUse("3 jobs are in pool rlhf")))
        shown = run("pool", "delete", "rlhf")
        assert shown.exit_code == 1
        assert "--force" in shown.stderr
        api.on(methods.DELETE_POOL, DeletePoolResponse(pool=objects.pool()))
        shown = run("pool", "delete", "rlhf", "--force")
        assert shown.exit_code == 0
        assert "takes no more jobs" in shown.stderr
        assert [request.force for request in api.seen(DeletePoolRequest)] == [False, True]


def test_a_group_is_deleted_by_either_of_its_names(run: Run, api: FakeApi) -> None:
    api.on(methods.DELETE_PLACEMENT_GROUP, DeletePlacementGroupResponse())
    assert "is gone" in run("pg", "delete", "pg-7").stderr
    run("pg", "delete", "placementGroups/pg-7")
    assert {request.name for request in api.seen(DeletePlacementGroupRequest)} == {"placementGroups/pg-7"}


class TestNodes:
    def test_a_node_is_cordoned_drained_and_taken_back(self, run: Run, api: FakeApi) -> None:
        api.on(methods.CORDON_NODE, CordonNodeResponse(node=objects.node()))
        api.on(methods.DRAIN_NODE, DrainNodeResponse(node=objects.node()))
        api.on(methods.UNCORDON_NODE, UncordonNodeResponse(node=objects.node()))
        assert "Node node-1 is READY" in run("node", "cordon", "node-1").stderr
        assert run("node", "drain", "node-1", "--deadline", "30s", "--reason", "a fan", "--no-wait").exit_code == 0
        assert run("node", "uncordon", "node-1", "-q").output == ""
        (drain,) = api.seen(DrainNodeRequest)
        assert (drain.name, drain.within_ms, drain.reason) == ("nodes/node-1", 30_000, "a fan")
        assert len(api.seen(UncordonNodeRequest)) == 1

    def test_a_deadline_of_nothing_means_now_and_none_means_none(self, run: Run, api: FakeApi) -> None:
        api.on(methods.DRAIN_NODE, DrainNodeResponse(node=objects.node()))
        for stated in ((), ("--deadline", "0s"), ("--deadline", "0")):
            assert run("node", "drain", "node-1", "--no-wait", *stated).exit_code == 0
        assert [request.within_ms for request in api.seen(DrainNodeRequest)] == [0, 1, 1]

    def test_a_wrong_time_is_bad_input(self, run: Run, api: FakeApi) -> None:
        shown = run("node", "drain", "node-1", "--within", "soon")
        assert shown.exit_code == 2
        assert "within" in shown.stderr
        assert api.seen(DrainNodeRequest) == []
