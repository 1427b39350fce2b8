"""The simulator notices: a broken scheduler, agent or journal is caught by the rule that it breaks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from callboard.agents.system.process_tree import TreeEnd
from callboard.controller.journal.store import Store
from callboard.scheduler import Outcome, Scheduler
from callboard.scheduler.records.commands import StopWorker
from callboard.scheduler.records.events import Event, WorkerStopped
from callboard.scheduler.records.states import StopOutcome
from callboard.simulation import Fault, SimulationFailure, SimulationOptions, SimulationReport, Simulator
from callboard.simulation.checks.witness import GOODBYE_MS
from callboard.simulation.options import NO_FAULTS
from callboard.simulation.world.agent_machine import Fence, SimulatedProcesses
from callboard.simulation.world.network import End, Stream
from callboard.simulation.world.rules import RuleBroken
from callboard.v1 import agent_pb2
from callboard.wire.refusals import Unavailable

OPTIONS = SimulationOptions(seed=2, events=3_000, nodes=4)


def failure_of(simulator: Simulator) -> SimulationFailure:
    failure = simulator.run().failure
    assert failure is not None, "nothing was noticed"
    return failure


class Hasty(Scheduler):
    """Takes a stop for done as soon as it is asked for."""

    def handle(self, event: Event) -> Outcome:
        outcome = super().handle(event)
        changes, events = list(outcome.changes), list(outcome.events)
        for command in outcome.commands:
            if isinstance(command, StopWorker) and command.generation in self.state.workers:
                gone = WorkerStopped(
                    now_ms=event.now_ms,
                    node_id=command.node_id,
                    generation=command.generation,
                    outcome=StopOutcome.KILLED,
                )
                more = super().handle(gone)
                changes += more.changes
                events += more.events
        return Outcome(tuple(changes), outcome.commands, tuple(events), outcome.result)


def test_a_scheduler_that_frees_devices_before_the_proof_is_caught() -> None:
    simulator = Simulator(replace(OPTIONS, seed=3))  # not every history brings it about in so few events
    simulator.controller.make_scheduler = Hasty
    failure = failure_of(simulator)
    assert failure.rule == "R2/I4"
    assert "its processes live on" in failure.message
    assert failure.story, "the job's story is told"
    assert failure.last_events
    assert failure.command == "callboard simulate --seed 3 --nodes 4 --events 3000 --faults all"


def test_an_agent_that_reports_a_stop_before_the_kill_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lies(*_: object, **__: object) -> TreeEnd:
        return TreeEnd(left=(), killed=1)

    monkeypatch.setattr(SimulatedProcesses, "end", lies)
    assert failure_of(Simulator(OPTIONS)).rule in {"R2/I4", "R2/I1"}


def test_r5_strict_copies_that_outlive_their_stopped_or_killed_agents_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def runs() -> Iterator[SimulationReport]:
        # A copy must be there when its node is given up, which not every history brings about.
        for seed in range(5, 12):
            options = SimulationOptions(seed=seed, events=700, nodes=4, faults=frozenset({Fault.AGENT}))
            yield Simulator(options).run()

    report = next(runs())
    assert report.failure is None
    assert dict(report.faults)["worker ended by its fence"] > 0
    monkeypatch.setattr(Fence, "end", lambda *_: None)
    failure = next((report.failure for report in runs() if report.failure is not None), None)
    assert failure is not None, "nothing was noticed"
    assert failure.rule == "R5"


def test_a_journal_that_loses_what_it_acknowledged_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, batches = Store.commit, itertools.count(1)

    def forgets(self: Store, *batch: Any) -> None:
        if next(batches) % 10:
            commit(self, *batch)

    monkeypatch.setattr(Store, "commit", forgets)
    failure_of(Simulator(OPTIONS))


def test_a_controller_that_gives_up_strict_nodes_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callboard.controller.loop.liveness.MARGIN_MS", -20_000)
    assert failure_of(Simulator(OPTIONS)).rule == "R5"


def test_a_controller_that_believes_the_hello_of_a_dead_run_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> Iterator[SimulationReport]:
        # Its successor must run something and be silent, which not every history brings about.
        for seed in range(12, 24):
            yield Simulator(SimulationOptions(seed=seed, events=600, nodes=4)).run()

    monkeypatch.setattr("callboard.simulation.world.network.STUCK_HELLOS", 0.35)
    assert next(runs()).failure is None
    monkeypatch.setattr("callboard.controller.sessions.sessions.check_order", lambda *_: None)
    failure = next((report.failure for report in runs() if report.failure is not None), None)
    assert failure is not None, "nothing was noticed"
    assert failure.rule in {"R2/I4", "I9"}


def test_a_defect_that_production_code_logs_and_answers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("callboard.simulation.programs.controller._Call.invocation_metadata")
    failure = failure_of(Simulator(OPTIONS))
    assert failure.rule == "defect"
    assert "a handler failed" in failure.message


def test_a_cluster_that_lets_no_agent_in_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise Unavailable("come again")

    monkeypatch.setattr("callboard.controller.sessions.sessions.check_hello", refuses)
    failure = failure_of(Simulator(SimulationOptions(seed=2, events=20, nodes=2)))
    assert failure.rule == "end"
    assert "was never let in" in failure.message


@pytest.mark.parametrize("later_epoch", [1, 2])
def test_seed_711008_a_welcome_that_another_session_has_overtaken_is_no_belief(later_epoch: int) -> None:
    """Two Hellos of one agent are let in at once, each by a stream of its own; the older Welcome is sent last."""
    simulator = Simulator(OPTIONS)
    controller, network, timeline = simulator.controller, simulator.site.network, simulator.timeline
    streams = [network.open("n0", cast("End", None), cast("End", controller)) for _ in range(2)]
    for number, stream in enumerate(streams, 1):
        hello = agent_pb2.Hello(node_id="n0", instance="i", number=number)
        controller.witness.received(stream, ("hello", hello))
    controller.witness.sent(streams[1], ("welcome", agent_pb2.Welcome(epoch=1 + 2 - later_epoch)))
    controller.witness.sent(streams[0], ("welcome", agent_pb2.Welcome(epoch=later_epoch)))
    if later_epoch == 1:
        timeline.step(0)
    else:  # the first Hello made the newest session: that is to believe it after the second
        with pytest.raises(RuleBroken, match="Hello 1 of n0 is believed after 2"):
            timeline.step(0)
    timeline.close_down()
    simulator.disk.close()


@pytest.mark.parametrize("trouble", ["crash", "freeze"])
def test_seed_980174_a_goodbye_is_due_only_while_somebody_is_there_who_could_take_it(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A goodbye is read, and the controller dies or is stopped before what it means is on disk, for longer than a
    goodbye may take to count."""
    simulator = Simulator(replace(OPTIONS, events=200, nodes=2, faults=NO_FAULTS))
    controller, timeline, witness = simulator.controller, simulator.timeline, simulator.controller.witness
    bid_farewell, away_ms = witness.bid_farewell, 2 * GOODBYE_MS
    met: list[str] = []

    def strikes() -> None:
        if trouble == "crash":
            controller.crash()
            timeline.after(away_ms, controller.start)
        else:
            controller.freeze(away_ms)

    def watched(stream: Stream) -> None:
        bid_farewell(stream)
        if not met:
            met.append(stream.node_id)
            strikes()

    monkeypatch.setattr(witness, "bid_farewell", watched)
    timeline.after(20_000, lambda: simulator.supervisors[1].leave(5_000))
    assert simulator.run().failure is None
    assert met == [simulator.supervisors[1].node_id]
