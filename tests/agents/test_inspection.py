"""What does a node tell of the variables of its workers? No more than a message carries, and what a message can."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from callboard.agents.inspection import ENVIRONMENTS_BYTES, Inspector
from callboard.v1 import agent_pb2, inspection_pb2
from tests.support.fake_controller import start_worker

MASK = "********"


def starting(rank: int, component: str, variables: dict[str, str]) -> Any:
    """A worker whose host can't be asked yet."""
    command = start_worker("Plain", generation=rank + 1)
    command.worker.rank, command.worker.component = rank, component
    command.members.add(name=f"{component}-member")
    plan = {"secrets": ["TOKEN"]}
    order = SimpleNamespace(command=command, plan=plan, launch=SimpleNamespace(variables=variables))
    return SimpleNamespace(
        order=order, process=None, hosted=None, footprint=SimpleNamespace(peak_bytes=0), gone=asyncio.Event()
    )


async def inspected(workers: list[Any], **ask: Any) -> inspection_pb2.NodeInspection:
    table: Any = SimpleNamespace(all=lambda: workers)
    unused: Any = None
    inspector = Inspector(table, runtime=unused, processes=unused, inventory=agent_pb2.Inventory(simulated=True))
    return await inspector.inspect(inspection_pb2.InspectionAsk(**ask))


async def test_many_large_environments_are_told_as_far_as_an_answer_carries_them() -> None:
    variables = {f"V{number}": "x" * 1000 for number in range(1000)}
    seen = await inspected([starting(rank, "w", variables) for rank in range(5)], environment=True)
    assert [len(worker.environment) for worker in seen.workers] == [1000, 1000, 1000, 0, 0]
    assert seen.ByteSize() < ENVIRONMENTS_BYTES + 1000
    assert list(seen.unknown) == [
        "the variables of 2 workers are too much for one answer; ask for one of them",
    ]


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        ({}, [("a", 0), ("a", 1), ("b", 0)]),
        ({"component": "a"}, [("a", 0), ("a", 1)]),
        ({"component": "b-member"}, [("b", 0)]),
        ({"rank": 0}, [("a", 0), ("b", 0)]),
        ({"component": "a", "rank": 1}, [("a", 1)]),
        ({"component": "c"}, []),
        ({"job_id": "another"}, []),
    ],
)
async def test_one_can_be_asked_for(ask: dict[str, Any], found: list[tuple[str, int]]) -> None:
    seen = await inspected([starting(0, "a", {}), starting(1, "a", {}), starting(0, "b", {})], **ask)
    assert [(each.worker.component, each.worker.rank) for each in seen.workers] == found
    assert all(not each.environment for each in seen.workers)


async def test_a_variable_that_is_not_utf8_is_told_and_a_secret_is_not() -> None:
    seen = await inspected([starting(0, "w", {"BAD": "\udcff\udcfe!", "TOKEN": "\udcff"})], environment=True)
    assert dict(seen.workers[0].environment) == {"BAD": r"\udcff\udcfe!", "TOKEN": MASK}
