"""What was committed survives; what was cut off leaves no trace; what can't be used is refused in words (R1, R10)."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from callboard.controller.journal.database import Where, failure
from callboard.controller.journal.postgres import PostgresDatabase
from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import StateDir, StoreFailed
from callboard.controller.journal.store import TABLES, Store, read_events
from callboard.model.frozen import sleeps
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec
from callboard.scheduler import State
from callboard.scheduler.records.job_records import (
    Change,
    Drop,
    EventRecord,
    JobRecord,
    MetaRecord,
    Put,
    Record,
    SpecRecord,
    evolve,
)
from callboard.scheduler.records.states import JobState

SECRET = "hunter2-is-not-a-good-password"


def event(revision: int) -> EventRecord:
    return EventRecord(
        revision=revision, at_ms=revision, type="job.pending", subject="jobs/a", state="PENDING", reason="", cause=""
    )


def spec(uid: str, *, secret: str = "") -> SpecRecord:
    env = (("WANDB_API_KEY", secret), ("PLAIN", "shown")) if secret else ()
    component = ComponentSpec(name="w", actor="a:B", resources=Resources(cpu_milli=1000), env=env)
    return SpecRecord(uid=uid, spec=JobSpec(name=uid, pool="p", components=(component,)))


def job(uid: str, state: JobState = JobState.PENDING) -> JobRecord:
    return JobRecord(uid=uid, name=uid, order=int(uid.removeprefix("j")), state=state)


def submission(number: int, *, secret: str = "") -> list[Change]:
    return [Put(spec(f"j{number}", secret=secret)), Put(job(f"j{number}")), Put(MetaRecord(revision=number))]


def sealed_by_the_first_version(key: bytes, value: str) -> bytes:
    """A stream of SHAKE-256 over key and nonce, and a keyed BLAKE2b over nonce and text."""
    nonce, text = bytes(range(16)), value.encode(errors="surrogatepass")
    stream = hashlib.shake_256(key + nonce).digest(len(text))
    said = nonce + bytes(a ^ b for a, b in zip(text, stream, strict=True))
    return said + hashlib.blake2b(said, key=key, digest_size=16, person=b"callboard.secret").digest()


class Opened:
    """A state directory and its store, opened and closed as often as a test likes."""

    def __init__(self, path: Path, events_kept: int = 100, url: str = "") -> None:
        self.directory = StateDir(path)
        self.directory.open()
        self.events_kept = events_kept
        self.where: Where = url or self.directory.journal_path
        self.store = self._opened()

    def reopen(self) -> Store:
        self.store.close()
        self.store = self._opened()
        return self.store

    def _opened(self) -> Store:
        if isinstance(self.where, Path):
            return Store.of(self.directory, events_kept=self.events_kept)
        database = PostgresDatabase(self.where, "tests")
        secrets = SecretStore(database, self.directory.path / "secrets.key", seals_anew=False)
        return Store(database, secrets, events_kept=self.events_kept)

    def close(self) -> None:
        self.store.close()
        self.directory.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    found = Opened(tmp_path / "state")
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """What every store must do, whichever database is under it."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgresql" else ""
    found = Opened(tmp_path / "state", url=url)
    yield found
    found.close()


def everything_written(opened: Opened) -> str:
    """All text that a store keeps anywhere."""
    found = "".join(path.read_bytes().decode("latin-1") for path in opened.directory.path.iterdir())
    tables = [*TABLES, "secret"] if isinstance(opened.where, str) else []
    return found + "".join(str(opened.store._database.execute(f"SELECT * FROM {each}").fetchall()) for each in tables)


def jobs_of(store: Store) -> list[str]:
    state = store.load()
    return list(state.jobs)


class TestWhatWasCommittedSurvives:
    def test_commits_come_back_in_order(self, either: Opened) -> None:
        for number in range(1, 6):
            either.store.commit(submission(number), [event(number)])
        either.store.commit([Drop("job", "j2"), Drop("spec", "j2")], [])
        assert jobs_of(either.reopen()) == ["j1", "j3", "j4", "j5"]

    def test_a_snapshot_replaces_the_log_and_later_commits_follow_it(self, either: Opened) -> None:
        for number in range(1, 4):
            either.store.commit(submission(number), [])
        state = either.store.load()
        either.store.snapshot(list(state.records()))
        assert either.store.kept().changes == 0
        either.store.commit(submission(4), [])
        store = either.reopen()
        assert jobs_of(store) == ["j1", "j2", "j3", "j4"]
        assert store.kept().changes == 3
        store.commit(submission(5), [])
        assert jobs_of(either.reopen()) == ["j1", "j2", "j3", "j4", "j5"]

    def test_another_process_that_was_killed_leaves_exactly_what_it_acknowledged(self, tmp_path: Path) -> None:
        program = (
            "import sys; from pathlib import Path; from tests.controller.test_store import *\n"
            "opened = Opened(Path(sys.argv[1]))\n"
            "for number in range(1, 1000):\n"
            "    opened.store.commit(submission(number), [event(number)]); print(number, flush=True)\n"
        )
        child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        acknowledged = 0
        for line in child.stdout:
            acknowledged = int(line)
            if acknowledged == 25:
                child.kill()
                break
        acknowledged = max([acknowledged, *(int(line) for line in child.stdout)])
        child.wait()
        child.stdout.close()
        found = Opened(tmp_path)
        jobs = jobs_of(found.store)
        found.close()
        # One more may be on disk whose acknowledgement was never read; none is missing or half there.
        assert len(jobs) in (acknowledged, acknowledged + 1)
        assert jobs == [f"j{number}" for number in range(1, len(jobs) + 1)]


class TestWhatWasCutOffLeavesNoTrace:
    def test_a_torn_tail_gives_the_last_whole_batch(self, opened: Opened, tmp_path: Path) -> None:
        for number in range(1, 9):
            opened.store.commit(submission(number), [event(number)])
        wal = opened.directory.journal_path.with_name("journal.sqlite-wal")
        whole = wal.stat().st_size
        seen = set()
        for size in range(0, whole, 2777):
            copy = tmp_path / f"torn-{size}"
            copy.mkdir()
            shutil.copy(opened.directory.journal_path, copy)
            (copy / wal.name).write_bytes(wal.read_bytes()[:size])
            torn = Opened(copy)
            jobs = jobs_of(torn.store)
            assert jobs == [f"j{number}" for number in range(1, len(jobs) + 1)]
            seen.add(len(jobs))
            torn.store.commit(submission(100), [])  # and it goes on
            torn.close()
        assert len(seen) > 2

    def test_a_full_disk_refuses_the_batch_and_keeps_what_was(self, opened: Opened) -> None:
        opened.store.commit(submission(1), [])
        pages = opened.store._database.execute("PRAGMA page_count").fetchone()[0]
        opened.store._database.execute(f"PRAGMA max_page_count={pages}")

        def fill() -> None:
            for number in range(2, 500):
                opened.store.commit(submission(number), [event(number)])

        with pytest.raises(StoreFailed, match=r"disk is full.*Free some space"):
            fill()
        opened.store._database.execute("PRAGMA max_page_count=100000")
        before = jobs_of(opened.store)
        opened.store.commit(submission(900), [])
        assert jobs_of(opened.reopen()) == [*before, "j900"]

    def test_a_failed_snapshot_leaves_log_and_snapshot_as_they_were(self, opened: Opened) -> None:
        opened.store.commit(submission(1), [])
        records: list[Record] = [MetaRecord(), *[spec(f"j{number}") for number in range(2000)]]
        pages = opened.store._database.execute("PRAGMA page_count").fetchone()[0]
        opened.store._database.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreFailed):
            opened.store.snapshot(records)
        assert jobs_of(opened.reopen()) == ["j1"]


class TestWhatCantBeUsedIsRefusedInWords:
    def test_a_damaged_file(self, opened: Opened) -> None:
        for number in range(1, 300):
            opened.store.commit(submission(number), [event(number)])
        opened.store.close()
        path = opened.directory.journal_path
        content = bytearray(path.read_bytes())
        content[4096:12288] = os.urandom(8192)
        path.write_bytes(content)
        with pytest.raises(StoreFailed, match=r"damaged.*backup"):
            Store.of(opened.directory, events_kept=10)
        assert path.read_bytes() == content

    def test_r10_bits_that_flipped_anywhere(self, opened: Opened, tmp_path: Path) -> None:
        """Each is refused, or changes nothing that is read: never is something else read than what was written."""
        for number in range(1, 40):
            opened.store.commit(submission(number), [event(number)])
        state = opened.store.load()
        opened.store.snapshot(list(state.records()))
        for number in range(40, 60):
            opened.store.commit(submission(number), [event(number)])
        whole = (list(opened.store.load().records()), opened.store.newest_events(100))
        opened.store.close()
        content = opened.directory.journal_path.read_bytes()
        chance = random.Random(15)
        refused: list[str] = []
        other = Opened(tmp_path / "other")
        for _ in range(250):
            other.store.close()
            place = chance.randrange(len(content))
            flipped = bytearray(content)
            flipped[place] ^= 1 << chance.randrange(8)
            other.directory.journal_path.write_bytes(flipped)
            try:
                other.store = Store.of(other.directory, events_kept=100)
                assert (list(other.store.load().records()), other.store.newest_events(100)) == whole, place
            except StoreFailed as error:
                refused.append(str(error))
        other.close()
        assert len(refused) > 60, "much of it is content"
        assert [each for each in refused if "damaged" not in each] == []
        assert all("backup" in each or "callboard" in each for each in refused)

    def test_something_that_is_no_database(self, tmp_path: Path) -> None:
        directory = StateDir(tmp_path / "state")
        directory.open()
        directory.journal_path.write_text("no database at all, but long enough to be one" * 50)
        with pytest.raises(StoreFailed, match="damaged"):
            Store.of(directory, events_kept=10)
        directory.close()

    def test_a_missing_change(self, either: Opened) -> None:
        for number in range(1, 4):
            either.store.commit(submission(number), [])
        either.store._database.execute("DELETE FROM log WHERE sequence = 4")
        with pytest.raises(StoreFailed, match="change 4 is missing"):
            either.reopen().load()

    def test_a_newer_format(self, either: Opened) -> None:
        either.store._database.execute(
            "INSERT INTO mark VALUES ('format', 99) ON CONFLICT (name) DO UPDATE SET value = 99"
        )
        if isinstance(either.where, Path):
            either.store._database.execute("PRAGMA user_version=99")
        with pytest.raises(StoreFailed, match=r"format 99.*newer callboard"):
            either.reopen()

    def test_a_record_of_a_newer_version(self, either: Opened) -> None:
        either.store.commit(submission(1), [])
        # Behind its checksum: an earlier version wrote none.
        newer = """UPDATE log SET line = replace(substr(line, 9), '"v":1', '"v":7') WHERE sequence = 1"""
        either.store._database.execute(newer)
        with pytest.raises(StoreFailed, match=r"version 7.*newer callboard"):
            either.reopen().load()

    def test_a_read_only_file(self, opened: Opened) -> None:
        # Permissions don't bind root, who may run this; SQLite's own word for it does.
        database = sqlite3.connect(f"file:{opened.directory.journal_path}?mode=ro", uri=True)
        with pytest.raises(sqlite3.OperationalError) as caught:
            database.execute("DELETE FROM log")
        database.close()
        assert "read-only" in str(failure(opened.directory.journal_path, caught.value))

    def test_a_directory_that_cant_be_made(self) -> None:
        with pytest.raises(StoreFailed, match="can't be used as state directory"):
            StateDir(Path("/proc/callboard")).open()

    def test_one_that_a_live_controller_holds(self, opened: Opened) -> None:
        with pytest.raises(StoreFailed, match=rf"held by another controller \(pid {os.getpid()}\)"):
            StateDir(opened.directory.path).open()

    def test_the_lock_ends_with_its_holder(self, opened: Opened) -> None:
        opened.directory.close()
        other = StateDir(opened.directory.path)
        other.open()
        other.close()
        opened.directory.open()


class TestEvents:
    def test_old_ones_are_compacted(self, either: Opened) -> None:
        either.events_kept = 10
        either.reopen()
        for revision in range(1, 31):
            either.store.commit([], [event(revision)])
        assert [one.revision for one in either.store.newest_events(3)] == [28, 29, 30]
        oldest, found = read_events(either.where, 1, 4)
        assert oldest == 21
        assert [one.revision for one in found] == [21, 22, 23, 24]

    def test_a_missing_file_is_refused_in_words(self, tmp_path: Path) -> None:
        with pytest.raises(StoreFailed, match="can't be opened"):
            read_events(tmp_path / "nothing.sqlite", 1, 1)


class TestJobsThatHaveEnded:
    RECORDS: tuple[Record, ...] = (
        MetaRecord(revision=9),
        *(spec(f"j{number}") for number in range(1, 1001)),
        *(
            replace(job(f"j{number}", JobState.FAILED if number % 2 else JobState.PENDING), reason=f"no. {number}")
            for number in range(1, 1001)
        ),
    )

    def test_a_restart_reads_their_heads_alone_and_they_are_whole_once_they_are_asked_for(self, either: Opened) -> None:
        assert either.store.snapshot(self.RECORDS) == 1 + 2 * 500 + 2
        either.reopen()
        state = either.store.load()
        failed = [state.jobs[uid] for uid in state.jobs_by_state[JobState.FAILED]]
        assert [(each.uid, each.order) for each in failed] == [(f"j{number}", number) for number in range(1, 1001, 2)]
        # Neither the indexes nor the next snapshot, nor one after it, asks for more than that.
        for _ in range(2):
            assert either.store.snapshot(list(state.records())) == 1 + 2 * 500 + 2
            assert all(sleeps(each) and sleeps(state.specs[each.uid]) for each in failed)
        assert failed[0].reason == "no. 1"
        assert not sleeps(failed[0])
        assert evolve(failed[1], reason="x") == replace(job("j3", JobState.FAILED), reason="x")
        assert list(state.records()) == list(State.of(self.RECORDS).records())
        either.reopen()
        assert list(either.store.load().records()) == list(State.of(self.RECORDS).records())

    def test_any_thread_may_wake_one(self, opened: Opened) -> None:
        opened.store.snapshot(self.RECORDS)
        opened.reopen()
        asleep = [each for each in opened.store.load().records() if sleeps(each)]
        assert len(asleep) == 1000
        with ThreadPoolExecutor(8) as threads:
            whole = list(threads.map(repr, asleep * 8))
        assert whole == list(map(repr, asleep)) * 8
        assert set(whole) == {repr(each) for each in self.RECORDS if getattr(each, "uid", "j2")[1:][-1] in "13579"}

    def test_one_of_which_something_is_still_due_is_no_part_of_a_pack(self, opened: Opened) -> None:
        timed = replace(job("j1", JobState.FAILED), deadline_ms=5)
        opened.store.snapshot([spec("j1"), timed, spec("j2"), job("j2", JobState.FAILED)])
        found = {record for record in opened.store.load().records() if not sleeps(record)}
        assert found == {MetaRecord(), spec("j1"), timed}

    def test_a_pack_that_is_broken_is_refused_in_words(self, opened: Opened) -> None:
        opened.store.snapshot(self.RECORDS)
        for line in ('{"v":1,"kind":"pack",', '{"v":1,"kind":"pack","heads":[["j1"]],"packed":""}'):
            opened.store._database.execute("UPDATE snapshot SET line = ? WHERE position = 0", (line,))
            with pytest.raises(StoreFailed, match="a pack of jobs can't be read"):
                opened.store.load()


class TestSecrets:
    """SE-04: values of secret variables appear in no journal, and workers can still be started after a restart."""

    def test_they_are_in_no_file_in_clear(self, opened: Opened) -> None:
        opened.store.commit(submission(1, secret=SECRET), [event(1)])
        assert "secrets.sqlite" in {path.name for path in opened.directory.path.iterdir()}
        assert not [path for path in opened.directory.path.iterdir() if SECRET.encode() in path.read_bytes()]

    def test_they_come_back(self, either: Opened) -> None:
        either.store.commit(submission(1, secret=SECRET), [])
        assert spec("j1", secret=SECRET) in either.reopen().load().records()

    def test_they_survive_a_snapshot_while_their_job_lives(self, either: Opened) -> None:
        either.store.commit(submission(1, secret=SECRET), [])
        either.store.snapshot([spec("j1", secret=SECRET), job("j1")])
        assert spec("j1", secret=SECRET) in either.reopen().load().records()
        assert SECRET not in everything_written(either)

    def test_they_are_forgotten_once_their_job_has_ended(self, either: Opened) -> None:
        either.store.commit(submission(1, secret=SECRET), [])
        either.store.snapshot([spec("j1", secret=SECRET), job("j1", JobState.SUCCEEDED)])
        assert SECRET not in everything_written(either)
        (found,) = either.reopen().load().specs.values()
        assert dict(found.spec.components[0].env) == {"WANDB_API_KEY": "", "PLAIN": "shown"}

    def test_those_that_an_older_version_wrote_in_clear_come_back_too(self, opened: Opened) -> None:
        opened.store.commit(submission(1, secret=SECRET), [])
        with closing(sqlite3.connect(opened.directory.secrets_path)) as database, database:
            database.execute("UPDATE secret SET value = ?", (SECRET,))
        assert spec("j1", secret=SECRET) in opened.reopen().load().records()

    @pytest.mark.parametrize("secret", ["x", "Zeile 1\nline 2\x00", "s3cret" * 20_000, "half \udcff"])
    def test_a_sealed_value_opens_with_its_own_key_alone(self, tmp_path: Path, secret: str) -> None:
        seal, other = Seal.of(tmp_path / "secrets.key"), Seal.of(tmp_path / "another.key")
        sealed = seal.close(secret)
        assert Seal.of(tmp_path / "secrets.key").open(sealed) == secret
        assert seal.close(secret) != sealed
        changed = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in (0, 20, len(sealed) - 1)]
        cut = [sealed[:length] for length in (0, 3, 18, 25, len(sealed) - 1)]
        for wrong in (other.close(secret), *changed, *cut):
            with pytest.raises(Unsealable):
                seal.open(wrong)

    def test_each_start_seals_anew_with_a_key_of_its_own(self, opened: Opened) -> None:
        key_path = opened.directory.path / "secrets.key"
        opened.store.commit(submission(1, secret=SECRET), [])
        old_key, old_seal = key_path.read_bytes(), Seal.of(key_path)
        assert spec("j1", secret=SECRET) in opened.reopen().load().records()
        assert (len(key_path.read_bytes()), key_path.read_bytes() != old_key) == (32, True)
        with closing(sqlite3.connect(opened.directory.secrets_path)) as database:
            (sealed,) = database.execute("SELECT value FROM secret").fetchone()
        with pytest.raises(Unsealable):
            old_seal.open(sealed)

    def test_a_crash_between_two_keys_loses_nothing(self, opened: Opened) -> None:
        key_path = opened.directory.path / "secrets.key"
        opened.store.commit(submission(1, secret=SECRET), [])
        Seal.of(key_path).rotated(key_path)  # and it crashed: nothing is sealed with the new key yet
        assert len(key_path.read_bytes()) == 64
        assert spec("j1", secret=SECRET) in opened.reopen().load().records()
        assert len(key_path.read_bytes()) == 32

    @pytest.mark.parametrize("secret", ["x", "Zeile 1\nline 2\x00", "s3cret" * 20_000, "half \udcff", ""])
    def test_values_of_earlier_versions_are_read_and_sealed_anew(self, opened: Opened, secret: str) -> None:
        opened.store.commit(submission(1, secret=SECRET), [])
        opened.store.commit(submission(2, secret=SECRET), [])
        opened.store.close()
        earlier = sealed_by_the_first_version((opened.directory.path / "secrets.key").read_bytes(), secret)
        with closing(sqlite3.connect(opened.directory.path / "secrets.sqlite", isolation_level=None)) as database:
            database.execute("UPDATE secret SET value = ? WHERE uid = 'j1'", (earlier,))
            database.execute("UPDATE secret SET value = ? WHERE uid = 'j2'", ("never sealed",))
        for _ in range(2):  # The second time, what the first wrote.
            opened.store = Store.of(opened.directory, events_kept=10)
            specs = opened.store.load().specs.values()
            found = {each.uid: dict(each.spec.components[0].env)["WANDB_API_KEY"] for each in specs}
            assert found == {"j1": secret, "j2": "never sealed"}
            with closing(sqlite3.connect(opened.directory.path / "secrets.sqlite")) as database:
                kept = [value for (value,) in database.execute("SELECT value FROM secret")]
            assert not any(Seal.is_old(value) for value in kept)
            opened.store.close()
        opened.store = Store.of(opened.directory, events_kept=10)

    @pytest.mark.parametrize("lost", ["secrets.sqlite", "secrets.key"])
    def test_lost_ones_are_refused_in_words(self, opened: Opened, lost: str) -> None:
        opened.store.commit(submission(1, secret=SECRET), [])
        opened.store.close()
        (opened.directory.path / lost).unlink()
        opened.store = Store.of(opened.directory, events_kept=10)
        with pytest.raises(StoreFailed, match=r"job j1 needs the secret variables w\.WANDB_API_KEY.*secrets\.sqlite"):
            opened.store.load()

    def test_files_and_directory_are_private(self, opened: Opened) -> None:
        opened.store.commit(submission(1, secret=SECRET), [])
        assert stat.S_IMODE(opened.directory.path.stat().st_mode) == 0o700
        for path in opened.directory.path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path

    def test_a_directory_that_was_open_to_others_is_closed(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir(mode=0o755)
        opened = Opened(tmp_path / "state")
        assert stat.S_IMODE(opened.directory.path.stat().st_mode) == 0o700
        opened.close()

    def test_a_failed_write_keeps_none(self, tmp_path: Path) -> None:
        store = SecretStore.of(tmp_path / "secrets.sqlite")
        store._database.execute("PRAGMA query_only=ON")
        with pytest.raises(sqlite3.OperationalError):
            store.keep(spec("j1", secret=SECRET))
        store.close()
        assert SECRET.encode() not in (tmp_path / "secrets.sqlite").read_bytes()


def test_gv_14_a_state_has_one_identity_for_as_long_as_it_is_there(tmp_path: Path) -> None:
    seen = []
    for folder in ("one", "one", "two"):
        directory = StateDir(tmp_path / folder)
        directory.open()
        seen.append(directory.identity)
        directory.close()
    assert seen[0]
    assert seen[0] == seen[1] != seen[2]
