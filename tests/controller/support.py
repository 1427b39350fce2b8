"""What the controller's tests share: options that suit a test, stubs of every service, and short specs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.security.dialing import open_channel
from callboard.v1 import (
    common_pb2,
    event_pb2,
    event_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    node_pb2_grpc,
    placement_group_pb2_grpc,
    policy_pb2,
    pool_pb2,
    pool_pb2_grpc,
    scheduler_pb2_grpc,
)
from callboard.wire.errors import parse_error
from callboard.wire.refusals import CallError
from tests.support.fake_agent import FakeAgent

GIB = 1 << 30


def options_for(directory: Path, **fields: Any) -> ControllerOptions:
    """Options of a controller in a test: a free port, its own state, no waiting."""
    stated: dict[str, Any] = {"listen": "127.0.0.1:0", "state_dir": directory / "state", "stop_grace_ms": 500}
    return ControllerOptions(**(stated | fields))


@asynccontextmanager
async def running(options: ControllerOptions) -> AsyncIterator[Controller]:
    """A controller in this process."""
    controller = Controller(options)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


@dataclass(frozen=True)
class Api:
    """Stubs of every service on one channel."""

    channel: grpc.aio.Channel
    jobs: Any
    pools: Any
    nodes: Any
    groups: Any
    scheduler: Any
    events: Any

    async def submit(self, spec: job_pb2.JobSpec, **fields: Any) -> job_pb2.Job:
        """Submits a job."""
        response: job_pb2.SubmitJobResponse = await self.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec, **fields))
        return response.job

    async def job(self, name: str) -> job_pb2.Job:
        """One job."""
        response: job_pb2.GetJobResponse = await self.jobs.GetJob(job_pb2.GetJobRequest(name=f"jobs/{name}"))
        return response.job

    async def until(self, selects: Callable[[event_pb2.Event], bool], *, start: int = 1) -> event_pb2.Event:
        """The first event that ``selects``, from the start of the log on."""
        watch = self.events.Watch(event_pb2.WatchRequest(start_revision=start))
        try:
            async for response in watch:
                for event in response.events:
                    if selects(event):
                        found: event_pb2.Event = event
                        return found
        finally:
            watch.cancel()
        raise AssertionError("the watch ended")

    async def until_job(self, name: str, state: str, *, start: int = 1) -> event_pb2.Event:
        """Waits until a job is in a state."""
        return await self.until(lambda event: event.subject == f"jobs/{name}" and event.state == state, start=start)


@asynccontextmanager
async def api_at(address: str) -> AsyncIterator[Api]:
    """Stubs for the controller at ``address``."""
    async with open_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield Api(
            channel,
            job_pb2_grpc.JobServiceStub(channel),
            pool_pb2_grpc.PoolServiceStub(channel),
            node_pb2_grpc.NodeServiceStub(channel),
            placement_group_pb2_grpc.PlacementGroupServiceStub(channel),
            scheduler_pb2_grpc.SchedulerServiceStub(channel),
            event_pb2_grpc.EventServiceStub(channel),
        )


async def refusal_of(call: Any) -> CallError:
    """What a call that must fail was refused with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return parse_error(error)
    raise AssertionError(f"it was not refused: {answer}")


def job(name: str, *, cpu: int = 1000, gpu: int = 0, pool: str = "rlhf", **fields: Any) -> job_pb2.JobSpec:
    """A job of one worker; amounts in milli."""
    component = job_pb2.ComponentSpec(
        name="w", actor="pkg.workers:Worker", resources=common_pb2.Resources(cpu_milli=cpu, gpu_milli=gpu)
    )
    return job_pb2.JobSpec(**({"name": name, "pool": pool, "components": [component]} | fields))


def pool(name: str = "rlhf", *, cpu: int = 6000, gpu: int = 6000, **spec: Any) -> pool_pb2.CreatePoolRequest:
    """A pool with a quota in milli and a placement-group pool."""
    stated: dict[str, Any] = {
        "nominal": common_pb2.Resources(cpu_milli=cpu, gpu_milli=gpu),
        "limited": ["cpu", "gpu"],
        "pg_pool": pool_pb2.PlacementGroupPool(max_dynamic=8),
    }
    return pool_pb2.CreatePoolRequest(pool_id=name, spec=pool_pb2.PoolSpec(**(stated | spec)))


def quick_policy(cancel_ms: int = 50, kill_ms: int = 100, **fields: Any) -> policy_pb2.PreemptionPolicy:
    """A policy with short timeouts."""
    return policy_pb2.PreemptionPolicy(cancel_timeout_ms=cancel_ms, kill_timeout_ms=kill_ms, **fields)


async def all_done(*tasks: asyncio.Task[Any]) -> None:
    """Waits for tasks, whatever becomes of them."""
    if tasks:
        await asyncio.wait(tasks)


async def refused_join(agent: FakeAgent) -> CallError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await agent.join()
    await agent.cut()
    return parse_error(caught.value)
