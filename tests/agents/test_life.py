"""Does the table of a worker's life hold what is promised, and does a worker do what the table says?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from callboard.agents.files.run_dir import Started
from callboard.agents.runtime import Launch
from callboard.agents.system.process_tree import TreeEnd
from callboard.agents.worker.life import MOVES, Effect, Event, Life, Move, NotListed, State
from callboard.agents.worker.order import Stage, WorkerOrder, WorkerRecord
from callboard.agents.worker.stop_ladder import unasked_stop
from callboard.agents.worker.worker import Worker
from callboard.security.processes import ProcessId
from callboard.v1 import agent_pb2

BEGINNINGS = (State.WAITING, State.ADOPTED)
REPORTS_OF_AN_END = {Effect.REPORT_NOT_STARTED, Effect.REPORT_STOPPED, Effect.REPORT_EXITED, Effect.REPORT_STUCK}


def every_move() -> Iterator[tuple[State, Event, Move]]:
    for state, moves in MOVES.items():
        for event, move in moves.items():
            yield state, event, move


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    reached = set(BEGINNINGS)
    while more := {move.state for state, _, move in every_move() if state in reached} - reached:
        reached |= more
    assert reached == set(State)
    ends = {State.GONE}
    while more := {state for state, _, move in every_move() if move.state in ends} - ends:
        ends |= more
    assert ends == set(State)


def test_every_event_and_effect_is_in_the_table() -> None:
    assert {event for _, event, _ in every_move()} == set(Event)
    assert {effect for _, _, move in every_move() for effect in move.effects} == set(Effect)


def test_i4_no_end_is_reported_before_the_proof_is_there_or_late() -> None:
    for state, event, move in every_move():
        if REPORTS_OF_AN_END & set(move.effects):
            assert event in (Event.PROVED, Event.LEFT), (state, event)
        assert (move.state is State.GONE) == (event is Event.PROVED), (state, event)
        assert (Effect.BURY in move.effects) == (event is Event.PROVED), (state, event)


def test_pc_13_a_stop_and_the_end_of_its_process_are_heard_in_every_state_but_the_last() -> None:
    for state in set(State) - {State.GONE}:
        assert {Event.STOP, Event.EXIT, Event.ORDER} <= set(MOVES[state]), state


def test_no_rung_of_the_ladder_is_left_out_on_the_way_to_the_kill() -> None:
    assert {state for state, _, move in every_move() if move.state is State.KILLING} == {
        State.ASKING,
        State.SAVING,
        State.KILLING,
    }
    assert {state for state, _, move in every_move() if move.state is State.SAVING} == {State.ASKING, State.SAVING}


def test_r5_what_is_constructed_was_guarded_and_leased_first() -> None:
    path = [State.WAITING, State.GUARDING, State.LEASING, State.UNPACKING, State.HOSTING, State.BUILDING, State.READY]
    for earlier, later in itertools.pairwise(path):
        before = {state for state, _, move in every_move() if move.state is later and state is not later}
        assert before - {State.ADOPTED, State.UNCLAIMED} == ({earlier} if later is not State.WAITING else set())


def test_what_is_not_listed_is_refused_with_the_state_and_the_event() -> None:
    for state, event in itertools.product(State, Event):
        life = Life(adopted=False)
        life.state = state
        if event in MOVES[state]:
            assert life.on(event) == MOVES[state][event].effects
            assert life.state is MOVES[state][event].state
        else:
            with pytest.raises(NotListed, match=f"{event.name} happened to a worker that is {state.name}"):
                life.on(event)
            assert life.state is state


class Ground:
    """What a worker stands on, played by the test."""

    def __init__(self) -> None:
        self.asked, self.renewed = asyncio.Event(), asyncio.Event()
        self.recorded = list[str]()
        self.reports = list[dict[str, Any]]()
        self.launched = list[str]()
        self.killed = list[ProcessId]()
        loop = asyncio.get_running_loop()
        self.error: asyncio.Future[BaseException | None] = loop.create_future()
        nobody = SimpleNamespace(take=lambda: None, starting=nullcontext)
        self.site: Any = SimpleNamespace(
            spares=nobody,
            fence=SimpleNamespace(watching=lambda: asyncio.sleep(0)),
            lease=SimpleNamespace(held=self._held, holds=lambda: True, check=lambda: True),
            processes=SimpleNamespace(oom_kills=lambda: 0, exited=lambda _: loop.create_future(), end=self._end),
            runtime=SimpleNamespace(launch=self._launch, abandon=lambda _: None),
            run_dir=SimpleNamespace(put=self._put, drop=lambda *_: None),
            interpreters=SimpleNamespace(check=lambda *_: asyncio.sleep(0)),
            outbox=SimpleNamespace(report=lambda _, **report: self.reports.append(report)),
            ports=SimpleNamespace(release=lambda _: None, facts=lambda _: {}),
            outputs=SimpleNamespace(stderr_tail=lambda *_: ""),
            memory=None,
        )

    def worker(self, record: WorkerRecord | None = None) -> Worker:
        """A strict worker that has begun its life here."""
        worker = Worker(self.order(), self.site, self._ended, record=record)
        worker.begin()
        return worker

    def order(self) -> WorkerOrder:
        """Its start command."""
        command = agent_pb2.StartWorker(strict=True, start_timeout_ms=60_000)
        received_at = asyncio.get_running_loop().time()
        return WorkerOrder("c1", command, Launch("j/c/0/g1", "python", {}), {}, "", received_at)

    def _ended(self, _: Worker, error: BaseException | None) -> None:
        self.error.set_result(error)

    async def _held(self) -> None:
        self.asked.set()
        await self.renewed.wait()

    def _put(self, started: Started) -> None:
        self.recorded.append(started.facts["stage"])

    async def _launch(self, launch: Launch) -> Any:
        self.launched.append(launch.name)
        return SimpleNamespace(process=ProcessId(7, 7), address="", peak_bytes=0, release=lambda: None)

    async def _end(self, process: ProcessId, **_: Any) -> TreeEnd:
        self.killed.append(process)
        return TreeEnd((), 1)


async def test_r5_a_start_goes_no_further_once_its_stop_is_asked_also_when_what_it_waited_for_came() -> None:
    """An agent that was stopped for longer than its lease reads its renewal and the end of its workers at once."""
    ground = Ground()
    worker = ground.worker()
    await ground.asked.wait()
    ground.renewed.set()
    worker.stop(unasked_stop("its lease ended"))
    await worker.gone.wait()
    # No failure of the worker: its job starts elsewhere.
    assert ground.reports[0]["worker_stopped"].detail == "its lease ended, before the node's lease was renewed"
    assert ground.recorded == ground.launched == []


async def test_i4_what_an_earlier_agent_may_have_launched_is_ended_however_early_its_start_is_stopped() -> None:
    """The agent was killed while the host came up: only a launch by its name finds it."""
    ground = Ground()
    order = ground.order()
    worker = ground.worker(WorkerRecord("c0", order.command, Stage.LAUNCHING))
    worker.start_again(order)
    await ground.asked.wait()
    worker.stop(unasked_stop("nobody wants it any more"))
    await worker.gone.wait()
    assert ground.launched == ["j/c/0/g1"]
    assert ground.killed == [ProcessId(7, 7)]
    assert ground.recorded == [Stage.ENDING]


async def test_a_defect_in_the_work_of_a_worker_is_told_and_no_silent_end() -> None:
    ground = Ground()
    worker = ground.worker()
    await ground.asked.wait()
    with pytest.raises(NotListed, match="BUILT happened to a worker that is LEASING"):
        worker._happens(Event.BUILT)

    async def broken() -> None:
        raise ZeroDivisionError

    worker._watch(broken())
    assert isinstance(await ground.error, ZeroDivisionError)
    assert not worker.gone.is_set()
