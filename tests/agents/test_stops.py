"""What does a stop tell the worker, what does it leave, and how is an end told? Real agents and processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from callboard import StopNotice
from callboard.agents.host.worker_process import checkpoint_answer, noticed
from callboard.agents.system.processes import exited
from callboard.agents.worker.verdict import how_it_ended, usual_causes
from callboard.security.processes import identify
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent
from tests.agents.test_workers import LONG_MS, ready, starting, stopped
from tests.support.fake_controller import FakeController, stop_worker

NOTICE = StopNotice("preempted by b", "preempt", 0.0)


def _annotated(what: StopNotice) -> object:
    return what


HOOKS = [
    (lambda: (), ()),
    (lambda job: (job,), ("j",)),
    (lambda notice: (notice,), (NOTICE,)),
    (lambda job, notice: (job, notice), ("j", NOTICE)),
    (lambda job, told: (job, told), ("j", NOTICE)),
    (lambda job, path="here": (job, path), ("j", "here")),
    (lambda job, *, notice: (job, notice), ("j", NOTICE)),
    (lambda *all_of_it: all_of_it, ("j",)),
    (_annotated, NOTICE),
]


@pytest.mark.parametrize(("hook", "given"), HOOKS)
def test_ft_a5_old_and_new_signatures_of_hooks_work(hook: object, given: object) -> None:
    assert noticed(hook, "j", NOTICE)() == given  # type: ignore[arg-type]


@pytest.mark.usefixtures("agent")
async def test_ft_a5_hooks_are_told_why_and_until_when(controller: FakeController) -> None:
    start = starting("Noticed")
    assert list((await ready(controller, start)).hooks) == ["cancel", "checkpoint"]
    order = stop_worker(start, checkpoint=True, cancel_timeout_ms=LONG_MS)
    order.kind, order.reason = agent_pb2.STOP_KIND_DRAIN, "repair"
    report = await controller.do(stop_worker=order)
    told = json.loads(report.worker_stopped.checkpoint.data)
    assert told == [["repair", "drain", True], "job-1", "drain"]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(("left", "why"), [("odd", "returned int, not bytes or a URI"), ("huge", "2097152 bytes")])
async def test_ft_a4_a_checkpoint_that_is_none_is_reported_as_lost(
    controller: FakeController, left: str, why: str
) -> None:
    start = starting("Yielding", left, entry="run")
    await ready(controller, start)
    end = await stopped(controller, start, checkpoint=True, cancel_timeout_ms=LONG_MS)
    assert why in end.checkpoint_lost
    assert not end.HasField("checkpoint")


@pytest.mark.parametrize(("left", "why"), [("x" * (2 << 20), "2097152 bytes"), ("\ud800", "half of a surrogate pair")])
def test_ft_a4_a_text_that_no_message_carries_is_no_checkpoint(left: str, why: str) -> None:
    assert why in checkpoint_answer(left)["error"]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("left", "within_ms", "why"),
    [
        ("raises", LONG_MS, "checkpoint() raised OSError: No space left on device"),
        ("never", 400, "checkpoint() took too long"),
        ("dies", LONG_MS, "its process ended before it left one: exit code 9"),
    ],
)
async def test_ft_a4_a_checkpoint_that_fails_or_never_ends_is_reported_as_lost(
    controller: FakeController, left: str, within_ms: int, why: str
) -> None:
    start = starting("Yielding", left, entry="run")
    await ready(controller, start)
    end = await stopped(controller, start, checkpoint=True, cancel_timeout_ms=within_ms)
    assert end.checkpoint_lost == why
    assert not end.HasField("checkpoint")


@pytest.mark.usefixtures("agent")
async def test_ft_a4_a_stop_at_once_says_what_it_lost(controller: FakeController) -> None:
    start = starting("Yielding", entry="run")
    await ready(controller, start)
    end = await stopped(controller, start, checkpoint=True, cancel_timeout_ms=0)
    assert end.checkpoint_lost == "it was stopped at once, without time for its hooks"


@pytest.mark.usefixtures("agent")
async def test_ft_e4_what_a_worker_started_gets_the_signal_and_its_time(
    controller: FakeController, tmp_path: Path
) -> None:
    start = starting("SavesOnSignal", str(tmp_path / "saved"), stop_signal="SIGTERM")
    await ready(controller, start)
    end = await stopped(controller, start, cancel_timeout_ms=LONG_MS)
    assert (tmp_path / "saved").read_text() == "saved"
    assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
async def test_ft_e4_its_own_process_gets_the_signal_that_it_handles(
    controller: FakeController, tmp_path: Path, name: str
) -> None:
    start = starting("SavesItself", str(tmp_path / "saved"), name, entry="run", stop_signal=name)
    await ready(controller, start)
    end = await stopped(controller, start, cancel_timeout_ms=LONG_MS)
    assert (tmp_path / "saved").read_text() == "saved"
    assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE


STATUSES = [
    ("import os; os._exit(42)", "exit code 42", "os._exit"),
    ("import os; os._exit(139)", "exit code 139", "SIGSEGV"),
    ("import os; os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)", "out-of-memory"),
    ("import os; os.kill(os.getpid(), 11)", "killed by signal 11 (SIGSEGV)", "native code"),
    ("import os; os.kill(os.getpid(), 7)", "killed by signal 7 (SIGBUS)", "/dev/shm"),
]


@pytest.mark.parametrize(("program", "how", "cause"), STATUSES)
@pytest.mark.parametrize("reaped", [False, True], ids=["", "reaped at once by another process"])
async def test_ft_a3_the_exit_status_of_a_process_that_is_no_child(
    program: str, how: str, cause: str, reaped: bool
) -> None:
    """As of a Ray worker, whose parent is the raylet."""
    ends = f"import sys; sys.stdin.readline(); {program}"
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {ends!r}])\n"
        "print(child.pid, flush=True)\n" + ("child.wait()\n" if reaped else "import time; time.sleep(10**6)\n")
    )
    with subprocess.Popen(  # noqa: ASYNC220 - of milliseconds
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as middle:
        assert middle.stdin is not None
        assert middle.stdout is not None
        process = identify(int(middle.stdout.readline()))
        assert process is not None
        watching = asyncio.ensure_future(exited(process))
        await asyncio.sleep(0)  # its pidfd is open
        middle.stdin.write("go\n")
        middle.stdin.flush()
        code = await watching
        os.kill(middle.pid, signal.SIGKILL)
    if code is None:
        pytest.skip("reaped before it was seen, and this kernel keeps no exit status (Linux 6.15 does)")
    assert how_it_ended(code) == how
    assert cause in usual_causes(code)


def _stop(*pids: int) -> None:
    """Stop them, and wait until the kernel has."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            os.sched_yield()


@pytest.mark.usefixtures("agent")
async def test_a_worker_that_somebody_stopped_is_woken_to_leave_its_checkpoint(controller: FakeController) -> None:
    start = starting("Yielding", "bytes", entry="run")
    _stop((await ready(controller, start)).pid)
    end = await stopped(controller, start, checkpoint=True, cancel_timeout_ms=LONG_MS)
    assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
    assert end.checkpoint.data


@pytest.mark.parametrize("stopped_again", [False, True], ids=["by its agent's end", "stopped again while it is asked"])
async def test_a_stopped_worker_does_not_outlive_its_agent(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path, stopped_again: bool
) -> None:
    """`start_agent` lets the agent leave, and looks for whatever of it is left."""
    await start_agent()
    start = starting("Stubborn", str(tmp_path / "child"))
    worker, child = (await ready(controller, start)).pid, int((tmp_path / "child").read_text())
    _stop(worker, child)
    if not stopped_again:
        return
    hanging = starting("Hanging", "sleep", rank=1, generation=2, entry="run")
    other = (await ready(controller, hanging)).pid
    process = identify(other)
    assert process is not None
    await controller.command(command_id="c", stop_worker=stop_worker(hanging, cancel_timeout_ms=500))
    _stop(other)
    assert (await controller.report("c")).worker_stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
