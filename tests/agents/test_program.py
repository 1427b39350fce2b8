"""How does the agent's process begin and end?"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from callboard.v1 import agent_pb2, common_pb2
from tests.agents.conftest import assert_nothing_left, is_gone, until_gone
from tests.support.fake_controller import FakeController, start_worker

Process: TypeAlias = asyncio.subprocess.Process
Program: TypeAlias = Callable[..., Awaitable[Process]]

LIVES_BRIEFLY = """
import json, os, pathlib, subprocess, sys
file = pathlib.Path(sys.argv[1])
file.write_text(json.dumps(json.loads(file.read_text()) | {"exit_with_parent": os.getpid()}))
child = subprocess.Popen([sys.executable, "-m", "callboard.agents", sys.argv[1]])
print(child.pid, flush=True)
sys.stdin.readline()
"""


def write_options(controller: FakeController, tmp_path: Path, **options: Any) -> str:
    settings = {
        "node_id": "n0",
        "controller": controller.address,
        "runtime": "process",
        "simulate_gpus": 2,
        "run_dir": str(tmp_path / "n0"),
        "log_format": "json",
        **options,
    }
    file = tmp_path / "options.json"
    file.write_text(json.dumps(settings))
    return str(file)


@pytest.fixture
async def program(controller: FakeController, tmp_path: Path) -> AsyncIterator[Program]:
    """Starts agents as programs; those that still live at the end are ended."""
    started: list[Process] = []

    async def start(**options: Any) -> Process:
        place = options.pop("cwd", None)
        file = write_options(controller, tmp_path, **{"exit_with_parent": os.getpid(), **options})
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "callboard.agents", file, stderr=asyncio.subprocess.PIPE, cwd=place
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_r9_a_signal_ends_it_cleanly(
    controller: FakeController, program: Program, tmp_path: Path, number: signal.Signals
) -> None:
    agent = await program()
    session = await controller.session()
    for rank in (0, 1):
        await controller.do(start_worker=start_worker("Plain", rank=rank))
    agent.send_signal(number)
    assert await agent.wait() == 0
    assert session.goodbye == number.name
    assert session.heartbeats[-1].leaving
    # FT-D2: the controller knows how soon what runs here is killed.
    assert 0 < next(each for each in session.heartbeats if each.leaving).kill_within_ms <= 2_000
    ended = [await controller.said("worker_stopped", which) for which in (1, 2)]
    assert all("leaves" in each.detail for each in ended)
    assert_nothing_left(tmp_path / "n0")


async def test_a_controller_that_took_its_hello_hears_that_it_leaves(
    controller: FakeController, program: Program, tmp_path: Path
) -> None:
    """Else a node that nobody saw leave is waited for until its lease is over."""
    controller.greets.clear()
    agent = await program()
    await controller.until(lambda: controller.ungreeted)
    agent.send_signal(signal.SIGTERM)
    assert agent.stderr is not None
    while json.loads(await agent.stderr.readline())["event"] != "leaving":
        pass
    controller.greets.set()
    session = await controller.session()
    assert await agent.wait() == 0
    assert session.goodbye == "SIGTERM"
    assert_nothing_left(tmp_path / "n0")


async def test_a_second_signal_hurries(controller: FakeController, program: Program, tmp_path: Path) -> None:
    agent = await program(leave_hooks_s=30.0, leave_s=60.0)
    session = await controller.session()
    await controller.do(start_worker=start_worker("Hanging", entry="run", args_json='["sleep"]'))
    agent.send_signal(signal.SIGINT)
    await controller.until(lambda: session.heartbeats[-1].leaving)
    agent.send_signal(signal.SIGINT)
    assert await agent.wait() == 0
    assert_nothing_left(tmp_path / "n0")


async def test_the_controller_may_send_it_away(controller: FakeController, program: Program, tmp_path: Path) -> None:
    agent = await program()
    session = await controller.session()
    await controller.command(shutdown=agent_pb2.Shutdown(reason="down"))
    assert await agent.wait() == 0
    assert session.goodbye == "down"
    assert_nothing_left(tmp_path / "n0")


async def test_nothing_new_starts_while_it_leaves(controller: FakeController, program: Program) -> None:
    agent = await program(leave_hooks_s=30.0, leave_s=60.0)
    session = await controller.session()
    await controller.do(start_worker=start_worker("Hanging", entry="run", args_json='["sleep"]'))
    agent.terminate()
    await controller.until(lambda: session.heartbeats[-1].leaving)
    stopped = (await controller.do(start_worker=start_worker("Plain", rank=1))).worker_stopped
    # No failure of the worker: its job starts elsewhere.
    assert (stopped.outcome, stopped.detail) == (agent_pb2.STOP_OUTCOME_ALREADY_GONE, "its node is leaving")
    agent.terminate()
    assert await agent.wait() == 0


async def test_a_start_that_its_leaving_cuts_short_is_no_failure_of_the_worker(
    controller: FakeController, program: Program
) -> None:
    agent = await program()
    await controller.session()
    start = await controller.command(start_worker=start_worker("SlowToBuild"))
    await asyncio.sleep(0.5)  # Whichever step of its start it is at, the answer is the same.
    agent.terminate()
    stopped = (await controller.report(start)).worker_stopped
    assert stopped.outcome == agent_pb2.STOP_OUTCOME_KILLED
    assert stopped.detail.startswith("node n0 leaves: SIGTERM, before ")
    assert await agent.wait() == 0


async def test_it_leaves_when_its_parent_is_gone(controller: FakeController, tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        LIVES_BRIEFLY,
        write_options(controller, tmp_path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    agent = int(await parent.stdout.readline())
    session = await controller.session()
    worker = (await controller.do(start_worker=start_worker("Plain"))).worker_ready.pid
    parent.kill()
    await parent.communicate()
    await until_gone(agent)
    assert is_gone(worker)
    assert session.goodbye is not None
    assert "parent" in session.goodbye
    assert_nothing_left(tmp_path / "n0")


async def test_workers_of_a_killed_agent_that_nobody_starts_again_end_by_themselves(
    controller: FakeController, program: Program, tmp_path: Path
) -> None:
    agent = await program()
    await controller.session()
    worker = (await controller.do(start_worker=start_worker("Plain"))).worker_ready.pid
    agent.kill()
    await agent.wait()
    await until_gone(worker)


async def test_nj_02_an_agent_that_was_stopped_ends_strict_workers_before_it_listens(
    controller: FakeController, program: Program
) -> None:
    controller.welcome |= {"lease_ms": 2_000}
    agent = await program()
    await controller.session()
    strict = (await controller.do(start_worker=start_worker("Plain", strict=True))).worker_ready.pid
    assert strict
    agent.send_signal(signal.SIGSTOP)
    await until_gone(strict)  # Its fence doesn't wait for the agent.
    agent.send_signal(signal.SIGCONT)
    stopped = await controller.said("worker_stopped")
    assert "the lease ended" in stopped.detail
    agent.terminate()
    assert await agent.wait() == 0


async def test_nj_02_without_a_fence_the_agent_itself_ends_strict_workers_before_it_listens(
    controller: FakeController, program: Program, tmp_path: Path
) -> None:
    controller.welcome |= {"lease_ms": 4_000}
    agent = await program()
    await controller.session()
    strict = (await controller.do(start_worker=start_worker("Plain", strict=True))).worker_ready.pid
    records = json.loads((tmp_path / "n0" / "processes.json").read_text())
    (fence,) = (int(each["pid"]) for each in records if each["role"] == "fence")
    agent.send_signal(signal.SIGSTOP)
    # An agent that still runs would start the next fence.
    await asyncio.to_thread(os.waitid, os.P_PID, agent.pid, os.WSTOPPED | os.WNOWAIT)
    os.kill(fence, signal.SIGKILL)
    # Until the lease is over: nothing happens then. What is written may be of before an answer that it has not read.
    await asyncio.sleep(4.1)
    assert not is_gone(strict)
    agent.send_signal(signal.SIGCONT)
    stopped = await controller.said("worker_stopped")
    assert "the lease ended" in stopped.detail
    assert is_gone(strict)
    agent.terminate()
    assert await agent.wait() == 0


async def test_nj_01_a_second_agent_of_the_node_is_refused(controller: FakeController, program: Program) -> None:
    first = await program()
    await controller.session()
    second = await program()
    _, errors = await second.communicate()
    assert second.returncode == 2
    assert f"another agent of this node is running (pid {first.pid}" in errors.decode()
    first.terminate()
    assert await first.wait() == 0


async def test_nj_04_a_port_in_use_is_named_before_anything_starts(
    controller: FakeController, program: Program, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.9.9", 0)) as taken:
        port = taken.getsockname()[1]
        agent = await program(runtime="ray", ray_head=True, ray_port=port, node_ip="127.0.9.9")
        _, errors = await agent.communicate()
    assert agent.returncode == 2
    assert f"port {port} on 127.0.9.9 is in use" in errors.decode()
    assert_nothing_left(tmp_path / "n0")


async def test_ft_g7_a_refused_agent_logs_the_reason_first(controller: FakeController, program: Program) -> None:
    controller.refuse = (grpc.StatusCode.ALREADY_EXISTS, "rank 3 belongs to node n7; ask for another or for none")
    agent = await program()
    _, errors = await agent.communicate()
    assert agent.returncode == 2
    first = json.loads(errors.decode().splitlines()[0])
    assert first["why"] == "the controller refused this agent: rank 3 belongs to node n7; ask for another or for none"
    assert b"a part of the agent ended" not in errors


async def test_ft_c1_an_agent_without_a_head_tells_the_controller_and_its_log(
    controller: FakeController, program: Program
) -> None:
    agent = await program(runtime="ray", node_ip="127.0.9.8")
    session = await controller.session()
    assert session.hello.ray_version
    assert session.hello.python_version == platform.python_version()

    async def told() -> common_pb2.RayFault:
        async with controller.changed:
            await controller.changed.wait_for(lambda: any(beat.HasField("ray") for beat in session.heartbeats))
        return [beat.ray.fault for beat in session.heartbeats if beat.HasField("ray")][-1]

    fault = await told()
    assert (fault.code, fault.permanent) == (common_pb2.RAY_FAULT_CODE_NO_HEAD, False)
    assert fault.message == "no Ray head: start one agent with --ray-head"
    session.heartbeats.clear()
    await session.send(ray_bootstrap=agent_pb2.RayBootstrap(head_node="n7"))
    assert (await told()).code == common_pb2.RAY_FAULT_CODE_AWAITS_HEAD
    agent.terminate()
    _, errors = await agent.communicate()
    assert "no Ray head: start one agent with --ray-head" in errors.decode()


@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=pytest.mark.ray)])
async def test_ft_c12_the_agents_working_directory_counts_in_both_runtimes(
    controller: FakeController, program: Program, tmp_path: Path, runtime: str
) -> None:
    module = f"found_here_{runtime}"
    (tmp_path / f"{module}.py").write_text("class Here:\n    pass\n")
    # Ray's sockets lie below, in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cb") as short:
        ray = {"ray_head": True, "ray_port": 0, "node_ip": "127.0.9.7", "object_store_bytes": 100 << 20}
        agent = await program(runtime=runtime, cwd=tmp_path, run_dir=f"{short}/n", **(ray if runtime == "ray" else {}))
        session = await controller.session()
        if runtime == "ray":
            async with asyncio.timeout(120), controller.changed:
                await controller.changed.wait_for(lambda: any(beat.ray.ray_node_id for beat in session.heartbeats))
        start = start_worker("Plain")
        start.actor = f"{module}:Here"
        report = await controller.do(start_worker=start)
        assert report.HasField("worker_ready"), report.worker_start_failed.message
        lost = start_worker("Plain", generation=2, rank=1)
        lost.actor = "found_nowhere:Here"
        report = await controller.do(start_worker=lost)
        assert report.worker_start_failed.failure == agent_pb2.START_FAILURE_IMPORT
        assert str(tmp_path) in report.worker_start_failed.message
        assert "env: {PYTHONPATH: /the/directory}" in report.worker_start_failed.message
        agent.terminate()
        assert await agent.wait() == 0


async def test_pg_13_an_address_that_the_host_does_not_have_is_refused_before_anything_starts(
    controller: FakeController, program: Program, tmp_path: Path
) -> None:
    agent = await program(runtime="ray", ray_head=True, ray_port=0, node_ip="198.51.100.7")
    _, errors = await agent.communicate()
    assert agent.returncode == 2
    assert "this host has no address 198.51.100.7; it has " in errors.decode()
    assert "127.0.0.2" in errors.decode()
    assert controller.opened == [], "the controller was not troubled"
    assert_nothing_left(tmp_path / "n0")


async def test_an_impossible_options_file_is_refused(controller: FakeController, program: Program) -> None:
    agent = await program(gpus=-1)
    _, errors = await agent.communicate()
    assert agent.returncode == 2
    assert b"gpus: -1" in errors


async def test_no_token_is_logged(controller: FakeController, program: Program, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-very-secret-token")
    agent = await program(token_file=str(token), log_level="DEBUG")
    await controller.session()
    report = await controller.do(start_worker=start_worker("Plain", env={"MY_API_KEY": "also-secret"}))
    assert report.HasField("worker_ready")
    agent.terminate()
    _, errors = await agent.communicate()
    assert b"session_opened" in errors
    assert b"secret" not in errors


async def test_gc_08_starting_children_under_traffic_never_hangs(controller: FakeController, program: Program) -> None:
    controller.welcome["heartbeat_ms"] = 50
    agent = await program()
    await controller.session()
    for generation in range(1, 41, 4):
        commands = [
            await controller.command(start_worker=start_worker("Plain", rank=rank, generation=generation))
            for rank in range(4)
        ]
        for command in commands:
            assert (await controller.report(command)).HasField("worker_ready")
    agent.terminate()
    assert await agent.wait() == 0
