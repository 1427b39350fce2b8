"""Who keeps session-owned jobs alive? The client that submitted them, as long as it is open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from callboard.client.calls import methods
from callboard.client.client import Client
from callboard.v1.job_pb2 import Job, JobSpec, RenewJobsRequest, RenewJobsResponse, SubmitJobRequest, SubmitJobResponse
from callboard.wire.refusals import Unavailable
from tests.support.fake_api import FakeApi


class Renewals:
    """Counts what is renewed."""

    def __init__(self, api: FakeApi) -> None:
        self.seen: list[list[str]] = []
        self.changed = asyncio.Condition()
        self.next_ms = 20
        self.error: Exception | None = None
        api.on(methods.SUBMIT_JOB, self.submit)
        api.on(methods.RENEW_JOBS, self.renew)

    def submit(self, request: SubmitJobRequest) -> SubmitJobResponse:
        return SubmitJobResponse(job=Job(uid=f"uid-{request.spec.name}", spec=JobSpec(name=request.spec.name)))

    async def renew(self, request: RenewJobsRequest) -> RenewJobsResponse:
        async with self.changed:
            self.seen.append(list(request.names))
            self.changed.notify_all()
        if self.error is not None:
            raise self.error
        return RenewJobsResponse(next_ms=self.next_ms)

    async def times(self, count: int) -> None:
        async with asyncio.timeout(90), self.changed:
            await self.changed.wait_for(lambda: len(self.seen) >= count)


@pytest.fixture
def renewals(api: FakeApi) -> Renewals:
    return Renewals(api)


def owned(name: str, lease: str = "60ms") -> dict[str, Any]:
    component = {"name": "w", "actor": "pkg.mod:Class"}
    return {"name": name, "pool": "rlhf", "owner": {"session": {"lease": lease}}, "components": [component]}


async def test_a_session_owned_job_is_renewed_until_the_client_is_closed(api: FakeApi, renewals: Renewals) -> None:
    client = Client(api.address)
    await client.submit(owned("a", "30s"))
    await renewals.times(3)
    await client.submit(owned("b", "30s"))
    async with asyncio.timeout(90), renewals.changed:
        await renewals.changed.wait_for(lambda: renewals.seen[-1] == ["jobs/uid-a", "jobs/uid-b"])
    await client.close()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "callboard session"] == []


async def test_a_detached_job_is_nobodys_business(api: FakeApi, renewals: Renewals, client: Client) -> None:
    await client.submit({**owned("a"), "owner": "detached"})
    assert client._sessions.kept == ()


async def test_a_controller_that_is_away_is_asked_again(renewals: Renewals, client: Client) -> None:
    renewals.error = Unavailable("restarting")
    await client.submit(owned("a", "1s"))
    await renewals.times(2)
    renewals.error = None
    await renewals.times(len(renewals.seen) + 2)


async def test_jobs_that_ended_are_not_renewed(renewals: Renewals, client: Client) -> None:
    renewals.next_ms = 0
    await client.submit(owned("a"))
    await renewals.times(1)
    async with asyncio.timeout(90):
        await asyncio.wait([client._sessions._task] if client._sessions._task else [])
    assert client._sessions.kept == ()
    assert len(renewals.seen) == 1
