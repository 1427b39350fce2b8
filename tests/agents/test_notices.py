"""Does a notice that the machine is about to go drain its node?"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from callboard.agents.departure import OUTPUT_BYTES, REASON_CHARS, NoticeWatcher, ask_for_drain
from callboard.agents.options import AgentOptions
from callboard.client.client import Client
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.model.options import OptionError
from callboard.security.processes import identify

ROOT = Path(__file__).parents[2]


class Drains:
    """Takes drains, or is away."""

    def __init__(self, *, away: bool = False) -> None:
        self.reasons: list[str] = []
        self.away = away

    async def __call__(self, reason: str) -> bool:
        self.reasons.append(reason)
        return not self.away


def watcher(command: str, drains: Drains, timeout_s: float = 10.0) -> NoticeWatcher:
    options = AgentOptions(node_id="n7", notice_command=command, notice_every_s=1, notice_timeout_s=timeout_s)
    return NoticeWatcher(options, drains)


@pytest.mark.parametrize(
    ("command", "reasons"),
    [
        ("echo 'host maintenance at 12:00'; echo more", ["host maintenance at 12:00"]),
        ("echo $CALLBOARD_NODE", ["n7"]),
        ("true", []),
        ("echo no; exit 1", []),
        ("echo ' '", []),
        ("no-such-command-of-anybody", []),
        ("echo x >&2", []),
    ],
)
async def test_output_and_exit_code_0_are_a_notice_and_nothing_else_is(command: str, reasons: list[str]) -> None:
    drains = Drains()
    await watcher(command, drains).look()
    assert drains.reasons == reasons


async def test_a_notice_is_told_once_until_it_ends(tmp_path: Path) -> None:
    drains, notice = Drains(), tmp_path / "notice"
    watch = watcher(f"cat {notice}", drains)
    await watch.look()
    notice.write_text("first\n")
    await watch.look()
    await watch.look()
    notice.unlink()
    await watch.look()
    notice.write_text("second\n")
    await watch.look()
    assert drains.reasons == ["first", "second"]


async def test_a_notice_that_nobody_heard_is_told_again() -> None:
    drains = Drains(away=True)
    watch = watcher("echo going", drains)
    await watch.look()
    drains.away = False
    await watch.look()
    await watch.look()
    assert drains.reasons == ["going", "going"]


async def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    drains, pids = Drains(), tmp_path / "pids"
    os.mkfifo(pids)
    command = f"sleep 1000 & echo $! $$ > {pids}; wait"
    looking = asyncio.create_task(watcher(command, drains, timeout_s=1.0).look())
    started = [identify(int(pid)) for pid in (await asyncio.to_thread(pids.read_text)).split()]
    await looking
    assert len(started) == 2
    assert [process for process in started if process is not None and process.is_running()] == []
    assert drains.reasons == []


async def test_endless_output_is_neither_kept_nor_waited_for() -> None:
    drains = Drains()
    await watcher(f"head -c {OUTPUT_BYTES * 50} /dev/zero | tr '\\0' x", drains).look()
    assert drains.reasons == ["x" * REASON_CHARS]
    await watcher("yes", drains, timeout_s=0.5).look()
    assert len(drains.reasons) == 1


async def test_a_controller_that_is_away_or_does_not_know_the_node_has_not_heard(tmp_path: Path) -> None:
    async def heard(address: str) -> bool:
        return await ask_for_drain(AgentOptions(node_id="n7", controller=address), "going")

    assert not await heard("127.0.0.1:1")
    controller = Controller(ControllerOptions(listen="127.0.0.1:0", state_dir=tmp_path / "state"))
    await controller.start()
    try:
        assert not await heard(controller.address)
    finally:
        await controller.stop()


async def test_the_agent_drains_its_own_node_for_the_reason_that_the_command_gave(tmp_path: Path) -> None:
    controller = Controller(ControllerOptions(listen="127.0.0.1:0", state_dir=tmp_path / "state", stop_grace_ms=500))
    await controller.start()
    notice = tmp_path / "notice"
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "callboard.cli", "agent", "--controller", controller.address, "--node-id", "n7"),
        *("--runtime", "process", "--simulate-gpus", "1", "--run-dir", str(tmp_path / "n7"), "--log-level", "error"),
        *("--notice-command", f"cat {notice}", "--notice-every", "50ms", "--notice-deadline", "3s"),
        cwd=ROOT,
    )
    try:
        async with Client(controller.address) as client:
            states = []
            async for event in client.watch(start_revision=1, types=["node."], subject="nodes/n7"):
                states.append(event.state)
                if event.state == "READY":
                    notice.write_text("spot instance reclaimed\n")
                if event.state == "DRAINING":
                    break
            assert (await client.get_node("n7")).state_reason == "spot instance reclaimed"
            assert states.count("DRAINING") == 1
    finally:
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 0
        await controller.stop()


@pytest.mark.parametrize("fields", [{"notice_every_s": 0.0}, {"notice_timeout_s": -1.0}, {"notice_within_ms": -1}])
def test_impossible_times_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        AgentOptions(node_id="n1", **fields)  # type: ignore[arg-type]
