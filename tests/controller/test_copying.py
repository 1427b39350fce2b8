"""A journal that is copied, backed up or restored is the one that it was, or nothing is there."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from callboard.cli.main import app
from callboard.controller.journal.copying import BEYOND, Until, back_up_journal, copy_journal, restore_journal
from callboard.controller.journal.postgres import LOCK, PostgresDatabase
from callboard.controller.journal.rerun import rerun
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import JOURNAL_NAME, KEY_NAME, PACKAGES_NAME, StateDir, StoreFailed
from callboard.controller.journal.store import Store
from callboard.controller.package_store import PIECE_BYTES, Packages, SharedPackages
from callboard.scheduler import State
from callboard.scheduler.records.job_records import MetaRecord, Record, SpecRecord
from tests.controller.test_package_store import named
from tests.controller.test_replaying import Recorded
from tests.controller.test_store import SECRET, Opened, event, submission
from tests.scheduler.world import World


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The directory of a controller that has ended; its jobs have secrets."""
    opened = Opened(tmp_path / "state")
    for number in range(1, 6):
        opened.store.commit(submission(number, secret=f"{SECRET}{number}"), [event(number)])
    (opened.directory.path / "token").write_text("the owner's\n")
    opened.close()
    return opened.directory.path


def loaded(path: Path) -> list[Record]:
    directory = StateDir(path)
    directory.open()
    store = Store.of(directory, events_kept=100)
    records = list(store.load().records())
    store.close()
    directory.close()
    return records


def gone_on(before: Sequence[Record], after: Sequence[Record]) -> bool:
    """Whether two states are the same, but for the numbers that no worker and no group may be given again."""
    (meta, *others), (went_on, *same) = before, after
    assert isinstance(meta, MetaRecord)
    beyond = replace(meta, next_generation=meta.next_generation + BEYOND, next_group=meta.next_group + BEYOND)
    return (beyond, others) == (went_on, same)


def test_a_journal_goes_to_postgresql_and_back_with_its_secrets_and_identity(
    state: Path, tmp_path: Path, postgres_url: str
) -> None:
    there = copy_journal(state, postgres_url)
    assert there.revision == 5
    with closing(PostgresDatabase(postgres_url, "tests")) as database:
        store = Store(database, SecretStore(database, state / KEY_NAME, seals_anew=False), events_kept=100)
        assert len(store.newest_events(100)) == 5
        # It goes on: what came over takes further commits.
        store.commit(submission(6), [event(6)])
        with pytest.raises(StoreFailed, match="holds a journal already"):
            copy_journal(state, postgres_url)
        database.execute("SELECT pg_advisory_lock(?)", (LOCK,))
        with pytest.raises(StoreFailed, match="is in use: a controller leads there"):
            copy_journal(postgres_url, tmp_path / "back", key=state / KEY_NAME)
        # The server ends a session some time after its client: a busy one after the next copy has begun.
        database.execute("SELECT pg_advisory_unlock(?)", (LOCK,))
    copy_journal(postgres_url, tmp_path / "back", key=state / KEY_NAME)
    assert (tmp_path / "back" / "identity").read_text() == (state / "identity").read_text()
    back = State.of(loaded(tmp_path / "back"))
    assert list(back.jobs) == [f"j{number}" for number in range(1, 7)]
    assert list(back.specs.values())[:5] == [each for each in loaded(state) if isinstance(each, SpecRecord)]


async def test_code_that_jobs_brought_goes_along_from_place_to_place(
    state: Path, tmp_path: Path, postgres_url: str
) -> None:
    code, spoilt = os.urandom(5 << 20), os.urandom(100)
    kept = Packages(state / PACKAGES_NAME, dict)
    pieces = range(0, len(code), PIECE_BYTES)
    for at in pieces:
        await kept.put(named(code), len(code), at, code[at : at + PIECE_BYTES])
    await kept.put(named(spoilt), 100, 0, spoilt)
    await kept.put(named(b"begun"), 5, 0, b"beg")
    (state / PACKAGES_NAME / named(spoilt).partition(":")[2]).write_bytes(b"a disk changed it")

    assert copy_journal(state, postgres_url).rows["package"] == 1
    assert back_up_journal(postgres_url, tmp_path / "b", key=state / KEY_NAME).rows["package"] == 1
    assert restore_journal(tmp_path / "b", tmp_path / "new").rows["package"] == 1
    names = [path.name for path in (tmp_path / "new" / PACKAGES_NAME).iterdir()]
    assert names == [named(code).partition(":")[2]], "neither what is spoilt nor what is not whole"
    there = Packages(tmp_path / "new" / PACKAGES_NAME, dict)
    assert b"".join([(await there.read(named(code), at))[1] for at in pieces]) == code
    successor = Packages(tmp_path / "another", dict, shared=SharedPackages(postgres_url))
    assert await successor.obtain(named(code)), "a controller on the database has it"


def test_a_backup_of_before_packages_is_restored(state: Path, tmp_path: Path) -> None:
    back_up_journal(state, tmp_path / "b")
    with closing(sqlite3.connect(tmp_path / "b")) as file, file:
        file.execute("DROP TABLE package")
    assert restore_journal(tmp_path / "b", tmp_path / "new").rows["package"] == 0


def test_a_store_in_use_and_a_key_that_is_another_are_refused_and_nothing_is_there(state: Path, tmp_path: Path) -> None:
    held = StateDir(state)
    held.open()
    with pytest.raises(StoreFailed, match="is held by another controller"):
        copy_journal(state, tmp_path / "other")
    held.close()
    (tmp_path / "key").write_bytes(bytes(32))
    with pytest.raises(StoreFailed, match="needs the secret variables"):
        back_up_journal(state, tmp_path / "backup", key=tmp_path / "key")
    assert not list(tmp_path.glob("*backup*"))
    (tmp_path / "key").write_bytes(b"none")
    with pytest.raises(StoreFailed, match="is not the key"):
        back_up_journal(state, tmp_path / "backup", key=tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == b"none"


def test_what_is_no_journal_and_a_folder_that_is_not_there_are_said_to_be_that(state: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("no journal")
    with pytest.raises(StoreFailed, match="is not a backup"):
        restore_journal(tmp_path / "notes", tmp_path / "new")
    for nowhere in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(StoreFailed, match="holds no journal"):
            back_up_journal(nowhere, tmp_path / "b")
    with pytest.raises(StoreFailed, match="can't be made") as raised:
        back_up_journal(state, tmp_path / "nowhere" / "b")
    assert "its directory" in raised.value.remedy
    (tmp_path / "nowhere").mkdir()
    assert back_up_journal(state, tmp_path / "nowhere" / "b").key.is_file(), "what the remedy says helps"


def test_a_backup_is_made_beside_a_controller_and_restored_from_the_command_line(state: Path, tmp_path: Path) -> None:
    before = loaded(state)
    directory = StateDir(state)
    directory.open()
    store = Store.of(directory, events_kept=100)
    said = CliRunner().invoke(app, ["store", "backup", str(state), str(tmp_path / "b")])
    assert said.exit_code == 0, said.output
    store.commit(submission(6), [event(6)])
    store.close()
    directory.close()
    assert loaded(state) != before
    assert (tmp_path / "b").stat().st_mode & 0o777 == (tmp_path / "b.key").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(state)
    said = CliRunner().invoke(app, ["store", "restore", str(tmp_path / "b"), str(state)])
    assert said.exit_code == 0, said.output
    assert "at revision 5" in said.output
    assert (state / "token").read_text() == "the owner's\n"
    assert gone_on(before, loaded(state))
    again = CliRunner().invoke(app, ["store", "restore", str(tmp_path / "b"), str(state)])
    assert again.exit_code == 2
    assert "holds a journal already" in again.output


def test_a_directory_that_begins_with_a_dot_is_restored_like_any_other(state: Path, tmp_path: Path) -> None:
    back_up_journal(state, tmp_path / ".b")
    restore_journal(tmp_path / ".b", tmp_path / ".new")
    assert gone_on(loaded(state), loaded(tmp_path / ".new"))


def test_a_damaged_backup_is_refused(state: Path, tmp_path: Path) -> None:
    back_up_journal(state, tmp_path / "b")
    with closing(sqlite3.connect(tmp_path / "b")) as file, file:
        file.execute("UPDATE log SET line = replace(line, 'PENDING', 'RUNNING')")
    with pytest.raises(StoreFailed, match="is damaged"):
        restore_journal(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new" / KEY_NAME).exists()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_restore_until_a_revision_or_a_time_is_the_state_of_then(tmp_path: Path, snapshot: bool) -> None:
    recorded = Recorded(tmp_path / "state")
    world = World()
    recorded.of(world)
    world.join("n1", 4)
    world.pool()
    seen: dict[int, tuple[int, list[Record]]] = {}
    for number in range(6):
        world.now_ms += 1_000
        world.submit(f"job-{number}")
        seen[world.state.meta.revision] = (world.now_ms, list(world.state.records()))
    if snapshot:
        recorded.store.snapshot(list(world.state.records()))
    recorded.store.close()
    recorded.directory.close()
    back_up_journal(tmp_path / "state", tmp_path / "b")
    for place, (revision, (at_ms, records)) in enumerate(seen.items()):
        for until in (Until(revision=revision), Until(at_ms=at_ms)):
            target = tmp_path / f"{place}-{until.revision}"
            assert restore_journal(tmp_path / "b", target, until=until).revision == revision
            steps = list(rerun(target / JOURNAL_NAME))
            assert steps[-1].revision == revision
            assert not any(step.differences for step in steps)
            assert gone_on(records, loaded(target))
    with pytest.raises(StoreFailed, match="reaches back to"):
        restore_journal(tmp_path / "b", tmp_path / "early", until=Until(at_ms=1))
