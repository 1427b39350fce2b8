"""Is an end for lack of memory told as one, and no other end?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.agents.system.cgroups import Cgroups
from callboard.agents.system.usage import Usage, cpu_milli, oom_kills, usage_of
from callboard.agents.worker.verdict import RECENT_S, Held, MemoryWatch, exit_verdict
from callboard.security.processes import ProcessId, identify
from tests.support.cgroups import made_up

GIB = 1 << 30
KILLED = "killed by signal 9 (SIGKILL)"


class TestVerdict:
    @pytest.mark.parametrize("message", [KILLED, "process 7 ended"])
    def test_a_kill_of_the_kernel_is_out_of_memory_with_the_peak(self, message: str) -> None:
        verdict = exit_verdict(message, oom_kills=1, peak_bytes=3 * GIB, asked_bytes=2 * GIB)
        assert verdict.out_of_memory
        assert verdict.message == (
            f"out of memory: the kernel ended it ({message}); its processes held up to 3GiB, it asked for 2GiB"
        )
        assert verdict.peak_bytes == 3 * GIB

    @pytest.mark.parametrize(
        "message", ["exit code 1", "killed by signal 11 (SIGSEGV)", "killed by signal 15 (SIGTERM)"]
    )
    def test_another_end_at_the_same_time_is_not(self, message: str) -> None:
        verdict = exit_verdict(message, oom_kills=1, peak_bytes=GIB, asked_bytes=0)
        assert not verdict.out_of_memory
        assert verdict.message == message

    def test_a_timer_of_its_own_code_is_named(self) -> None:
        verdict = exit_verdict("killed by signal 14", oom_kills=0, peak_bytes=0, asked_bytes=0, code=-signal.SIGALRM)
        assert "a timer of its own code ran out" in verdict.message

    def test_a_kill_by_somebody_else_is_not_but_says_the_peak(self) -> None:
        verdict = exit_verdict(KILLED, oom_kills=0, peak_bytes=GIB, asked_bytes=0)
        assert (verdict.out_of_memory, verdict.message) == (False, f"{KILLED}; its processes held up to 1GiB")

    def test_a_kill_of_rays_memory_monitor_is(self) -> None:
        ray = "Task was killed due to the node running low on memory.\nMemory on the node was 95%"
        verdict = exit_verdict("process 7 ended", oom_kills=0, peak_bytes=GIB, asked_bytes=0, ray_says=ray)
        assert verdict.out_of_memory
        assert verdict.message.startswith("out of memory: Ray's memory monitor ended it; its processes held up to 1GiB")
        assert "Memory on the node" not in verdict.message

    @pytest.mark.parametrize("ray", ["", "Task was killed due to the node running low on memory."])
    def test_who_held_more_is_named(self, ray: str) -> None:
        hog = Held("eater/hog/0", 7 * GIB, GIB, 0.0)
        small = exit_verdict(KILLED, oom_kills=1, peak_bytes=GIB, asked_bytes=0, ray_says=ray, larger=hog)
        assert "; eater/hog/0 held most on the node, 7GiB, and asked for 1GiB" in small.message
        grown = exit_verdict(KILLED, oom_kills=1, peak_bytes=8 * GIB, asked_bytes=0, ray_says=ray, larger=hog)
        assert "eater" not in grown.message, "it grew beyond that one after the last look"
        other = exit_verdict(KILLED, oom_kills=0, peak_bytes=GIB, asked_bytes=0, larger=hog)
        assert "eater" not in other.message, "not for lack of memory"


class TestLauncher:
    def test_the_end_of_one_whose_child_may_have_been_ended_for_lack_of_memory_names_that(self) -> None:
        hog = Held("other/w/0", 4 * GIB, 0, 0.0)
        message = "`torchrun train.py` ended with exit code 1"
        verdict = exit_verdict(message, oom_kills=1, peak_bytes=GIB, asked_bytes=2 * GIB, larger=hog, is_command=True)
        assert verdict.message == (
            f"{message}; while it ran, the kernel ended a process on this node for lack of memory, perhaps one that it "
            "had started; its processes held up to 1GiB, it asked for 2GiB; other/w/0 held most on the node, 4GiB"
        )
        assert not verdict.out_of_memory, "nobody knows whose it was"
        none = exit_verdict(message, oom_kills=0, peak_bytes=GIB, asked_bytes=0, is_command=True)
        assert none.message == message


class TestMemoryWatch:
    def test_the_largest_is_known_for_a_while_after_its_end(self) -> None:
        watch = MemoryWatch()
        watch.see(Held("a/w/0", 3, 0, 10.0))
        watch.see(Held("b/w/0", 2, 0, 10.0))
        assert watch.larger_than("a/w/0", 10.0) is None
        largest = watch.larger_than("b/w/0", 10.0)
        assert largest is not None
        assert largest.name == "a/w/0"
        watch.see(Held("b/w/0", 1, 0, 10.0 + RECENT_S))
        assert watch.larger_than("b/w/0", 10.0 + RECENT_S) is not None
        watch.see(Held("b/w/0", 1, 0, 10.1 + RECENT_S))
        assert watch.larger_than("b/w/0", 10.1 + RECENT_S) is None

    def test_what_is_seen_last_counts(self) -> None:
        watch = MemoryWatch()
        for name, held, at_s in (("a/w/0", 9, 0.0), ("b/w/0", 5, 0.0), ("a/w/0", 4, 1.0)):
            watch.see(Held(name, held, 0, at_s))
        largest = watch.larger_than("a/w/0", 1.0)
        assert largest is not None
        assert largest.name == "b/w/0"


class TestKernel:
    V2 = {"fs": "cgroup2"}  # noqa: RUF012

    def test_it_counts_in_the_groups_around_this_process(self, tmp_path: Path) -> None:
        counted = {
            "fs/system.slice/agent.service/memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2",
            "fs/system.slice/memory.events": "oom_kill 3",
        }
        assert oom_kills(made_up(tmp_path, "0::/system.slice/agent.service\n", self.V2, {})) == 0
        assert oom_kills(made_up(tmp_path, "0::/system.slice/agent.service\n", self.V2, counted)) == 3

    def test_it_counts_at_the_root_of_a_container(self, tmp_path: Path) -> None:
        own = "0::/../../kubepods/x\n"
        assert oom_kills(made_up(tmp_path, own, self.V2, {"fs/memory.events": "oom_kill 1"})) == 1

    def test_it_counts_in_groups_of_version_1(self, tmp_path: Path) -> None:
        content = "oom_kill_disable 0\nunder_oom 0\noom_kill 5"
        mounts = {"fs/cpu": "cpu", "fs/memory": "memory"}
        files = {"fs/memory/docker/abc/memory.oom_control": content}
        assert oom_kills(made_up(tmp_path, "9:cpu:/a\n4:memory:/docker/abc\n", mounts, files)) == 5

    def test_a_kernel_that_does_not_tell_counts_as_none(self, tmp_path: Path) -> None:
        assert oom_kills(Cgroups(tmp_path / "missing", tmp_path / "missing")) == 0


class TestUsage:
    def test_memory_of_a_tree_is_what_its_processes_hold(self) -> None:
        code = "import sys; held = bytearray(64 << 20); print('held', flush=True); sys.stdin.read()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            process = identify(child.pid)
            assert process is not None
            found = usage_of([process])
            assert 64 << 20 < found.memory_bytes <= found.peak_bytes < 1 << 30
            assert usage_of([process, ProcessId(child.pid, 1)]).memory_bytes < 2 * found.memory_bytes, "a reused pid"
            child.kill()
        assert usage_of([process]).memory_bytes == 0

    def test_cpu_is_what_was_used_between_two_looks(self) -> None:
        second = os.sysconf("SC_CLK_TCK")
        before = Usage(cpu_ticks=100, at_s=10.0)
        assert cpu_milli(before, Usage(cpu_ticks=100 + second, at_s=12.0)) == 500
        assert cpu_milli(before, Usage(cpu_ticks=0, at_s=12.0)) == 0
        assert cpu_milli(before, before) == 0
