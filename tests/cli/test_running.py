"""Does `callboard run` run a program like the shell does, and say why where it doesn't yet?"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from callboard.cli.jobs.run_verb import _part_of
from callboard.cli.jobs.running import _Following, _indexes, _program
from callboard.cli.main import app
from callboard.client.jobs import JobHandle
from callboard.wire.refusals import NotFound
from tests.cli.cluster import ROOT, RealCluster, job


@dataclass
class Done:
    """How a run ended."""

    exit_code: int | None
    stdout: str
    stderr: str


async def started(cluster: RealCluster, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.cli", "run", "--controller", cluster.address, "--pool", "rlhf", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ran(cluster: RealCluster, *arguments: str) -> Done:
    running = await started(cluster, *arguments)
    out, err = await running.communicate()
    return Done(running.returncode, out.decode(), err.decode())


async def until_line(stream: asyncio.StreamReader | None, part: str) -> str:
    assert stream is not None
    while line := (await stream.readline()).decode():
        if part in line:
            return line
    raise AssertionError(f"no line with {part!r}")


async def job_named(cluster: RealCluster, name: str) -> JobHandle:
    return await cluster.client.get_job(name)


@pytest.mark.timeout(300)
class TestOneProgram:
    async def test_output_and_exit_code_are_the_programs(self, cluster: RealCluster) -> None:
        done = await ran(cluster, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
        assert (done.exit_code, done.stdout) == (7, "out\n")
        assert "err\n" in done.stderr
        assert "ended with exit code 7" in done.stderr
        assert (await ran(cluster, "--quiet", "--", "true")).exit_code == 0

    async def test_one_that_fails_goes_on_from_its_checkpoint(self, cluster: RealCluster) -> None:
        text = "cd $CALLBOARD_CHECKPOINT_DIR; cat step 2>/dev/null && exit; echo 7 > step; exit 3"
        done = await ran(cluster, "--restarts", "1", "--", "sh", "-c", text)
        assert (done.exit_code, done.stdout) == (0, "7\n"), done

    async def test_what_isnt_there_is_told_at_once(self, cluster: RealCluster, tmp_path: Path) -> None:
        done = await ran(cluster, "--name", "typo", "pyhton", "train.py")
        assert done.exit_code == 1
        assert "callboard: typo is FAILED: main/0 on n0: the command pyhton was not found" in done.stderr
        done = await ran(cluster, "--name", "env", "--conda", "none-such", "true")
        assert done.exit_code == 1
        assert re.search("env is FAILED: main/0 on n0: .*none-such", done.stderr)
        (tmp_path / "requirements.txt").write_text("--no-index\nnone-such==3\n")
        done = await ran(cluster, "--name", "build", "--requirements", str(tmp_path / "requirements.txt"), "true")
        assert done.exit_code == 1
        assert re.search("build is FAILED: main/0 on n0: the environment can't be built .*none-such", done.stderr)

    async def test_a_file_that_stayed_here_is_named_where_the_program_may_have_missed_it(
        self, cluster: RealCluster
    ) -> None:
        hint = "callboard: pyproject.toml is in "
        for code, is_told in (("2", True), ("3", False)):
            done = await ran(cluster, "--", "sh", "-c", f"exit {code}", "pyproject.toml")
            assert (done.exit_code, hint in done.stderr) == (int(code), is_told), done

    async def test_it_says_why_it_waits_and_goes_on(self, cluster: RealCluster) -> None:
        blocker = await cluster.client.submit(job("blocker", resources={"cpu": 1, "gpu": 2}))
        await blocker.running(timeout=60)
        running = await started(cluster, "--gpus-per-node", "1", "--name", "later", "--", "sh", "-c", "echo ran")
        line = await until_line(running.stderr, "later waits")
        assert "gpu" in line.lower()
        await blocker.cancel()
        assert await until_line(running.stdout, "ran") == "ran\n"
        assert await running.wait() == 0

    async def test_ctrl_c_cancels_and_twice_ends_at_once(self, cluster: RealCluster) -> None:
        polite = await started(
            cluster, "--name", "polite", "--", "sh", "-c", "trap 'echo bye; exit' TERM; echo up; sleep 1000 & wait"
        )
        await until_line(polite.stdout, "up")
        polite.send_signal(signal.SIGINT)
        await until_line(polite.stdout, "bye")
        assert await polite.wait() == 130
        assert (await job_named(cluster, "polite")).state == "CANCELLED"

        await cluster.client.set_policy({"cancel_timeout": "10m"})
        deaf = await started(
            cluster, "--name", "deaf", "--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 1000; done"
        )
        await until_line(deaf.stdout, "up")
        deaf.send_signal(signal.SIGINT)
        await until_line(deaf.stderr, "once more ends it at once")
        deaf.send_signal(signal.SIGINT)
        assert await deaf.wait() == 130
        assert (await job_named(cluster, "deaf")).state == "CANCELLED"


@pytest.mark.timeout(300)
class TestSeveral:
    async def test_an_array_shows_each_with_its_name_and_ends_with_the_first_failure(
        self, cluster: RealCluster
    ) -> None:
        done = await ran(
            cluster,
            "--name",
            "sweep",
            "--array",
            "0-2",
            "--",
            "sh",
            "-c",
            "echo {index} $ARRAY_INDEX; exit {index}",
        )
        assert sorted(done.stdout.splitlines()) == [f"sweep-{each}/0 | {each} {each}" for each in range(3)]
        assert done.exit_code == 1

    async def test_a_file_has_a_run_in_each_line(self, cluster: RealCluster, tmp_path: Path) -> None:
        (tmp_path / "runs.txt").write_text("# first\necho one\n\nsh -c 'echo two; kill -9 $$'  # second\n")
        done = await ran(cluster, "--name", "list", "--file", str(tmp_path / "runs.txt"))
        assert sorted(done.stdout.splitlines()) == ["list-1/0 | one", "list-2/0 | two"]
        assert done.exit_code == 128 + signal.SIGKILL
        (tmp_path / "odd.txt").write_text("echo one\necho 'two\n")
        refused = await ran(cluster, "--file", str(tmp_path / "odd.txt"))
        assert refused.exit_code == 2
        assert "line 2: No closing quotation" in refused.stderr
        (tmp_path / "half.txt").write_text("true\n''\n")
        half = await ran(cluster, "--name", "half", "--file", str(tmp_path / "half.txt"))
        assert half.exit_code == 2
        assert "half-2: components[0].command: names no program" in half.stderr
        with pytest.raises(NotFound):
            await job_named(cluster, "half-1")

    async def test_two_nodes_meet_and_detached_runs_print_their_names(self, cluster: RealCluster) -> None:
        grows = await ran(cluster, "--nodes", "1:2", "--detach", "--name", "grows", "--", "sleep", "1000")
        assert (grows.exit_code, grows.stdout) == (0, "grows\n"), grows
        growing = await job_named(cluster, "grows")
        assert len((await growing.running(timeout=60)).workers) == 1
        await cluster.add_node("n1")
        grown = await growing.until(lambda job: len(job.workers) == 2, "its second worker", timeout=60)
        assert {each.allocation.node_id for each in grown.workers} == {"n0", "n1"}
        await growing.cancel()
        meets = (
            "import os, socket\n"
            "where = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
            "if os.environ['RANK'] == '0':\n"
            "    server = socket.create_server(where)\n"
            "    print(server.accept()[0].recv(9).decode())\n"
            "else:\n"
            "    while True:\n"
            "        try: other = socket.create_connection(where); break\n"
            "        except ConnectionRefusedError: pass\n"
            "    other.sendall(b'met ' + os.environ['NODE_RANK'].encode())\n"
            "    print(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        )
        done = await ran(
            cluster,
            "--nodes",
            "2",
            "--gpus-per-node",
            "2",
            "--tail",
            "all",
            "--name",
            "pair",
            "--",
            "python",
            "-c",
            meets,
        )
        assert done.exit_code == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["pair/0 | met 1", "pair/1 | 0,1"]
        each = await ran(
            cluster,
            "--gpus-per-node",
            "2",
            "--per-gpu",
            "--detach",
            "--name",
            "each",
            "--array",
            "7,9",
            "--",
            "sh",
            "-c",
            "echo $CUDA_VISIBLE_DEVICES",
        )
        assert each.stdout.splitlines() == ["each-7", "each-9"]
        handle = await job_named(cluster, "each-7")
        assert (await handle.finished(timeout=60)).spec.components[0].workers == 2
        seen = [line.text async for line in handle.logs()]
        assert len(set(seen)) == len(seen) == 2, "one GPU each"


@pytest.mark.timeout(300)
async def test_a_directory_travels_with_the_program_and_is_sent_once(cluster: RealCluster, tmp_path: Path) -> None:
    (tmp_path / "code" / "pkg").mkdir(parents=True)
    (tmp_path / "code" / "pkg" / "__init__.py").write_text("WHAT = 'it came along'\n")
    (tmp_path / "tool.py").write_text("WHAT = 'too'\n")
    (tmp_path / "code" / "train.py").write_text("import pkg, tool; print(pkg.WHAT, tool.WHAT)\n")
    (tmp_path / "code" / "weights.bin").write_bytes(os.urandom(3 << 20))
    module = ("--py-module", str(tmp_path / "tool.py"))
    line = ("--working-dir", str(tmp_path / "code"), *module, "--", "python", "train.py")
    done = await ran(cluster, *line)
    assert (done.exit_code, done.stdout) == (0, "it came along too\n"), done
    written = sorted(path.stat().st_ino for path in (tmp_path / "state" / "packages").iterdir())
    assert len(written) == 2
    assert (await ran(cluster, *line)).stdout == "it came along too\n"
    assert sorted(path.stat().st_ino for path in (tmp_path / "state" / "packages").iterdir()) == written


@pytest.mark.parametrize("flag", ["--working-dir", "--py-module", "--requirements", "--uv"])
def test_a_path_that_isnt_there_is_told_with_its_option_and_what_to_do(flag: str, tmp_path: Path) -> None:
    gone = tmp_path / "nothing"
    done = CliRunner().invoke(app, ["run", "--pool", "rlhf", flag, str(gone), "--", "true"])
    assert done.exit_code == 2
    assert f"{flag}: {gone} is not there; name a path that is" in " ".join(done.output.split())


async def test_nothing_is_left_of_what_says_why_a_run_waits() -> None:
    class Running:
        state, job = "RUNNING", SimpleNamespace(revision=1, attempt=0)

        async def until(self, *_: object) -> None:
            await asyncio.Event().wait()

    job: Any = Running()
    telling = asyncio.ensure_future(_Following(job, rank=0, plain=True).follow())
    for _ in range(5):
        await asyncio.sleep(0)
    telling.cancel()
    await asyncio.wait([telling])
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("text", "indexes"), [("3", [3]), ("0-2", [0, 1, 2]), ("0-6:3,1", [0, 3, 6, 1]), ("4-4", [4])])
def test_numbers_of_an_array(text: str, indexes: list[int]) -> None:
    assert _indexes(text) == indexes


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "/x/train_it.py", "--lr", "1"], "train_it"),
        (["python", "-m", "verl.trainer.main_ppo"], "main_ppo"),
        (["/usr/bin/vllm", "serve"], "vllm"),
    ],
)
def test_a_job_is_called_like_its_program(command: list[str], name: str) -> None:
    assert _program(command) == name


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pool", "p"),
        ("--file", "x", "--", "echo"),
        ("--array", "9-0", "--", "echo"),
        ("--array", "0-5:0", "--", "echo"),
        ("--array", "0-100000", "--", "echo"),
        ("--tail", "first", "--", "echo"),
        ("--per-gpu", "--", "echo"),
        ("--nodes", "4:2", "--", "echo"),
        ("--nodes", "0", "--", "echo"),
        ("--nodes", "1:2:3", "--", "echo"),
        ("--nodes", "2:", "--", "echo"),
        ("--env", "X", "--", "echo"),
        ("--memory-per-node", "many", "--", "echo"),
        ("--tail", "1", "--", "echo"),
        ("--file", "/nowhere/runs.txt"),
        ("--file", "/"),
        *(
            (option, "", "--", "echo")
            for option in ("--array", "--env", "--memory-per-node", "--name", "--working-dir")
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...]) -> None:
    from typer.testing import CliRunner

    from callboard.cli.main import app

    done = CliRunner().invoke(app, ["run", "--controller", "127.0.0.1:1", *arguments])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)


@pytest.mark.parametrize(
    ("cpus", "workers", "each"), [(8, 3, 2.666), (8, 1, 8), (0, 2, 0), (0.0001, 1, 0.0001), (math.inf, 2, math.inf)]
)
def test_workers_of_a_node_have_no_more_cpus_than_was_asked(cpus: float, workers: int, each: float) -> None:
    assert _part_of(cpus, workers) == each
