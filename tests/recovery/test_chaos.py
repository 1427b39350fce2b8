"""Does what is promised hold while programs are killed and connections cut? A few rounds of `scripts/chaos`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.controller.journal.copying import BEYOND, back_up_journal, restore_journal
from callboard.security.tokens import TOKEN_NAME
from tests.recovery.programs import UP, Agent, Proxy
from tests.support.actors import Holder
from tests.support.controller_process import ControllerProcess


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", ["7", str(random.SystemRandom().randrange(1 << 32))], ids=["known", "fresh"])
def test_r1_r2_r3_r4_a_cluster_keeps_its_promises_through_faults_at_random_instants(seed: str) -> None:
    command = [sys.executable, "-m", "tests.recovery.chaos", "--rounds", "3", "--longest-stop", "1", "--seed", seed]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing lost, nothing given twice, nothing left" in ran.stdout


def test_r2_a_device_that_is_given_twice_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices").mkdir()
    monkeypatch.setenv("CALLBOARD_AGENT", "/run/n0")
    for name in ("JOB", "COMPONENT", "RANK", "GENERATION"):
        monkeypatch.setenv(f"CALLBOARD_{name}", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    holders = [Holder(str(tmp_path), gpu=0.5), Holder(str(tmp_path), gpu=0.5)]
    for gpu in (0.5, 1):
        with pytest.raises(BlockingIOError):
            Holder(str(tmp_path), gpu=gpu)
    assert len((tmp_path / "taken_twice").read_text().splitlines()) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    holders.append(Holder(str(tmp_path)))
    with pytest.raises(BlockingIOError):
        Holder(str(tmp_path), gpu=0.5)
    assert [json.loads(line)["devices"] for line in (tmp_path / "held").read_text().splitlines()] == [
        ["0"],
        ["0"],
        ["1"],
    ]
    for file in {file for holder in holders for file in holder.files}:
        os.close(file)


async def test_the_proxy_holds_back_doubles_and_cuts() -> None:
    heard: list[bytes] = []
    here = asyncio.Condition()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            async with here:
                heard.append(data)
                here.notify_all()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Proxy("127.0.0.1", port) as proxy:
        proxy.doubled = True
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        async with here:
            await here.wait_for(lambda: heard == [b"a", b"a"])
        proxy.hold(UP)
        writer.write(b"b")
        async with here:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(here.wait_for(lambda: len(heard) > 2), 0.05)
        proxy.heal()
        async with here:
            await here.wait_for(lambda: heard == [b"a", b"a", b"b", b"b"])
        proxy.cut()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


def job_of(name: str, folder: Path) -> dict[str, Any]:
    part = {"name": "w", "actor": "tests.support.actors:Holder", "entry": "run", "kwargs": {"folder": str(folder)}}
    return {"name": name, "pool": "p", "wait_for_nodes": "1h", "components": [part | {"resources": {"gpu": 1}}]}


@pytest.mark.timeout(180)
async def test_an_agent_that_ran_on_while_the_state_went_back_ends_what_that_does_not_know_and_runs_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "devices").mkdir()
    controller = ControllerProcess(tmp_path / "state", "--lease-ms=3000", "--heartbeat-ms=1000")
    await controller.start()
    token = tmp_path / "state" / TOKEN_NAME
    monkeypatch.setenv("CALLBOARD_TOKEN_FILE", str(token))
    agent = Agent(tmp_path, "n0", token, controller.address, {})
    agent.wanted = True
    await agent.ensure()

    def pids(*jobs: JobHandle) -> list[int]:
        return [worker.pid for job in jobs for worker in job.job.workers]

    async with Client(controller.address, timeout=60, retry=60) as client:
        await client.ensure_pool("p", pg_pool={"max_dynamic": 8})
        known = await client.submit(job_of("known", tmp_path))
        await known.running(60)
        back_up_journal(tmp_path / "state", tmp_path / "backup")
        unknown = await client.submit(job_of("unknown", tmp_path))
        await unknown.running(60)
        await controller.kill()
        restore_journal(tmp_path / "backup", tmp_path / "back")
        restored = ControllerProcess(tmp_path / "back", listen=controller.address)
        await restored.start()
        later = await client.submit(job_of("later", tmp_path))
        await later.running(60)
        await known.refresh()
        running = {worker.pid: worker.generation for job in (known, later) for worker in job.job.workers}
        assert set(running) <= agent.processes(), "what is said to run does"
        assert not set(pids(unknown)) & agent.processes()
        assert running[pids(known)[0]] < BEYOND < running[pids(later)[0]]
        assert not (tmp_path / "taken_twice").exists()
        for job in (known, later):
            await job.cancel()
            await job.finished(60)
    await agent.leave()
    await restored.kill()


def run_partition(folder: Path, story: str, cut: str) -> None:
    if os.geteuid() != 0 or shutil.which("nsenter") is None or shutil.which("ip") is None:
        pytest.skip("only root can make a network of its own, with `ip` and `nsenter`")
    command = ["unshare", "--net", sys.executable, "-m", "tests.recovery.partition", str(folder / "p"), story, cut]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cut", ["up", "down", "both"])
def test_r5_a_job_of_a_node_that_is_cut_off_runs_once_elsewhere_and_the_node_heals(cut: str, tmp_path: Path) -> None:
    run_partition(tmp_path, "agent", cut)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cut", ["up", "down", "both"])
def test_r1_a_leader_that_is_cut_off_from_its_database_stops_before_another_one_starts(
    cut: str, tmp_path: Path
) -> None:
    run_partition(tmp_path, "database", cut)


@pytest.mark.timeout(180)
def test_r1_a_standby_that_is_cut_off_from_the_leader_or_from_all_says_what_it_knows(tmp_path: Path) -> None:
    run_partition(tmp_path, "standby", "both")
