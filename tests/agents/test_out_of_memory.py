"""Is a worker that the kernel ends for lack of memory reported as that, with its peak? In a real memory cgroup."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.test_program import Program, program
from tests.support.fake_controller import FakeController, start_worker

__all__ = ["program"]  # the fixture

CGROUPS = Path("/sys/fs/cgroup")

LIMIT = 384 << 20
"""Bytes for the agent and its workers: an agent needs less than a third of it."""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup with a limit; its path. What runs in it is gone at the end."""
    name = f"callboard-test-{secrets.token_hex(4)}"
    version_1 = CGROUPS / "memory"
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (CGROUPS, "memory.max")
    group = parent / name
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"memory cgroups can't be made here: {error}")
    yield group
    group.rmdir()


async def test_an_end_for_lack_of_memory_is_reported_with_the_peak(
    controller: FakeController, program: Program, small_group: Path
) -> None:
    agent = await program()
    (small_group / "cgroup.procs").write_text(str(agent.pid))
    await controller.session()
    start = start_worker("Plain", entry="run")
    start.actor = "tests.support.group_actors:Hog"
    start.allocation.resources.memory_bytes = 64 << 20
    assert (await controller.do(start_worker=start)).HasField("worker_ready")
    exited = await controller.said("worker_exited")
    assert exited.out_of_memory
    assert 64 << 20 < exited.peak_memory_bytes < 2 * LIMIT
    assert exited.message.startswith("out of memory: the kernel ended it (killed by signal 9 (SIGKILL))")
    assert "it asked for 64MiB" in exited.message
    agent.terminate()
    assert await agent.wait() == 0
