"""The records and the next event determine everything: no scheduler knows more than one made anew from its records.

The random histories and the scenario files are decided twice, too: their worlds have a :class:`Twin`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from callboard.scheduler import State, check_invariants
from callboard.scheduler.handlers import passes
from callboard.scheduler.records.job_records import Put
from callboard.scheduler.records.states import ENDED
from callboard.scheduler.state import indexes
from callboard.scheduler.state.indexes import InOrder
from callboard.scheduler.state.invariants import whole
from callboard.simulation import SimulationOptions, Simulator
from tests.scheduler.histories import run
from tests.scheduler.twin import Twin
from tests.scheduler.world import job_spec, pool_spec


@pytest.mark.parametrize("placed", [False, True])
def test_a_fresh_history_is_decided_alike_by_a_scheduler_made_from_the_records(placed: bool) -> None:
    compared = Twin.compared
    events = 0
    for _ in range(4):
        history = run(random.SystemRandom().randrange(1_000, 1_000_000_000), placed=placed)
        events += len(history.sent)
    assert Twin.compared >= compared + events > compared


@pytest.mark.parametrize("seed", [2, pytest.param(random.SystemRandom().randrange(1_000, 1_000_000), id="fresh")])
def test_so_is_a_simulated_run_with_all_faults(seed: int) -> None:
    simulator = Simulator(SimulationOptions(seed=seed, events=400, nodes=5))
    simulator.controller.make_scheduler = Twin
    report = simulator.run()
    assert report.failure is None, f"seed {seed}: {report.failure}"


def histories() -> None:
    for seed in range(20):
        run(seed)


def test_an_index_that_remembers_how_its_members_came_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InOrder, "put", lambda self, key, value: self.__setitem__(key, value))
    with pytest.raises(AssertionError, match=r"index: |Differs"):
        histories()


def test_a_memory_beside_the_records_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, decide = itertools.count(), passes.run
    monkeypatch.setattr(passes, "run", lambda tx: decide(tx) if next(calls) % 7 else None)
    with pytest.raises(AssertionError, match="Differs"):
        histories()


def test_a_table_is_walked_through_by_place_however_its_members_came() -> None:
    numbers = list(range(50))
    random.Random(1).shuffle(numbers)
    index: InOrder[str, int] = InOrder()
    for number in numbers:
        index.put(f"m{number}", number)
        if number % 7 == 0:
            del index[f"m{number}"]
        assert list(index.values()) == sorted(index.values())
    assert list(reversed(index)) == list(index)[::-1]
    assert [key for key, _ in index.items()] == list(index.keys()) == list(index)


class Place(int):
    compared = 0

    def __lt__(self, other: int) -> bool:
        Place.compared += 1
        return super().__lt__(other)


def test_many_that_come_in_the_wrong_order_are_not_sorted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the groups of many nodes that are lost do: a journal of 13,000 took five seconds to read."""
    monkeypatch.setattr(Place, "compared", 0)
    index: dict[str, dict[str, Place]] = {}
    for number in reversed(range(3_000)):
        indexes.add(index, "node", f"m{number}", Place(number))
    assert list(index["node"].values()) == list(range(3_000))
    assert Place.compared < 100_000


def test_an_entry_with_many_members_is_decided_by_as_one_with_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "_FEW", 1)
    for seed in range(4):
        run(seed)


def test_records_in_any_order_make_the_same_state() -> None:
    history = run(5)
    world = history.world
    world.join("n9", {"cpu": 4, "memory": "8GiB", "gpu": 2})
    world.pool(pool_spec("late"))
    for number in range(6):
        world.submit(job_spec(f"late-{number}", pool="late", priority=number))
    records = list(world.state.records())
    kinds = list(dict.fromkeys(record.kind for record in records))
    for seed in range(5):
        chance = random.Random(seed)
        # Kind by kind, as a journal has them; within a kind as it comes.
        shuffled = sorted(records, key=lambda record: (kinds.index(record.kind), chance.random()))
        state = State()
        for record in shuffled:
            state.apply(Put(record))
        check_invariants(state)
        assert whole(state) == whole(world.state)


@pytest.mark.parametrize("names", [7, 40])
def test_jobs_that_have_ended_are_put_at_once_as_one_by_one(names: int) -> None:
    world = run(5).world
    world.pool(pool_spec("late"))
    for number in range(40):
        world.submit(job_spec(f"late-{number % names}", pool="late"))
        world.cancel(f"late-{number % names}")
    chance = random.Random(1)
    ended = [
        replace(job, state=chance.choice(list(ENDED)), request_id=f"r{job.order}" if job.order % 3 else "")
        for job in world.state.jobs.values()
        if job.state in ENDED and not job.deadline_ms
    ]
    assert len(ended) >= 40
    chance.shuffle(ended)
    one_by_one, at_once = State(), State()
    for first in range(0, len(ended), 10):
        jobs = ended[first : first + 10]
        at_once.put_ended([world.state.specs[job.uid] for job in jobs], jobs)
        for job in jobs:
            one_by_one.apply(Put(world.state.specs[job.uid]))
            one_by_one.apply(Put(job))
    assert whole(at_once) == whole(one_by_one)
    assert list(at_once.records()) == list(one_by_one.records())
