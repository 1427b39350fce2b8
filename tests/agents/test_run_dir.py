"""Where does the agent keep its things, and what of it does it remove?"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from callboard.agents.files.run_dir import RunDir, RunDirError, Started, default_run_dir
from callboard.agents.ray.ray_command import RayNodeSpec, check_ports, free_port, ray_start
from callboard.agents.ray.ray_faults import PortTaken
from callboard.security.processes import ProcessId


def test_what_was_recorded_is_there_for_the_next_agent(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "n0")
    first.put(Started("worker", ProcessId(11, 1), "w"), Started("spare", None, "s"))
    first.put(Started("ray", ProcessId(12, 2), facts={"session": "s1"}))
    first.drop("worker", "w")
    first.close(keep=True)

    second = RunDir(tmp_path / "n0")
    assert second.recorded() == [Started("spare", None, "s"), Started("ray", ProcessId(12, 2), "", {"session": "s1"})]
    second.keep_only([])
    second.close(keep=False)
    assert not (tmp_path / "n0").exists()


def test_only_what_we_made_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("irreplaceable")
    RunDir(folder).close(keep=False)
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_agents_of_one_cluster_come_and_go_at_once(tmp_path: Path) -> None:
    """Each takes and removes its own directory below ones that all of them make and remove."""

    def come_and_go(node: str) -> None:
        for _ in range(300):
            RunDir(tmp_path / "base" / "lab" / node).close(keep=False)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(come_and_go, [f"n{node}" for node in range(6)]))
    assert not (tmp_path / "base").exists()


def test_one_node_has_one_agent_however_they_come_and_go(tmp_path: Path) -> None:
    """A lock on a file that the last holder has removed keeps nobody out, so nobody may believe in one."""
    inside: list[int] = []

    def come_and_go(me: int) -> None:
        taken = 0
        while taken < 50:
            try:
                mine = RunDir(tmp_path / "base" / "lab" / "n0")
            except RunDirError:
                continue
            inside.append(me)
            assert inside == [me]
            inside.remove(me)
            mine.close(keep=False)
            taken += 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(come_and_go, range(4)))


def test_a_directory_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RunDirError, match="written by others"):
        RunDir(folder)
    assert folder.stat().st_mode & 0o777 == 0o777, "and left as it is"


def test_a_link_somewhere_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunDirError, match="not a directory"):
        RunDir(tmp_path / "link")


def test_the_token_is_for_our_eyes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "n0")
    run_dir.write_ray_token("t" * 64)
    assert run_dir.ray_token.stat().st_mode & 0o777 == 0o600
    run_dir.close(keep=False)


def test_rays_sockets_fit_however_long_the_names_are(tmp_path: Path) -> None:
    deep = tmp_path / ("c" * 60) / ("n" * 60)
    run_dir = RunDir(deep)
    socket = run_dir.ray_temp / "session_2026-12-31_23-59-59_999999_4194304" / "sockets" / "plasma_store"
    assert len(os.fsencode(socket)) <= 107
    run_dir.close(keep=False)


def test_the_default_is_below_the_users_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir("c", "n") == Path("/run/user/7/callboard/c/n")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir("c", "n") == Path(f"/tmp/callboard-{os.getuid()}/c/n")


def ray_node(
    folder: Path,
    *,
    head: bool,
    gcs_port: int = 6379,
    port_base: int | None = None,
    dashboard_port: int | None = None,
) -> RayNodeSpec:
    return RayNodeSpec(
        node_id="n0",
        gcs_address=f"127.0.0.10:{gcs_port}",
        head=head,
        node_ip="127.0.0.10",
        cpu_milli=3000,
        gpus=2,
        memory_bytes=4 << 30,
        custom_milli={"worker_unit": 1000},
        object_store_bytes=100 << 20,
        port_base=port_base,
        dashboard_port=dashboard_port,
        temp_dir=folder / "ray",
        log=folder / "ray.log",
        environment={"SECRET": "x"},
    )


def test_a_ray_head_is_given_ports_that_differ_though_the_kernel_names_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = iter([6379, 6379, 5001])

    class Named(socket.socket):
        def bind(self, address: Any) -> None:
            pass

        def getsockname(self) -> Any:
            return ("127.0.0.10", next(named))

    monkeypatch.setattr(socket, "socket", Named)
    command = ray_start(ray_node(tmp_path, head=True, gcs_port=6379))
    assert {"--port=6379", "--dashboard-port=5001"} <= set(command)


@pytest.mark.parametrize("head", [True, False])
def test_a_ray_node_is_told_all_it_could_guess_wrong(tmp_path: Path, head: bool) -> None:
    spec = ray_node(tmp_path, head=head, port_base=6400)
    command = ray_start(spec)
    for part in (
        "--block",
        "--num-cpus=3",
        "--num-gpus=2",
        '--resources={"worker_unit": 1.0}',
        "--node-manager-port=6400",
    ):
        assert part in command
    assert ("--head" in command) is head
    assert ("--address=127.0.0.10:6379" in command) is not head
    assert "SECRET" not in repr(spec)


@pytest.mark.parametrize("dashboard", [False, True])
def test_a_port_of_rays_head_is_looked_at_where_ray_listens(tmp_path: Path, dashboard: bool) -> None:
    """NJ-04: the dashboard listens on 127.0.0.1 whatever the address of the node is."""
    host = "127.0.0.1" if dashboard else "127.0.0.10"
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        gcs_port = free_port("127.0.0.10") if dashboard else port
        spec = ray_node(tmp_path, head=True, gcs_port=gcs_port, dashboard_port=port if dashboard else None)
        with pytest.raises(PortTaken, match=f"port {port} on {host} is in use"):
            check_ports(spec)
    check_ports(spec)
    assert "--dashboard-host=127.0.0.1" in ray_start(spec)
