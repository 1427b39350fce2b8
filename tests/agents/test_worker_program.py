"""Does any program run as a worker's work, and end with nothing left? Real agents, processes and commands."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import AuthenticationError, RpcError

from callboard.agents.files.output_store import OutputOf
from callboard.agents.ray import private_ray
from callboard.model.inputs import job_spec
from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent, is_gone, until_gone
from tests.agents.test_workers import LONG_MS, ready, stopped
from tests.support.fake_controller import FakeController, start_worker

PYTHON_LOOP = "import time\nwhile True: time.sleep(1000)"


def running(*command: str, **fields: object) -> agent_pb2.StartWorker:
    """The start of a worker that runs a command, as a controller makes it of a job."""
    written = {"name": "main", "command": list(command)}
    spec = job_spec({"name": "j", "pool": "p", "components": [written]}).components[0]
    start = start_worker("", entry=spec.entry, args_json=spec.args_json, stop_signal=spec.stop_signal, **fields)  # type: ignore[arg-type]
    start.actor = spec.actor
    return start


def shell(text: str, **fields: object) -> agent_pb2.StartWorker:
    return running("/bin/sh", "-ec", text, **fields)


async def ended(controller: FakeController, number: int = 1) -> agent_pb2.WorkerFinished:
    found: agent_pb2.WorkerFinished = await controller.said("worker_finished", number)
    return found


async def said_through(fifo: Path) -> str:
    """What the command writes into a pipe once it is so far."""
    return await asyncio.to_thread(fifo.read_text)


async def until_absent(folder: Path, pattern: str) -> None:
    """Until what goes with a worker is deleted, which the agent does beside everything else."""
    while await asyncio.to_thread(lambda: list(folder.glob(pattern))):  # noqa: ASYNC110 - a file system tells nobody
        await asyncio.sleep(0.01)


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "so-far"
    os.mkfifo(path)
    return path


@pytest.mark.usefixtures("agent")
class TestResult:
    async def test_exit_code_0_is_success(self, controller: FakeController) -> None:
        await ready(controller, shell("exit 0"))
        assert (await ended(controller)).succeeded

    async def test_another_exit_code_is_the_failure_with_the_end_of_stderr(self, controller: FakeController) -> None:
        await ready(controller, shell("echo too bad >&2; exit 41\necho never"))
        end = await ended(controller)
        assert (end.succeeded, end.exit_code) == (False, 41)
        assert end.traceback == "`/bin/sh -ec 'echo too bad >&2; exit 41…` ended with exit code 41", "in one line"
        assert end.stderr_tail == "too bad"

    async def test_a_signal_is_told_with_its_usual_cause(self, controller: FakeController) -> None:
        await ready(controller, shell("kill -SEGV $$"))
        end = await ended(controller)
        assert end.exit_code == 139
        assert "was killed by signal 11 (SIGSEGV); a crash in native code" in end.traceback

    async def test_it_is_over_when_the_command_is_though_children_live_on(
        self, controller: FakeController, tmp_path: Path
    ) -> None:
        """They end with the worker."""
        start = shell(f"sleep 1000 & echo $! > {tmp_path}/child; (setsid sleep 1000 & echo $! > {tmp_path}/far)")
        await ready(controller, start)
        assert (await ended(controller)).succeeded
        children = [int((tmp_path / name).read_text()) for name in ("child", "far")]
        assert not any(map(is_gone, children))
        await stopped(controller, start, cancel_timeout_ms=0)
        assert all(map(is_gone, children))


REFUSED = [
    (("pyhton", "train.py"), "the command pyhton was not found; this node looked in "),
    (("/no/such/program",), "the command /no/such/program was not found"),
    (("{}/plain", "x"), "is not executable; run `chmod +x"),
    (("{}", "x"), "is a directory; name the program in it"),
    (("{}/odd",), "asks in its first line for the interpreter /no/such/python, which is not on this node"),
    (("{}/dos",), "ends with a carriage return"),
]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(("command", "why"), REFUSED)
async def test_what_cant_be_started_is_told_in_one_line(
    controller: FakeController, tmp_path: Path, command: tuple[str, ...], why: str
) -> None:
    for name, text, mode in (
        ("plain", "echo\n", 0o600),
        ("odd", "#!/no/such/python\n", 0o700),
        ("dos", "#!/bin/sh\r\n", 0o700),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    start = running(*(each.format(tmp_path) for each in command))
    failed = (await controller.do(start_worker=start)).worker_start_failed
    assert failed.failure == agent_pb2.START_FAILURE_CONSTRUCTOR
    assert why in failed.message
    assert "\n" not in failed.message


@pytest.mark.usefixtures("agent")
async def test_a_file_that_the_kernel_cant_execute(controller: FakeController, tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\x7fELF nothing")
    (tmp_path / "odd").chmod(0o700)
    await ready(controller, running(str(tmp_path / "odd")))
    end = await ended(controller)
    assert end.exit_code == 126
    assert "neither a program for this machine nor a script" in end.traceback


@pytest.mark.usefixtures("agent")
class TestSurroundings:
    async def test_it_sees_its_devices_ranks_and_rendezvous(self, controller: FakeController, tmp_path: Path) -> None:
        program = f"import json, os; json.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))"
        start = running(
            "python", "-c", program, devices=("1", "0"), rank=1, world_size=2, node_rank=1, master_port=20123
        )
        await ready(controller, start)
        assert (await ended(controller)).succeeded
        seen = json.loads((tmp_path / "seen").read_text())
        expected = {
            "CUDA_VISIBLE_DEVICES": "1,0",
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "NODE_RANK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "20123",
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_MASTER_PORT": "20123",
            "PYTHONUNBUFFERED": "1",
        }
        assert {name: seen.get(name) for name in expected} == expected

    async def test_what_torchrun_notes_goes_with_the_worker(self, controller: FakeController, tmp_path: Path) -> None:
        start = shell(f'mkdir -p "$PET_LOG_DIR/none_1"; echo "$PET_LOG_DIR" > {tmp_path}/seen')
        await ready(controller, start)
        assert (await ended(controller)).succeeded
        folder = Path((tmp_path / "seen").read_text().strip())
        assert (folder / "none_1").is_dir()
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        await stopped(controller, start)
        await until_absent(folder.parent.parent, folder.parent.name)

    async def test_what_it_sends_to_its_process_group_stays_below_the_host(self, controller: FakeController) -> None:
        """`trap 'kill 0' EXIT` is common in scripts."""
        await ready(controller, shell("trap : TERM; kill 0; exit 7"))
        assert (await ended(controller)).exit_code == 7


class TestStop:
    async def test_sigterm_is_its_cancel_and_a_file_its_checkpoint(
        self, start_agent: StartAgent, controller: FakeController, tmp_path: Path, fifo: Path
    ) -> None:
        await start_agent()
        saves = (
            "import os, signal, sys\n"
            "folder = os.environ['CALLBOARD_CHECKPOINT_DIR']\n"
            "def save(*_):\n"
            "    open(folder + '/step', 'w').write('17'); sys.exit(1)\n"
            "signal.signal(signal.SIGTERM, save)\n"
            f"open({str(fifo)!r}, 'w').write('so far')\n"
            "while True: signal.pause()\n"
        )
        start = running("python", "-c", saves)
        await ready(controller, start)
        assert await said_through(fifo) == "so far"
        end = await stopped(controller, start, cancel_timeout_ms=LONG_MS, checkpoint=True)
        assert end.outcome == agent_pb2.STOP_OUTCOME_COOPERATIVE
        with tarfile.open(fileobj=BytesIO(end.checkpoint.data)) as archive:
            assert archive.getnames() == ["step"]
        assert not [each for each in controller.reports if each.HasField("worker_finished")], "it was asked to end"

        again = shell('test "$(cat $CALLBOARD_CHECKPOINT_DIR/step)" = 17', generation=2)
        again.checkpoint.CopyFrom(end.checkpoint)
        await ready(controller, again)
        assert (await ended(controller)).succeeded
        await stopped(controller, again)
        await until_absent(tmp_path / "n0" / "output", "*/*/files")

    @pytest.mark.usefixtures("agent")
    async def test_a_checkpoint_that_is_too_large_is_told_as_lost(
        self, controller: FakeController, tmp_path: Path, fifo: Path
    ) -> None:
        start = shell(f'head -c 3000000 /dev/urandom > "$CALLBOARD_CHECKPOINT_DIR/w"; echo > {fifo}; exec sleep 1000')
        await ready(controller, start)
        await said_through(fifo)
        end = await stopped(controller, start, cancel_timeout_ms=LONG_MS, checkpoint=True)
        assert "are 3000000 bytes, and packed more than 1048576; write the state to storage" in end.checkpoint_lost

    @pytest.mark.usefixtures("agent")
    async def test_links_of_a_checkpoint_lead_to_the_same_the_next_time(
        self, controller: FakeController, fifo: Path
    ) -> None:
        saved = "mkdir step-2; echo two > step-2/w; ln -s $PWD/step-2 latest; ln -s step-2/w newest"
        start = shell(f'cd "$CALLBOARD_CHECKPOINT_DIR"; {saved}; echo > {fifo}; exec sleep 1000')
        await ready(controller, start)
        await said_through(fifo)
        end = await stopped(controller, start, cancel_timeout_ms=LONG_MS, checkpoint=True)

        again = shell('cd "$CALLBOARD_CHECKPOINT_DIR"; test "$(cat latest/w newest)" = "two\ntwo"', generation=2)
        again.checkpoint.CopyFrom(end.checkpoint)
        await ready(controller, again)
        assert (await ended(controller)).succeeded

    @pytest.mark.usefixtures("agent")
    @pytest.mark.parametrize("target", ["/shared/step-2", "../step-2"])
    async def test_a_checkpoint_with_a_link_that_leads_out_is_told_as_lost(
        self, controller: FakeController, fifo: Path, target: str
    ) -> None:
        start = shell(f'ln -s {target} "$CALLBOARD_CHECKPOINT_DIR/latest"; echo > {fifo}; exec sleep 1000')
        await ready(controller, start)
        await said_through(fifo)
        end = await stopped(controller, start, cancel_timeout_ms=LONG_MS, checkpoint=True)
        assert f"latest in CALLBOARD_CHECKPOINT_DIR is a link to {target}, which does not travel" in end.checkpoint_lost

    @pytest.mark.usefixtures("agent")
    async def test_one_that_ignores_sigterm_is_killed(
        self, controller: FakeController, tmp_path: Path, fifo: Path
    ) -> None:
        start = shell(f"trap '' TERM; echo $$ > {fifo}; while :; do sleep 1000; done")
        await ready(controller, start)
        pid = int(await said_through(fifo))
        end = await stopped(controller, start, cancel_timeout_ms=300, kill_timeout_ms=LONG_MS)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(pid)

    @pytest.mark.usefixtures("agent")
    async def test_daemons_that_forked_twice_are_killed_too(
        self, controller: FakeController, tmp_path: Path, fifo: Path
    ) -> None:
        forks = (
            "import os, signal, time\n"
            "if os.fork() == 0:\n"
            "    os.setsid()\n"
            "    if os.fork() == 0:\n"
            "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"        open({str(fifo)!r}, 'w').write(str(os.getpid()))\n"
            "        while True: time.sleep(1000)\n"
            "    os._exit(0)\n"
            "while True: time.sleep(1000)\n"
        )
        start = running("python", "-c", forks)
        await ready(controller, start)
        daemon = int(await said_through(fifo))
        end = await stopped(controller, start, cancel_timeout_ms=300, kill_timeout_ms=LONG_MS)
        assert end.outcome == agent_pb2.STOP_OUTCOME_KILLED
        assert is_gone(daemon)

    @pytest.mark.usefixtures("agent")
    async def test_orphans_that_end_are_no_zombies(
        self, controller: FakeController, tmp_path: Path, fifo: Path
    ) -> None:
        start = shell(f"(sh -c 'echo $$ > {fifo}' &); exec sleep 1000")
        await ready(controller, start)
        await until_gone(int(await said_through(fifo)))
        await stopped(controller, start)


async def test_one_that_prints_without_end_keeps_its_bound_and_is_stopped(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path
) -> None:
    """100 MB/s and more: bounded by freeing what is oldest, without holding up the program."""
    await start_agent(output_worker_bytes=1 << 20, output_bytes=8 << 20)
    start = shell("head -c 300000000 /dev/zero | tr '\\0' x; echo; echo the end")
    await ready(controller, start)
    assert (await ended(controller)).succeeded
    await stopped(controller, start)
    whose = OutputOf.of(start)
    file = tmp_path / "n0" / "output" / whose.folder / "stdout"
    assert file.stat().st_size > 300_000_000
    assert file.stat().st_blocks * 512 < 4 << 20
    with file.open("rb") as stream:
        stream.seek(-len("the end\n"), os.SEEK_END)
        assert stream.read() == b"the end\n"


async def test_a_command_that_exits_leaves_nothing_though_a_daemon_without_its_environment_prints_on(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path, fifo: Path
) -> None:
    """Neither its parents, its session nor its marker lead to it, and it fills the job's quota of output."""
    await start_agent(output_worker_bytes=1 << 20, output_bytes=8 << 20)
    daemon = f"trap '' TERM; echo $$ > {fifo}; while :; do head -c 1000000 /dev/zero; done"
    start = shell(f'(env -i setsid /bin/sh -c "{daemon}" &)'.replace("$$", "\\$\\$"))
    await ready(controller, start)
    pid = int(await said_through(fifo))
    assert (await ended(controller)).succeeded
    assert not is_gone(pid), "the work is over when the command is"
    file = tmp_path / "n0" / "output" / OutputOf.of(start).folder / "stdout"
    while file.stat().st_size < 100_000_000:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(0.01)
    await stopped(controller, start, cancel_timeout_ms=0)
    assert is_gone(pid)
    assert file.stat().st_blocks * 512 < 4 << 20


class TestTheWaitForTheNodesOfAJobsOwnRay:
    """What Ray's client says while its head comes up is expected; what would be the same for ever is not."""

    @pytest.fixture
    def waited(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"127.0.0.1:{listening.getsockname()[1]}"

            def wait(*answers: Exception | int) -> list[str]:
                """Become `command` after these answers of the head."""
                coming, became = iter(answers), list[str]()

                class Head:
                    def __init__(self, address: str) -> None:
                        pass

                    def get_all_node_info(self, timeout: float) -> dict[int, SimpleNamespace]:
                        answer = next(coming)
                        if isinstance(answer, Exception):
                            raise answer
                        return {n: SimpleNamespace(state=0) for n in range(answer)}

                monkeypatch.setattr("ray._raylet.GcsClient", Head)
                monkeypatch.setattr(private_ray, "_SILENT_S", 0.0)
                monkeypatch.setattr(sys, "argv", ["", address, "2", "/bin/echo", "echo", "a"])
                monkeypatch.setattr(os, "execve", lambda path, command, _: became.extend([path, *command]))
                private_ray.main()
                return became

            yield wait

    def test_it_goes_on_while_the_head_comes_up_and_says_what_it_waits_for(
        self, waited: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        away: Exception = RpcError("no GCS yet")  # type: ignore[no-untyped-call]
        assert waited(away, away, 1, 2) == ["/bin/echo", "echo", "a"]
        first, second = capsys.readouterr().err.splitlines()
        assert first.endswith("its head does not answer: no GCS yet")
        assert second.endswith("1 are there")

    @pytest.mark.parametrize("error", [AuthenticationError("the token is another"), TypeError("a defect")], ids=repr)
    def test_what_does_not_pass_ends_it(self, waited: Callable[..., list[str]], error: Exception) -> None:
        with pytest.raises(type(error)):
            waited(error, 2)
