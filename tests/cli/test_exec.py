"""Does a program run in a worker's environment as it would in a shell there, and leave nothing?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from callboard.agents.host import worker_exec
from callboard.agents.host.worker_exec import DATA, END, HEADER, STARTED, STDOUT, Frames, below, frame
from callboard.cli.show.failures import failure_of
from callboard.client.calls.connection import Connection
from callboard.client.calls.execs import ExecSession
from callboard.client.calls.methods import EXEC_WORKER
from callboard.client.client import Client
from callboard.client.jobs import JobHandle, exec_session
from callboard.security.caller_roles import Role
from callboard.security.grants import grant
from callboard.v1.common_pb2 import ExecCommand, ExecInput, TerminalSize
from callboard.v1.job_pb2 import ExecWorkerRequest, ExecWorkerStart
from callboard.wire.refusals import NotAllowed, NotFound, WrongState
from tests.cli.cluster import ROOT, RealCluster, job
from tests.support.terminals import Terminal

pytestmark = pytest.mark.timeout(120)

CONVERSATION = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
signal.signal(signal.SIGWINCH, lambda *_: print("size", *os.get_terminal_size(0)))
print("at", *os.get_terminal_size(0), os.environ["TERM"], os.environ["CUDA_VISIBLE_DEVICES"])
for line in sys.stdin:
    print("got-" + line.strip())
sys.exit(3)
"""

CALLBOARD = (sys.executable, "-m", "callboard.cli")


async def busy(cluster: RealCluster, name: str = "busy", *, script: str = "exec sleep 1000", **more: Any) -> JobHandle:
    """A command that runs on."""
    component = {"name": "main", "script": script, "resources": {"cpu": 1, "gpu": 1}, **more}
    handle = await cluster.client.submit({"name": name, "pool": "rlhf", "components": [component]})
    await handle.running(timeout=60)
    return handle


async def at_terminal(cluster: RealCluster, *arguments: str) -> Terminal:
    verb, *rest = arguments
    return await Terminal.start(*CALLBOARD, verb, "--controller", cluster.address, *rest, cwd=ROOT)


async def until_gone(pid: int) -> None:
    while psutil.pid_exists(pid):  # noqa: ASYNC110 - a process table tells nobody
        await asyncio.sleep(0.02)


class Ended:
    """What a session printed first, and how it ended."""

    def __init__(self, session: ExecSession) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[bytes] = loop.create_future()
        self._session = session
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> Any:
        async for stream, data in self._session.output():
            if stream and not self.first.done():
                self.first.set_result(data)
        return self._session.done

    def __await__(self) -> Any:
        return self._task.__await__()


class TestAProgram:
    async def test_it_has_the_workers_devices_environment_and_directory(
        self, shared: RealCluster, tmp_path: Path
    ) -> None:
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "here").write_text("came along")
        handle = await busy(shared, workers=2, env={"WHAT": "mine"}, working_dir=str(tmp_path / "code"))
        line = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $RANK $WHAT; cat here"]
        seen = [(await handle.exec(line, rank=rank)).stdout.split(maxsplit=3) for rank in (0, 1)]
        assert sorted(each[0] for each in seen) == [b"0", b"1"]
        assert [each[1:] for each in seen] == [[b"0", b"mine", b"came along"], [b"1", b"mine", b"came along"]]

    async def test_input_output_and_exit_code_are_the_programs(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        done = await handle.exec(["sh", "-c", "cat; echo err >&2; exit 7"], stdin=b"in\n" * 100_000)
        assert (done.exit_code, done.stderr, done.reason) == (7, b"err\n", "")
        assert done.stdout == b"in\n" * 100_000
        assert (await handle.exec(["sh", "-c", "kill -9 $$"])).exit_code == 137
        # One that reads nothing is no trouble, and neither are 256 KiB of arguments.
        assert (await handle.exec(["true"], stdin=b"x" * 1_000_000)).exit_code == 0
        assert len((await handle.exec(["echo", "x" * 100_000, "y" * 100_000])).stdout) == 200_002
        gone = await handle.exec(["nvidia-smy"])
        assert gone.exit_code == 127
        assert "nvidia-smy was not found" in gone.reason

    async def test_an_actor_has_programs_too(self, shared: RealCluster) -> None:
        handle = await shared.client.submit(job("actor"))
        await handle.running(timeout=60)
        done = await handle.exec(["python", "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"])
        assert done.stdout == b"0,1\n", done

    async def test_what_it_leaves_behind_ends_with_it(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        done = await handle.exec(["sh", "-c", "setsid sh -c 'trap \"\" TERM HUP; sleep 1000' & echo $!"])
        assert done.exit_code == 0
        await until_gone(int(done.stdout))

    async def test_it_ends_when_whoever_asked_is_gone(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        process = await asyncio.create_subprocess_exec(
            *(*CALLBOARD, "exec", handle.name, "--controller", shared.address, "--"),
            *("sh", "-c", "trap '' TERM HUP; echo $$; while :; do sleep 1000; done"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        process.kill()
        await process.wait()
        await until_gone(pid)
        assert (await handle.refresh()).state == (await handle.running()).state, "the worker itself goes on"

    async def test_it_ends_with_its_worker_and_does_not_hold_up_its_stop(self, cluster: RealCluster) -> None:
        await cluster.client.set_policy({"cancel_timeout": "10m"})
        handle = await busy(cluster)
        deaf = exec_session(handle, ["bash", "-c", "trap '' TERM HUP INT; echo $$; while :; do sleep 1000; done"])
        ended = Ended(deaf)
        pid = int(await ended.first)
        await handle.cancel()
        await handle.finished(timeout=60)
        assert psutil.pid_exists(pid) is False, "the proof that the worker is gone counts it"
        done = await ended
        assert done.exit_code == 137
        assert "stopped" in done.reason or "ended" in done.reason

    async def test_a_reader_that_reads_nothing_holds_it_back(self, shared: RealCluster, tmp_path: Path) -> None:
        handle = await busy(shared)
        count = tmp_path / "count"
        count.write_text("0")
        many = (
            "import os\nfor n in range(3000):\n    os.write(1, b'x' * 65536)\n"
            f"    open({str(count)!r}, 'w').write(str(n))"
        )
        session = exec_session(handle, ["python", "-c", many])
        output = session.output()
        total = 0
        async for stream, data in output:
            if stream:
                total += len(data)
                break
        written = -1
        while written != (written := int(count.read_text() or 0)):  # noqa: ASYNC110 - until it writes no more
            await asyncio.sleep(0.5)
        assert written < 1000, "what waits on the way is bounded"
        async for _, data in output:
            total += len(data)
        assert session.done is not None
        assert (session.done.exit_code, total) == (0, 3000 * 65536)


def shown(token: str, _: str) -> str:
    """A token, for whichever address."""
    return token


class TestWhoMay:
    async def test_a_pool_can_forbid_it_and_who_did_what_is_written_down(self, cluster: RealCluster) -> None:
        handle = await busy(cluster)
        session = exec_session(handle, ["sh", "-c", "echo up; exec sleep 1000"], component="main")
        running = Ended(session)
        assert await running.first == b"up\n"
        entries = [each for each in await cluster.client.audit(last=20) if each.method == "ExecWorker"]
        assert [(each.subject, each.code) for each in entries] == [
            ("jobs/busy main/0: sh -c 'echo up; exec sleep 1000'", "OK")
        ], "while it still runs"
        await session.signal(signal.SIGTERM)
        assert (await running).exit_code == 143
        await cluster.client.update_pool({"name": "rlhf", "exec": False})
        with pytest.raises(WrongState, match="does not allow programs"):
            await handle.exec(["true"])
        assert next(each.code for each in await cluster.client.audit(last=20) if each.method == "ExecWorker") == (
            "FAILED_PRECONDITION"
        )

    async def test_trainers_reach_the_jobs_of_their_pools_and_viewers_none(
        self, cluster: RealCluster, tmp_path: Path
    ) -> None:
        handle = await busy(cluster)
        for name, role in (("alice", Role.TRAINER), ("vera", Role.VIEWER)):
            token = await asyncio.to_thread(grant, tmp_path / "state", name, role)
            async with Client(cluster.address, retry=0) as client:
                await client._connection.close()
                client._connection = Connection(cluster.address, retry_s=0, find=partial(shown, token))
                theirs = JobHandle(client._connection, handle.job)
                with pytest.raises(NotAllowed):
                    await theirs.exec(["true"])
                if role is Role.TRAINER:
                    await cluster.client.update_pool({"name": "rlhf", "members": [name]})
                    assert (await theirs.exec(["true"])).exit_code == 0

    async def test_what_makes_no_sense_is_refused(self, bare: RealCluster) -> None:
        for asked in [
            ExecWorkerRequest(),
            ExecWorkerRequest(input=ExecInput(data=b"x")),
            ExecWorkerRequest(start=ExecWorkerStart(name="jobs/busy")),
            ExecWorkerRequest(start=ExecWorkerStart(name="jobs/busy", command=ExecCommand(arguments=[""]))),
            ExecWorkerRequest(start=ExecWorkerStart(name="x", command=ExecCommand(arguments=["true"]))),
            ExecWorkerRequest(start=ExecWorkerStart(name="jobs/b", rank=-1, command=ExecCommand(arguments=["true"]))),
            ExecWorkerRequest(start=ExecWorkerStart(name="jobs/b", command=ExecCommand(arguments=["a\0b"]))),
            ExecWorkerRequest(start=ExecWorkerStart(name="jobs/b", command=ExecCommand(arguments=["x"] * 5000))),
            ExecWorkerRequest(
                start=ExecWorkerStart(
                    name="jobs/b", command=ExecCommand(arguments=["x"], size=TerminalSize(rows=0, columns=1 << 20))
                )
            ),
        ]:
            async with bare.client._connection.both_ways(EXEC_WORKER) as call:
                await call.write(asked)
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, asked
                assert await call.details()

    async def test_workers_that_arent_there_are_named(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        with pytest.raises(NotFound, match="ranks 0 to 0"):
            await handle.exec(["true"], rank=3)
        with pytest.raises(NotFound, match="no component other") as caught:
            await handle.exec(["true"], component="other")
        assert failure_of(caught.value).remedy == "`callboard job get busy` shows its workers."
        await handle.cancel()
        await handle.finished(timeout=60)
        with pytest.raises(WrongState, match="is CANCELLED, and its workers are gone"):
            await handle.exec(["true"])


class TestATerminal:
    async def test_it_is_one_of_the_same_size_where_ctrl_c_interrupts(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        terminal = await at_terminal(shared, "exec", handle.name, "-it", "--", "python", "-c", CONVERSATION)
        await terminal.until(b"at 100 30 xterm 0\r\n")
        await terminal.resize(40, 120)
        await terminal.until(b"size 120 40\r\n")
        terminal.type(b"\x03")
        await terminal.until(b"interrupted\r\n")
        terminal.type(b"hello\n")
        await terminal.until(b"got-hello\r\n")
        terminal.type(b"\x04")
        assert (await terminal.ended())[0] == 3

    async def test_leaving_it_ends_the_program(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        terminal = await at_terminal(shared, "exec", handle.name, "-it", "--", "sh", "-c", "echo pid $$.; cat")
        pid = int((await terminal.until(b".\r\n")).split()[-1].rstrip(b"."))
        terminal.type(b"\x10")
        terminal.type(b"\x11")
        assert (await terminal.ended())[0] == 0
        await until_gone(pid)

    async def test_a_run_with_a_terminal_goes_on_without_it_and_shows_it_again(self, shared: RealCluster) -> None:
        terminal = await at_terminal(
            shared, "run", "--pool", "rlhf", "-it", "--name", "shown", "--", "python", "-c", CONVERSATION
        )
        terminal.type(b"first\n")
        await terminal.until(b"got-first\r\n")
        await terminal.resize(50, 110)
        await terminal.until(b"size 110 50\r\n")
        terminal.type(b"\x03")
        await terminal.until(b"interrupted")
        terminal.type(b"\x10\x11")
        code, said = await terminal.ended()
        assert code == 0
        assert b"`callboard attach shown` shows its terminal again" in said
        handle = await shared.client.get_job("shown")
        assert handle.state == "RUNNING"
        again = await at_terminal(shared, "attach", "shown")
        await again.until(b"got-first\r\n")
        again.type(b"second\n")
        await again.until(b"got-second\r\n")
        again.type(b"\x04")
        code, said = await again.ended()
        assert code == 3
        assert b"shown is FAILED: main/0 on n0" in said
        kept = [line.text async for line in handle.logs()]
        assert "got-first" in kept
        assert "got-second" in kept

    async def test_a_command_without_one_has_none_to_show(self, shared: RealCluster) -> None:
        handle = await busy(shared)
        terminal = await at_terminal(shared, "attach", handle.name)
        code, said = await terminal.ended()
        assert code == 1
        assert b"was started without a terminal; `callboard run -it`" in said


def connected(control: socket.socket) -> tuple[socket.socket, Frames]:
    """A connection to a relay, which has taken it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    socket.send_fds(control, [b"x"], [theirs.fileno()])
    theirs.close()
    assert ours.recv(HEADER.size) == frame(STARTED)
    return ours, Frames()


def test_whoever_is_relieved_is_told_so_after_all_that_it_did_not_read_yet(tmp_path: Path) -> None:
    """Its connection is neither closed before it has taken the rest, nor reset because its input was left unread."""
    os.mkfifo(printed := tmp_path / "printed")
    script = f"read go; head -c 600000 /dev/zero; echo all > {printed}; exec sleep 1000"
    control, given = socket.socketpair()
    relay = subprocess.Popen(
        [sys.executable, "-I", "-S", worker_exec.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[given.fileno()],
    )
    try:
        plan = {"command": ["sh", "-c", script], "executable": "/bin/sh", "terminal": False, "control": given.fileno()}
        assert relay.stdin is not None
        relay.stdin.write(json.dumps(plan).encode())
        relay.stdin.close()
        given.close()
        first, frames = connected(control)
        first.sendall(frame(DATA, b"go\n"))
        assert printed.read_text() == "all\n"
        first.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                first.send(frame(DATA, bytes(16384)))
        second, _ = connected(control)
        first.settimeout(60)
        told = [each for data in iter(partial(first.recv, 65536), b"") for each in frames.of(data)]
        assert sum(len(content) for kind, content in told if kind == STDOUT) >= 600000 - 65536
        assert told[-1][0] == END
        assert json.loads(told[-1][1]) == {"exit_code": 0, "reason": "another terminal took over"}
        first.close()
        second.close()
    finally:
        for pid in (*below(relay.pid), relay.pid):
            os.kill(pid, signal.SIGKILL)
        relay.wait()
        control.close()


async def test_the_command_line_passes_input_signals_and_exit_codes(shared: RealCluster) -> None:
    handle = await busy(shared)
    line = (*CALLBOARD, "exec", handle.name, "--rank", "0", "--worker", "main", "--controller", shared.address)
    pipes: dict[str, Any] = {
        "stdin": asyncio.subprocess.PIPE,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.PIPE,
    }
    counts = await asyncio.create_subprocess_exec(*line, "--", "wc", "-c", cwd=ROOT, **pipes)
    out, err = await counts.communicate(b"x" * 300_000)
    assert (counts.returncode, out.strip(), err) == (0, b"300000", b"")
    loop = "trap 'echo caught; exit 9' INT; echo up; while :; do sleep 0.05; done"
    caught = await asyncio.create_subprocess_exec(*line, "--", "sh", "-c", loop, cwd=ROOT, **pipes)
    assert caught.stdout is not None
    assert await caught.stdout.readline() == b"up\n"
    caught.send_signal(signal.SIGINT)
    assert await caught.stdout.readline() == b"caught\n"
    assert await caught.wait() == 9
    gone = await asyncio.create_subprocess_exec(*line, "--", "pyhton", cwd=ROOT, **pipes)
    out, err = await gone.communicate(b"")
    assert gone.returncode == 127
    assert b"the command pyhton was not found" in err
