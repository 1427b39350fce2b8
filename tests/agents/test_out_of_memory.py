"""Is a worker that the kernel ends for lack of memory reported as that, with its peak? In a real memory cgroup."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.test_program import Program, program
from tests.agents.test_worker_program import shell
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
    # What ran in it was ended before; the kernel lets go of it a moment later.
    while (group / "cgroup.procs").read_text():
        time.sleep(0.01)
    group.rmdir()


async def test_a_command_whose_child_the_kernel_ends_names_that_though_it_ends_by_a_code_of_its_own(
    controller: FakeController, small_group: Path, program: Program
) -> None:
    agent = await program()
    (small_group / "cgroup.procs").write_text(str(agent.pid))
    await controller.session()
    hog = f"echo 'rank 3 takes all' >&2; python -c 'b = bytearray({2 * LIMIT})' || exit 1"
    assert (await controller.do(start_worker=shell(hog))).HasField("worker_ready")
    end = await controller.said("worker_finished")
    assert end.exit_code == 1
    assert "ended with exit code 1; while it ran, the kernel ended a process on this node for lack of" in end.traceback
    assert "rank 3 takes all" in end.stderr_tail
    agent.terminate()
    assert await agent.wait() == 0


async def test_an_end_for_lack_of_memory_is_reported_with_the_peak(
    controller: FakeController, small_group: Path, program: Program, tmp_path: Path
) -> None:
    agent = await program()
    (small_group / "cgroup.procs").write_text(str(agent.pid))
    await controller.session()
    gate = tmp_path / "gate"
    start = start_worker("Plain", entry="run", env={"GATE": str(gate)})
    start.actor = "tests.support.group_actors:Hog"
    start.allocation.resources.memory_bytes = 64 << 20
    assert (await controller.do(start_worker=start)).HasField("worker_ready")
    # The kernel takes the memory of what it ends before it writes down the most that was held: so what the agent saw
    # counts, and a look sees it.
    peak = 0
    while peak < 100 << 20:
        (worker,) = (await controller.inspect()).workers
        peak = worker.peak_memory_bytes
    gate.touch()
    exited = await controller.said("worker_exited")
    assert exited.out_of_memory
    assert peak <= exited.peak_memory_bytes < 2 * LIMIT
    assert exited.message.startswith("out of memory: the kernel ended it (killed by signal 9 (SIGKILL))")
    assert "it asked for 64MiB" in exited.message
    agent.terminate()
    assert await agent.wait() == 0
