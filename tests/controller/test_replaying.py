"""What a controller decided can be decided again from its journal alone, and comes to the same."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.controller.journal import store as store_module
from callboard.controller.journal.codec import Decision, decode_decision, encode_decision
from callboard.controller.journal.rerun import Step, rerun
from callboard.controller.journal.state_dir import JOURNAL_NAME, StateDir
from callboard.controller.journal.store import FORMAT, Store
from callboard.model.specs import ComponentSpec
from callboard.scheduler import Outcome, Refusal, check_invariants
from callboard.scheduler.records.events import Event, JobSubmitted
from callboard.v1 import job_pb2
from tests.controller.support import api_at, job, options_for, pool, refusal_of, running
from tests.scheduler.histories import History, TwinWorld
from tests.scheduler.twin import Twin
from tests.scheduler.world import World, job_spec
from tests.support.fake_agent import FakeAgent

LANDED = Path(__file__).parents[1] / "data" / "journals" / "format_1.sql.gz"
SECRET = "hunter2-hunter2"


class Recorded:
    """A store in which every decision of a world is kept as a controller keeps it."""

    def __init__(self, path: Path) -> None:
        self.directory = StateDir(path)
        self.directory.open()
        self.store = Store.of(self.directory, events_kept=10_000)
        self.count = 0

    def scheduler(self) -> type[Twin]:
        """Schedulers whose decisions are kept."""
        recorded = self

        class Kept(Twin):
            def handle(self, event: Event) -> Outcome:
                try:
                    outcome = super().handle(event)
                except Refusal as refusal:
                    recorded.keep(event, refusal, self.next_wake_ms())
                    raise
                recorded.keep(event, outcome, self.next_wake_ms())
                return outcome

        return Kept

    def of(self, world: World) -> None:
        """Keeps what is decided in this world from now on."""
        world.make_scheduler = self.scheduler()
        world.scheduler = world.make_scheduler(world.state)

    def keep(self, event: Event, outcome: Outcome | Refusal, wake_ms: int | None) -> None:
        changes, events = (outcome.changes, outcome.events) if isinstance(outcome, Outcome) else ((), ())
        decision = Decision(event=event, changes=len(changes), wake_ms=wake_ms, ended_jobs=1_000, outcome=outcome)
        self.count += bool(changes)
        self.store.commit(changes, events, [decision])

    def decided(self, steps: list[Step]) -> list[Step]:
        """Those that changed something, as often as it was decided."""
        return [step for step in steps if step.changes]

    def close(self) -> None:
        self.store.close()
        self.directory.close()

    def steps(self) -> list[Step]:
        return list(rerun(self.directory.journal_path))


def differing(steps: list[Step]) -> list[tuple[str, ...]]:
    return [step.differences for step in steps if step.differences]


@pytest.mark.parametrize("seed", [3, 8])
def test_a_history_is_decided_again_alike_across_snapshots_and_restarts(tmp_path: Path, seed: int) -> None:
    recorded = Recorded(tmp_path / "s")

    class KeptWorld(World):
        make_scheduler = recorded.scheduler()

    class KeptHistory(History):
        world_type = KeptWorld

    history = KeptHistory(seed)
    for number in range(300):
        history.step()
        if number % 40 == 39:
            recorded.store.snapshot(list(history.world.state.records()))
    steps = recorded.steps()
    assert differing(steps) == []
    assert len(recorded.decided(steps)) == recorded.count > 100
    assert any(isinstance(step.outcome, Refusal) for step in steps)
    assert steps[-1].revision == history.world.state.meta.revision
    recorded.close()


def test_only_the_newest_decisions_are_kept_and_can_still_be_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "REPLAYABLE", 60)
    recorded = Recorded(tmp_path / "s")
    world = World()
    recorded.of(world)
    world.join("n1", 4)
    world.pool()
    kept = []
    for number in range(60):
        world.submit(f"j{number}")
        world.complete(f"j{number}")
        if number % 4 == 3:
            recorded.store.snapshot(list(world.state.records()))
            with closing(sqlite3.connect(recorded.directory.journal_path)) as database:
                kept.append(database.execute("SELECT count(*) FROM log").fetchone()[0])
    assert max(kept) <= 3 * 60
    assert min(kept[4:]) >= 60
    steps = recorded.steps()
    assert differing(steps) == []
    assert 5 < len(recorded.decided(steps)) < recorded.count
    recorded.close()
    reopened = Recorded(tmp_path / "s")
    state = reopened.store.load()
    assert list(state.records()) == list(world.state.records())
    reopened.close()


def waiting(tmp_path: Path) -> tuple[Recorded, World]:
    """A job that waits for two GPUs, of which one is taken by a job that need not yield."""
    recorded, world = Recorded(tmp_path / "s"), World()
    recorded.of(world)
    world.join("n1", 2)
    world.pool()
    world.submit("first", priority=5, preemptible=False)
    world.submit("second", priority=9, workers=2)
    return recorded, world


def test_a_decision_is_explained_as_it_was(tmp_path: Path) -> None:
    recorded, world = waiting(tmp_path)
    revision = world.job("second").revision
    world.complete("first")
    recorded.close()
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "s"), "--explain", str(revision)])
    assert shown.exit_code == 0, shown.output
    assert "JobSubmitted" in shown.stdout
    assert "second: WAIT, second waits: room for 1 of 2 workers; n1 lacks 1 GPU" in shown.stdout
    assert "first need not yield: first is not preemptible" in shown.stdout
    assert "all as they were" in shown.stdout
    whole = CliRunner().invoke(app, ["replay", str(tmp_path / "s"), "-o", "json"])
    report = json.loads(whole.stdout)
    assert (report["decisions"], report["differing"]) == (len(report["steps"]), 0)
    assert sum(step["changes"] > 0 for step in report["steps"]) == recorded.count
    until = CliRunner().invoke(app, ["replay", str(tmp_path / "s"), "--until", str(revision), "-o", "json"])
    assert max(step["revision"] for step in json.loads(until.stdout)["steps"]) == revision


def test_a_decision_that_differs_is_named_and_leads_to_no_other(tmp_path: Path) -> None:
    recorded, world = waiting(tmp_path)
    world.submit("third", workers=3, wait_for_nodes_ms=1_000_000)
    recorded.close()
    with closing(sqlite3.connect(tmp_path / "s" / JOURNAL_NAME)) as database:
        (number, line) = database.execute(
            "SELECT sequence, line FROM log WHERE line LIKE '%\"waits for its placement group\"%'"
        ).fetchone()
        # Behind its checksum; an earlier version wrote none.
        changed = line[8:].replace("waits for its placement group", "was decided otherwise")
        database.execute("UPDATE log SET line = ? WHERE sequence = ?", (changed, number))
        database.commit()
    steps = list(rerun(tmp_path / "s" / JOURNAL_NAME))
    assert len(differing(steps)) == 1
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "s"), "--quiet"])
    assert shown.exit_code == 1
    assert "DIFFERS: change" in shown.stdout
    assert "1 of them differ" in shown.stdout


def test_what_was_refused_is_decided_again_and_shown_with_its_reason(tmp_path: Path) -> None:
    recorded, world = waiting(tmp_path)
    with pytest.raises(Refusal):
        world.submit("first", priority=5)
    with pytest.raises(Refusal):
        world.submit("huge", workers=9)
    recorded.close()
    steps = list(rerun(tmp_path / "s" / JOURNAL_NAME))
    assert differing(steps) == []
    assert [step.outcome.code.value for step in steps if isinstance(step.outcome, Refusal)] == [
        "ALREADY_EXISTS",
        "UNSCHEDULABLE",
    ]
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "s")])
    assert "refused: " in shown.stdout
    assert "job first exists and is RUNNING; cancel it or choose another name" in shown.stdout


@pytest.mark.parametrize(
    ("table", "old", "new", "said"),
    [
        ("decision", '"commands": 1', '"commands": 2', "it leads to 1 commands, not to 2"),
        ("decision", '"digest": "', '"digest": "0', "its commands or its result are others"),
        ("decision", '"refused": false', '"refused": true', "it is not refused"),
        ("fruitless", '"refused": true', '"refused": false', "it is refused: "),
        ("fruitless", '"digest": "', '"digest": "0', "it is refused for another reason"),
    ],
)
def test_a_rerun_that_tells_others_something_else_differs(
    tmp_path: Path, table: str, old: str, new: str, said: str
) -> None:
    recorded, world = waiting(tmp_path)
    with pytest.raises(Refusal):
        world.submit("first", priority=5)
    recorded.close()
    with closing(sqlite3.connect(tmp_path / "s" / JOURNAL_NAME)) as database:
        key = "sequence" if table == "decision" else "number"
        number, body = database.execute(
            f"SELECT {key}, body FROM {table} WHERE instr(body, ?) ORDER BY {key} LIMIT 1",
            (old,),
        ).fetchone()
        database.execute(f"UPDATE {table} SET body = ? WHERE {key} = ?", (body[8:].replace(old, new), number))
        database.commit()
    (found,) = differing(list(rerun(tmp_path / "s" / JOURNAL_NAME)))
    assert found[0].startswith(said)


def test_a_journal_that_says_nothing_of_commands_and_refusals_is_read(tmp_path: Path) -> None:
    recorded, world = waiting(tmp_path)
    with pytest.raises(Refusal):
        world.submit("first", priority=5)
    recorded.close()
    with closing(sqlite3.connect(tmp_path / "s" / JOURNAL_NAME)) as database:
        for number, body in database.execute("SELECT sequence, body FROM decision").fetchall():
            plain = json.loads(body[8:])  # behind its checksum
            del plain["told"]
            database.execute("UPDATE decision SET body = ? WHERE sequence = ?", (json.dumps(plain), number))
        database.execute("DROP TABLE fruitless")
        database.commit()
    steps = list(rerun(tmp_path / "s" / JOURNAL_NAME))
    assert differing(steps) == []
    assert len(steps) == recorded.count
    again = Recorded(tmp_path / "s")
    assert again.store.load().jobs
    again.close()


def test_a_request_that_differs_in_a_secret_only_is_not_compared(tmp_path: Path) -> None:
    recorded, world = Recorded(tmp_path / "s"), World()
    recorded.of(world)
    world.join("n1", 2)
    world.pool()
    for value in (SECRET, "other"):
        part = ComponentSpec(name="main", actor="a:B", secret_env=(("x", value),))
        spec = job_spec("a", components=[part])
        event = JobSubmitted(now_ms=world.now_ms, uid=f"u-{value}", spec=spec, request_id="r")
        if value == SECRET:
            world.send(event)
        else:
            with pytest.raises(Refusal, match="was used for another request"):
                world.send(event)
    assert differing(recorded.steps()) == []
    recorded.close()


def test_decisions_that_changed_nothing_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "FRUITLESS", 5)
    recorded, world = waiting(tmp_path)
    for _ in range(12):
        with pytest.raises(Refusal):
            world.submit("first", priority=5)
    assert sum(not step.changes for step in recorded.steps()) == 5
    recorded.close()


def test_a_directory_without_a_journal_is_bad_input(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert shown.exit_code == 2
    assert "is not there" in shown.stderr


def test_secret_values_are_in_no_decision(tmp_path: Path) -> None:
    recorded, world = Recorded(tmp_path / "s"), World()
    recorded.of(world)
    world.join("n1", 2)
    world.pool()
    part = ComponentSpec(name="main", actor="a:B", env=(("API_TOKEN", SECRET),), secret_env=(("x", SECRET),))
    world.submit(job_spec("a", components=[part]))
    steps = recorded.steps()
    assert differing(steps) == []
    recorded.close()
    assert all(SECRET.encode() not in file.read_bytes() for file in (tmp_path / "s").iterdir())


def test_what_is_written_of_a_decision_is_read_again() -> None:
    event = JobSubmitted(now_ms=5, cause="c", uid="u", spec=job_spec("a"), request_id="r")
    decision = Decision(event=event, changes=3, wake_ms=None, ended_jobs=7)
    assert decode_decision(encode_decision(decision)) == decision
    assert decode_decision(encode_decision(replace(decision, wake_ms=9))).wake_ms == 9


def test_a_journal_of_the_landed_version_is_read_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s" / JOURNAL_NAME
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(gzip.decompress(LANDED.read_bytes()).decode())
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
    before = list(rerun(path))
    assert [step.decision for step in before] == [None]
    assert before[-1].revision == 157
    recorded = Recorded(path.parent)
    state = recorded.store.load()
    check_invariants(state)
    assert (len(state.jobs), state.meta.revision) == (13, 157)
    world = TwinWorld()
    world.scheduler = Twin(state)
    world.now_ms = state.meta.now_ms
    recorded.of(world)
    world.tick(60_000)
    for node_id in list(state.nodes):
        world.join(node_id, {"cpu": 4, "memory": "8GiB", "gpu": 2})
    steps = recorded.steps()
    assert differing(steps) == []
    assert len(recorded.decided(steps)) == 1 + recorded.count > 3
    recorded.store.snapshot(list(world.state.records()))
    assert differing(recorded.steps()) == []
    recorded.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (FORMAT,)


async def test_what_a_real_controller_decided_is_decided_again_alike(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    refused = []
    for _ in range(2):
        async with running(options) as controller, api_at(controller.address) as api:
            await api.pools.CreatePool(pool())
            async with FakeAgent(controller.address):
                await api.submit(job(f"a{controller.driver.state.meta.term}", gpu=1000))
                await api.until_job(f"a{controller.driver.state.meta.term}", "RUNNING")
                refused.append((await refusal_of(api.submit(job("too-big", gpu=9_000_000)))).message)
                name = f"jobs/a{controller.driver.state.meta.term}"
                await api.jobs.CompleteJob(job_pb2.CompleteJobRequest(name=name))
                # Beside the running controller.
                assert differing(list(rerun(options.state_dir / JOURNAL_NAME))) == []
    steps = list(rerun(options.state_dir / JOURNAL_NAME))
    assert differing(steps) == []
    decided = {type(step.decision.event).__name__ for step in steps if step.decision is not None}
    # Each was journaled with the change that came next.
    refusals = [step.outcome for step in steps if isinstance(step.outcome, Refusal)]
    assert [each.message for each in refusals] == refused
    assert {"ControllerStarted", "NodeJoined", "JobSubmitted", "WorkerStarted", "JobCompleted"} <= decided
