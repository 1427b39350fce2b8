"""Is what is wanted told to autoscalers, over gRPC, as a page and as metrics alike?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from callboard.client.client import Client
from callboard.controller.server import Controller
from callboard.v1 import node_pb2
from callboard.wire.refusals import CallboardError
from tests.controller.support import api_at, job, options_for, pool, running
from tests.controller.test_metrics import get, labelled, scrape
from tests.support.fake_agent import FakeAgent


async def demand_of(controller: Controller) -> Any:
    url = f"http://{controller.metrics.address}/demand"
    return json.loads(await asyncio.to_thread(get, url, controller.access.token))


async def test_what_waits_is_told_in_three_ways(tmp_path: Path) -> None:
    async with running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        async with FakeAgent(controller.address, "n1", gpus=1):
            for name in ("a", "b", "c"):
                await api.submit(job(name, gpu=1000))
            await api.until(lambda event: event.subject == "jobs/a" and event.state == "RUNNING")
            page = json.loads(
                await asyncio.to_thread(get, f"http://{controller.metrics.address}/demand", controller.access.token)
            )
            figures = await scrape(controller)
            async with Client(controller.address) as client:
                (entry,) = await client.demand()
    (shown,) = page
    assert (shown["pool"], shown["count"], shown["jobs"], shown["shape"]["gpu_milli"]) == ("rlhf", 2, ["b", "c"], 1000)
    assert shown["since_time"] == entry.since_time.ToJsonString()
    assert (entry.pool, entry.count, list(entry.jobs)) == ("rlhf", 2, ["b", "c"])
    wanted = labelled(pool="rlhf", optional="false")
    assert (figures["callboard_demand_workers", wanted], figures["callboard_demand_gpus", wanted]) == (2, 2)
    assert figures["callboard_demand_workers", labelled(pool="rlhf", optional="true")] == 0


async def test_where_nothing_waits_the_page_is_empty_and_the_metrics_are_zero(tmp_path: Path) -> None:
    async with running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller, api_at(controller.address) as api:
        await api.pools.CreatePool(pool())
        assert (
            json.loads(
                await asyncio.to_thread(get, f"http://{controller.metrics.address}/demand", controller.access.token)
            )
            == []
        )
        assert (await scrape(controller))["callboard_demand_gpus", labelled(pool="rlhf", optional="false")] == 0


async def test_a_node_that_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    async with running(options_for(tmp_path)) as controller, Client(controller.address) as client:
        async with FakeAgent(controller.address, "n1", gpus=1) as agent:
            await client.get_node("n1")
            with pytest.raises(CallboardError, match="its agent is there"):
                await client.remove_node("n1")
            revision = (await client.stats()).revision
            await agent.goodbye()
            async for event in client.watch(start_revision=revision + 1, subject="nodes/n1"):
                if event.state == "LEFT":
                    break
        assert (await client.get_node("n1")).state == node_pb2.NodeState.NODE_STATE_LEFT
        await client.remove_node("n1")
        assert await client.list_nodes() == []
