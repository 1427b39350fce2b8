"""Which controller is meant?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from callboard.client.clusters import (
    ClusterProcess,
    ClusterRecord,
    cluster_directory,
    find_controller,
    read_record,
    running_clusters,
    with_port,
    write_record,
)
from callboard.client.errors import NoController, SeveralControllers
from callboard.model.faults import InvalidInput
from callboard.security.places import UnsafeRunDirectory, make_private, run_directory
from callboard.security.processes import ProcessId, descendants, identify, process_table


def register(base: Path, name: str, address: str, process: ProcessId) -> ClusterRecord:
    directory = cluster_directory(name, base)
    directory.mkdir(parents=True)
    record = ClusterRecord(
        name=name,
        controller=address,
        directory=directory,
        processes=(ClusterProcess(role="controller", process=process),),
    )
    write_record(record)
    return record


def ourselves() -> ProcessId:
    process = identify(os.getpid())
    assert process is not None
    return process


def test_a_stated_address_wins_over_the_environment_and_over_what_runs_here(run_dir: Path) -> None:
    register(run_dir, "a", "127.0.0.1:7700", ourselves())
    environ = {"CALLBOARD_CONTROLLER": "10.0.0.2:7700", "CALLBOARD_RUN_DIR": str(run_dir)}
    assert find_controller("10.0.0.1:9", environ).address == "10.0.0.1:9"
    assert find_controller(None, environ).address == "10.0.0.2:7700"
    assert find_controller("", environ).source == "from CALLBOARD_CONTROLLER"


@pytest.mark.parametrize(
    "stated",
    ["http://h:7700", "h:99999", "h:0", "h:", "h:x", ":7700", ",,", "a b:1", "h:1:2", "unix:/x", "h:1/x", "h:-1"],
)
def test_what_is_no_address_is_refused_instead_of_looked_for(stated: str) -> None:
    with pytest.raises(InvalidInput, match="is not the address of a controller; write HOST:PORT"):
        find_controller(stated)


def test_the_only_one_that_runs_here_is_found(run_dir: Path) -> None:
    record = register(run_dir, "a", "127.0.0.1:7712", ourselves())
    found = find_controller()
    assert found.address == "127.0.0.1:7712"
    assert found.cluster == record


def test_a_stated_address_of_a_cluster_here_brings_its_record(run_dir: Path) -> None:
    record = register(run_dir, "a", "127.0.0.1:7712", ourselves())
    assert find_controller("127.0.0.1:7712").cluster == record


def test_two_that_run_here_are_an_error_that_lists_them(run_dir: Path) -> None:
    register(run_dir, "a", "127.0.0.1:7700", ourselves())
    register(run_dir, "b", "127.0.0.1:7701", ourselves())
    with pytest.raises(SeveralControllers) as caught:
        find_controller()
    assert caught.value.found == (("a", "127.0.0.1:7700"), ("b", "127.0.0.1:7701"))


def test_a_pid_that_another_process_has_by_now_is_a_dead_cluster(run_dir: Path) -> None:
    alive = ourselves()
    register(run_dir, "old", "127.0.0.1:7700", ProcessId(alive.pid, alive.start_ticks - 1))
    with pytest.raises(NoController) as caught:
        find_controller()
    assert caught.value.ended == (("old", "127.0.0.1:7700", str(run_dir / "old")),)


def test_a_dead_one_is_no_second_one(run_dir: Path) -> None:
    register(run_dir, "a", "127.0.0.1:7700", ourselves())
    register(run_dir, "dead", "127.0.0.1:7701", ProcessId(2**22 + 1, 1))
    assert [record.name for record in running_clusters(run_dir)] == ["a"]
    assert find_controller().address == "127.0.0.1:7700"


def test_without_a_run_directory_there_is_no_controller(run_dir: Path) -> None:
    with pytest.raises(NoController) as caught:
        find_controller()
    assert caught.value.run_directory == str(run_dir)


@pytest.mark.parametrize(
    ("stated", "full"),
    [
        ("host", "host:7700"),
        ("host:1", "host:1"),
        ("10.0.0.1", "10.0.0.1:7700"),
        ("[::1]:5", "[::1]:5"),
        ("[::1]", "[::1]:7700"),
        ("::1", "[::1]:7700"),
        ("h:1, k,", "h:1,k:7700"),
    ],
)
def test_an_address_without_a_port_gets_the_default(stated: str, full: str) -> None:
    assert with_port(stated) == full


def test_the_run_directory_is_the_first_that_is_set() -> None:
    assert run_directory({"CALLBOARD_RUN_DIR": "/x", "XDG_RUNTIME_DIR": "/y"}) == Path("/x")
    assert run_directory({"XDG_RUNTIME_DIR": "/y"}) == Path("/y/callboard")
    assert run_directory({}) == Path(f"/tmp/callboard-{os.getuid()}")


def test_a_record_reads_as_it_was_written(run_dir: Path) -> None:
    record = register(run_dir, "a", "127.0.0.1:7700", ourselves()).with_process("agent node-0", ProcessId(1, 2))
    write_record(record)
    assert read_record(record.directory) == record


def test_a_run_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeRunDirectory, match="written by others"):
        make_private(tmp_path)


def test_a_link_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafeRunDirectory, match="not a directory"):
        make_private(tmp_path / "link")


_ENDS_ITS_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_runs_until_its_last_thread_has_ended() -> None:
    """The kernel shows it as a zombie as soon as the first one has: its files and ports are open all the same."""
    child = subprocess.Popen([sys.executable, "-c", _ENDS_ITS_FIRST_THREAD], stdin=subprocess.PIPE)
    process = identify(child.pid)
    assert process is not None
    stat = Path(f"/proc/{child.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    assert process.is_running()
    assert identify(child.pid) == process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_running()
    child.communicate()


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = identify(child.pid)
    assert process is not None
    assert process.is_running()
    assert process in descendants([ourselves()], process_table())
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # Ended, and not reaped.
    assert not process.is_running()
    child.communicate()
