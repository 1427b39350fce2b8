"""What does a client do whose controller is older than it?"""

from __future__ import annotations

from typing import Any

import pytest

from callboard._version import __version__
from callboard.cli.show.failures import failure_of
from callboard.client.calls import methods
from callboard.client.calls.connection import Connection
from callboard.client.calls.methods import Method
from callboard.client.client import Client
from callboard.client.errors import OlderController
from callboard.v1 import job_pb2, node_pb2, pool_pb2, scheduler_pb2
from callboard.v1.job_pb2 import Job, JobSpec, ListJobsResponse
from callboard.v1.node_pb2 import ListNodesResponse, Node, NodeState
from callboard.v1.pool_pb2 import ListPoolsResponse, Pool
from callboard.v1.scheduler_pb2 import GetOverviewRequest, GetStatsResponse, Stats
from tests.support.fake_api import ALL_METHODS, FakeApi, unreleased

FILES = (job_pb2, node_pb2, pool_pb2, scheduler_pb2)

READY, LEFT = NodeState.NODE_STATE_READY, NodeState.NODE_STATE_LEFT


def test_the_released_api_lacks_some_calls_and_has_the_lists() -> None:
    assert methods.GET_OVERVIEW.full_path in unreleased()
    lists = (methods.GET_STATS, methods.LIST_NODES, methods.LIST_POOLS, methods.LIST_JOBS)
    assert not {each.full_path for each in lists} & unreleased()


@pytest.mark.parametrize("path", sorted(unreleased()))
async def test_a_call_that_the_controller_lacks_says_which_version_has_it(api: FakeApi, path: str) -> None:
    api.lacks = unreleased()
    connection = Connection(api.address, timeout_s=10)
    with pytest.raises(OlderController, match=f"{path.rpartition('.')[2]}.*version {__version__}") as caught:
        await call(connection, ALL_METHODS[path])
    await connection.close()
    shown = failure_of(caught.value)
    assert path.rpartition(".")[2] in shown.why
    assert __version__ in shown.why
    assert __version__ in shown.remedy


async def call(connection: Connection, method: Method[..., Any, Any]) -> None:
    """As its descriptor says: one answer, a stream of them, or streams both ways."""
    service, _, name = method.path.partition("/")
    (described,) = (
        file.DESCRIPTOR.services_by_name[service].methods_by_name[name]
        for file in FILES
        if service in file.DESCRIPTOR.services_by_name
    )
    if described.client_streaming:
        async with connection.both_ways(method) as stream:
            await stream.write(method.request())
            async for _ in stream:
                pass
    elif described.server_streaming:
        async for _ in connection.stream(method, method.request(), timeout_s=10):
            pass
    else:
        await connection.call(method, method.request())


async def test_an_overview_is_made_of_the_lists(api: FakeApi, client: Client) -> None:
    states = [READY, LEFT, READY, READY]
    nodes = [Node(name=f"nodes/n{rank}", rank=rank, state=state) for rank, state in enumerate(states)]
    nodes[0].ray_node_id = "feed"
    api.on(methods.LIST_NODES, ListNodesResponse(nodes=nodes))
    api.on(methods.LIST_POOLS, ListPoolsResponse(pools=[Pool(name="pools/p")]))
    api.on(methods.LIST_JOBS, ListJobsResponse(jobs=[Job(uid=f"j{i}", spec=JobSpec(name=f"j{i}")) for i in range(5)]))
    api.on(methods.GET_STATS, GetStatsResponse(stats=Stats(total_preemptions=7)))
    api.lacks = unreleased()
    seen = await client.overview(nodes=2, jobs=3)
    assert [node.name for node in seen.nodes] == ["nodes/n0", "nodes/n2"]
    assert [job.uid for job in seen.jobs] == ["j0", "j1", "j2"]
    assert (seen.more_nodes, seen.more_jobs, seen.more_pools) == (1, 2, 0)
    assert (seen.stats.total_preemptions, seen.pools[0].name, dict(seen.ray_nodes)) == (7, "pools/p", {"feed": "n0"})
    assert (await client.overview()).more_jobs == 0
    assert api.seen(GetOverviewRequest) == []
