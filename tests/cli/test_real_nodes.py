"""What becomes of jobs that are submitted before their nodes have joined? Real agents; PG-17."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from callboard.v1 import job_pb2
from callboard.wire.refusals import CallboardError
from tests.cli.cluster import RealCluster, job, verb
from tests.support.cgroups import limited

WAIT_S = 90.0


def needing(workers: int, name: str, wait: str) -> dict[str, Any]:
    """A job of workers with two devices each: as many nodes."""
    return job(name, workers=workers) | {"wait_for_nodes": wait}


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    with limited(cpus=1, memory_bytes=3 << 30) as inner:
        yield inner


async def test_ft_g2_an_agent_in_a_limited_group_offers_what_it_allows(groups: list[Path], bare: RealCluster) -> None:
    await bare.add_node("n0", groups=groups)
    capacity = (await bare.client.get_node("n0")).capacity
    assert (capacity.cpu_milli, capacity.memory_bytes) == (1000, 3 << 30)
    shown = await verb(bare, "node", "get", "n0")
    assert "1 CPU" in shown.stdout
    assert "3GiB" in shown.stdout
    # What it can't have there is refused, and what it can have runs there.
    await bare.client.ensure_pool("rlhf", nominal={"cpu": 8})
    with pytest.raises(CallboardError):
        await bare.client.submit(job("large", resources={"cpu": 2}))
    await (await bare.client.submit(job("fits", resources={"cpu": 1}))).running(timeout=WAIT_S)
    (worker,) = bare.processes()
    assert str(worker) in groups[0].read_text().split()


async def test_pg_17_a_job_starts_when_the_node_it_waits_for_joins(bare: RealCluster) -> None:
    await bare.add_node("n0")
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 8})
    waiting = await bare.client.submit(needing(2, "early", "60s"))
    assert waiting.state == "PENDING"
    assert "room for 1 of 2 workers" in (await waiting.explain()).summary
    await bare.add_node("n1")
    running = await waiting.running(timeout=WAIT_S)
    assert {worker.allocation.node_id for worker in running.workers} == {"n0", "n1"}


async def test_pg_17_one_that_waited_in_vain_leaves_no_ghost(bare: RealCluster) -> None:
    await bare.add_node("n0")
    await bare.client.ensure_pool("rlhf", nominal={"gpu": 8})
    waiting = await bare.client.submit(needing(2, "early", "300ms"))
    ended = await waiting.finished(timeout=WAIT_S)
    assert ended.state == job_pb2.JobState.JOB_STATE_FAILED
    assert "timed out waiting for nodes" in ended.state_reason
    assert "room for 1 of 2 workers" in ended.state_reason
    await bare.add_node("n1")
    for node_id in ("n0", "n1"):
        assert (await bare.client.get_node(node_id)).used.gpu_milli == 0
    assert await bare.client.list_placement_groups() == []
    assert bare.processes() == []
    later = await bare.client.submit(job("later", workers=2))
    await later.running(timeout=WAIT_S)
