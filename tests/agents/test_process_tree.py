"""How is a process with everything it started ended, and how is that proved?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from callboard.agents.system.process_tree import NotOurProcess, end_tree, send_signal, wait_gone
from callboard.security.processes import (
    ProcessId,
    companions,
    descendants,
    identify,
    marked,
    process_table,
    read_entry,
    start_ms,
)
from tests.support.actors import STUBBORN_CHILD, wait_for_file

_SUBREAPER = """
import ctypes, subprocess, sys, time
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
print("ready", flush=True)
time.sleep(10**6)
"""


def soon() -> float:
    """A deadline no test should need."""
    return time.monotonic() + 10


class Children:
    """Processes of one test."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **options: object) -> ProcessId:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
        self.started.append(child)
        found = identify(child.pid)
        assert found is not None
        return found

    def sleeper(self, **options: object) -> ProcessId:
        return self.start("sleep", "1000", **options)


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for child in made.started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def stubborn(children: Children, tmp_path: Path) -> tuple[ProcessId, ProcessId]:
    """A subreaper, and its double-forked child that ignores SIGTERM in a session of its own."""
    file = str(tmp_path / "child")
    root = children.start(sys.executable, "-c", _SUBREAPER, STUBBORN_CHILD, file)
    child = identify(int(wait_for_file(file)))
    assert child is not None
    pipe = children.started[-1].stdout
    assert pipe is not None
    assert pipe.readline() == b"ready\n"
    return root, child


def test_a_double_forked_child_in_its_own_session_goes_with_its_tree(children: Children, tmp_path: Path) -> None:
    root, child = stubborn(children, tmp_path)
    assert child in descendants([root], process_table())

    end = end_tree([root], deadline=soon())

    assert end.gone
    assert end.killed == 2
    assert wait_gone([root, child], time.monotonic()) == frozenset()


def test_a_zombie_counts_as_gone(children: Children) -> None:
    root = children.sleeper()
    os.kill(root.pid, signal.SIGKILL)

    end = end_tree([root], deadline=soon())

    entry = read_entry(root.pid)
    assert entry is not None, "its parent, this test, hasn't reaped it"
    assert entry.gone
    assert end.gone


def test_a_stopped_tree_is_ended_too(children: Children) -> None:
    root = children.sleeper()
    os.kill(root.pid, signal.SIGSTOP)

    assert end_tree([root], deadline=soon()).gone


def test_a_reused_pid_is_left_alone(children: Children) -> None:
    stranger = children.sleeper()
    recorded = ProcessId(stranger.pid, stranger.start_ticks - 1)

    end = end_tree([recorded], deadline=soon())

    assert end.gone
    assert end.killed == 0
    assert not send_signal(recorded, signal.SIGKILL)
    assert wait_gone([stranger], time.monotonic()) == {stranger}


@pytest.mark.parametrize("pid", [0, 1, pytest.param(os.getpid(), id="the agent")])
def test_pid_1_and_the_agent_itself_are_refused(pid: int, children: Children) -> None:
    """SE-07: a rogue stop must not reach what the agent didn't start."""
    root = children.sleeper()
    forbidden = ProcessId(pid, 0 if pid == 0 else read_entry(pid).id.start_ticks)  # type: ignore[union-attr]

    with pytest.raises(NotOurProcess):
        end_tree([root, forbidden], deadline=soon())
    with pytest.raises(NotOurProcess):
        send_signal(forbidden, signal.SIGKILL)

    assert wait_gone([root], time.monotonic()) == {root}, "nothing was done"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_refused(children: Children) -> None:
    foreign = children.sleeper(user=65534)
    # Root could signal it; an agent of that user could not, and neither should.
    with pytest.raises(NotOurProcess, match="another user"):
        send_signal(foreign, signal.SIGKILL)


def test_a_marker_finds_what_lost_its_parents(children: Children, tmp_path: Path) -> None:
    marker = f"CALLBOARD_TEST={tmp_path}"
    name, value = marker.split("=", 1)
    lost = children.sleeper(env={**os.environ, name: value})
    other = children.sleeper(env={**os.environ, name: value + "x"})

    end = end_tree([], deadline=soon(), search=lambda table: marked(marker, table))

    assert end.killed == 1
    assert wait_gone([lost, other], time.monotonic()) == {other}


def test_group_and_session_find_the_children_of_a_dead_leader(children: Children) -> None:
    leader = children.start("sh", "-c", "sleep 1000 & echo $!; exec sleep 1000", start_new_session=True)
    pipe = children.started[-1].stdout
    assert pipe is not None
    member = identify(int(pipe.readline()))
    os.kill(leader.pid, signal.SIGKILL)
    children.started[-1].wait()

    end = end_tree([leader], deadline=soon(), search=lambda table: companions(leader, table))

    assert end.killed == 1
    assert member not in {entry.id for entry in process_table().values() if not entry.gone}


def test_a_deadline_that_has_passed_tells_what_is_left(children: Children) -> None:
    """A process that can't be killed in time isn't free: whoever asks hears of it (QUARANTINED)."""
    root = children.sleeper()

    end = end_tree([root], deadline=time.monotonic() - 1)

    # It was killed, but no time was left for the proof; with luck the kernel was faster.
    assert end.left in {(root,), ()}
    assert end_tree([root], deadline=soon()).gone


def test_the_start_time_is_wall_clock_milliseconds(children: Children) -> None:
    root = children.sleeper()
    assert abs(start_ms(root) / 1000 - time.time()) < 5
