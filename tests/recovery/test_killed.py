"""What becomes of a job when the agent, its Ray driver, the controller, or agent and controller are killed?

R1, R3, R4: at any moment of a start, a run, a stop or a preemption. The same outcome as without the kill, with the same
process where one was running, and nothing left over.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from callboard.v1.job_pb2 import Job, JobState
from tests.agents.conftest import is_gone
from tests.recovery.conftest import WAIT_S, Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WHO = ("agent", "driver", "controller", "both")


def pid_of(job: Job) -> int:
    (worker,) = (each for each in job.workers if each.pid)
    return worker.pid


@pytest.mark.parametrize("who", WHO)
async def test_what_runs_runs_on(site: Site, who: str) -> None:
    job = await site.submit(f"run-{who}")
    before = await job.running(WAIT_S)
    await site.kill(who)
    assert not is_gone(pid_of(before))
    if site.runtime == "ray":
        assert await site.call(job, 7) == 7, "trainers go on meanwhile"
    await site.revive(who)
    # The node takes work again only once what runs there was told.
    second = await site.submit(f"second-{who}")
    await second.running(WAIT_S)
    after = await job.refresh()
    assert after.state == JobState.JOB_STATE_RUNNING
    assert after.attempt == 1
    assert (after.workers[0].generation, pid_of(after)) == (before.workers[0].generation, pid_of(before))
    for each in (job, second):
        await each.cancel()
        await each.finished(WAIT_S)
    assert is_gone(pid_of(before))
    await site.assert_no_worker_but_spares()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("delay_ms", [5, 60])
async def test_a_start_is_finished_once(site: Site, who: str, delay_ms: int) -> None:
    job = await site.submit(f"start-{who}-{delay_ms}")
    await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
    await site.kill(who)
    await site.revive(who)
    running = await job.running(WAIT_S)
    if site.runtime == "ray":
        assert await site.call(job, 9) == 9
    assert len(site.recorded("worker")) == 1
    await job.cancel()
    await job.finished(WAIT_S)
    assert is_gone(pid_of(running))
    await site.assert_no_worker_but_spares()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("actor", ["Yielding", "Hanging"])
async def test_a_stop_is_finished(site: Site, who: str, actor: str) -> None:
    arguments = {"args": ["sleep"]} if actor == "Hanging" else {}
    job = await site.submit(f"stop-{who}-{actor}", actor, component={"entry": "run", **arguments})
    running = await job.running(WAIT_S)
    await job.cancel()
    await asyncio.sleep(0.02)  # Inside the hooks of the one, at the kill of the other.
    await site.kill(who)
    await site.revive(who)
    ended = await job.finished(WAIT_S)
    assert ended.state == JobState.JOB_STATE_CANCELLED
    assert is_gone(pid_of(running))
    await site.assert_no_worker_but_spares()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("delay_ms", [10, 200])
async def test_a_preemption_is_finished(site: Site, who: str, delay_ms: int) -> None:
    name = f"{who}-{delay_ms}"
    victim = await site.submit(
        f"victim-{name}", "Hanging", both=True, priority=3, component={"entry": "run", "args": ["sleep"]}
    )
    before = await victim.running(WAIT_S)
    winner = await site.submit(f"winner-{name}", priority=9, both=True)
    await asyncio.sleep(delay_ms / 1000)  # The delays are the scenario's input.
    await site.kill(who)
    await site.revive(who)
    await winner.running(WAIT_S)
    assert is_gone(pid_of(before)), "I4: not before the victim is gone"
    assert (await victim.refresh()).state == JobState.JOB_STATE_PENDING
    await victim.cancel()
    await winner.cancel()
    for job in (victim, winner):
        await job.finished(WAIT_S)
    await site.assert_no_worker_but_spares()


async def test_an_end_while_nobody_watches_is_noticed(site: Site) -> None:
    job = await site.submit("dies", "SlowToExit", component={"entry": "run"}, restart={"max_restarts": 0})
    running = await job.running(WAIT_S)
    await site.kill("both")
    os.kill(pid_of(running), signal.SIGKILL)
    await site.revive("both")
    ended = await job.finished(WAIT_S)
    assert ended.state == JobState.JOB_STATE_FAILED
    await site.assert_no_worker_but_spares()


@pytest.mark.parametrize("who", ["agent", "controller", "both"])
async def test_ft_a1_ft_a6_output_is_followed_and_kept_through_a_kill(
    site: Site, who: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = tmp_path_factory.mktemp("gate") / "open"
    job = await site.submit(f"talker-{who}", "Talker", component={"kwargs": {"gate": str(gate)}, "entry": "run"})
    await job.running(timeout=WAIT_S)
    lines: asyncio.Queue[str] = asyncio.Queue()

    async def follow() -> None:
        async for line in job.logs(follow=True):
            await lines.put(line.text)

    following = asyncio.create_task(follow())
    assert await lines.get() == "hello from the worker"
    await site.kill(who)
    gate.touch()
    await site.revive(who)
    await job.finished(timeout=WAIT_S)
    await following
    assert [lines.get_nowait() for _ in range(lines.qsize())] == ["goodbye"], "each line once, and nothing of Ray's"
    assert [line.text async for line in job.logs(attempt=1)] == ["hello from the worker", "goodbye"]
