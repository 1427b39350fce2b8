"""Agents in this process, against a controller in this process; workers are real processes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from callboard.agents.agent import run_agent
from callboard.agents.options import AgentOptions
from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.agents.system.processes import exited
from callboard.security.processes import identify, marked, process_table, read_entry
from callboard.v1 import agent_pb2
from tests.support.fake_controller import FakeController, FakeSession

StartAgent: TypeAlias = Callable[..., Awaitable[FakeSession]]


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController().serving() as serving:
        yield serving


@pytest.fixture
async def start_agent(controller: FakeController, tmp_path: Path) -> AsyncIterator[StartAgent]:
    """Starts agents with runtime "process"; at the end they must leave cleanly and leave nothing."""
    running: dict[str, asyncio.Task[int]] = {}

    async def start(node_id: str = "n0", **options: Any) -> FakeSession:
        settings: dict[str, Any] = {
            "node_id": node_id,
            "controller": controller.address,
            "runtime": "process",
            "cluster": cluster_of(tmp_path),
            "simulate_gpus": 2,
            "cpu_milli": 3000,
            "memory_bytes": 4 << 30,
            "run_dir": str(tmp_path / node_id),
            "leave_hooks_s": 0.2,
            **options,
        }
        running[node_id] = asyncio.create_task(run_agent(AgentOptions(**settings)))
        return await controller.session(node_id)

    yield start

    controller.acknowledge = True
    for node_id in running:
        everything = [report.report_id for report in controller.reports]
        await controller.sessions[node_id].send(ack=agent_pb2.Ack(report_ids=everything))
        await controller.command(node_id, shutdown=agent_pb2.Shutdown(reason="the test is over"))
    assert await asyncio.gather(*running.values()) == [0] * len(running)
    for node_id in running:
        assert_nothing_left(tmp_path / node_id)


@pytest.fixture
async def agent(start_agent: StartAgent) -> FakeSession:
    """One agent, n0, with two simulated GPUs."""
    return await start_agent()


def cluster_of(folder: Path) -> str:
    """A name for the cluster of one test. An agent finds what a dead worker of its cluster left by cluster, job and
    generation, and two tests that run at one time have workers of the same name."""
    return f"test-{hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()}"


def started_by(run_dir: Path) -> list[int]:
    """Living processes that were started for the node with this run directory."""
    table = process_table()
    found = marked(f"{AGENT_MARKER}={run_dir}", table)
    return [process.pid for process in found if not table[process.pid].gone]


def is_gone(pid: int) -> bool:
    entry = read_entry(pid)
    return entry is None or entry.gone


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that isn't ours."""
    process = identify(pid)
    if process is not None:
        await exited(process)


def assert_nothing_left(run_dir: Path) -> None:
    assert started_by(run_dir) == []
    left = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
    assert left <= {"output"}, (
        "only the output of its workers outlives it, until the controller has forgotten their jobs"
    )
