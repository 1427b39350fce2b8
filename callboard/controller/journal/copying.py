"""Copies of a whole journal: from SQLite to PostgreSQL and back, into a backup file, and from one to a point in time.

All of them take the rows of every table as they are at one moment, write them in one transaction, and read them back
before it ends. A backup is one file of SQLite with everything that the controllers of a database share, packages of
code among it; the key of its secret values lies beside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

from callboard.controller.journal.codec import encode_change, sealed
from callboard.controller.journal.database import Database, SqliteDatabase, Where
from callboard.controller.journal.rerun import decided
from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.controller.journal.secret_store import MissingSecrets, SecretStore
from callboard.controller.journal.state_dir import (
    IDENTITY_NAME,
    JOURNAL_NAME,
    KEY_NAME,
    PACKAGES_NAME,
    SECRETS_NAME,
    StateDir,
    StoreFailed,
    make_private_file,
)
from callboard.controller.journal.store import (
    FORMAT,
    History,
    history_of,
    mark,
    prepare,
    read_state,
    reading,
    set_mark,
    sqlite_journal,
    translated,
    with_secrets,
    write_state,
)
from callboard.model.frozen import dataclass
from callboard.scheduler import State
from callboard.scheduler.records.job_records import MetaRecord, Put, evolve
from callboard.security.grants import GRANTS_NAME
from callboard.security.issued import ISSUED_NAME
from callboard.security.places import CERTS_NAME, make_private, write_private
from callboard.security.tokens import TOKEN_NAME

SHARED_FILES = (TOKEN_NAME, GRANTS_NAME, f"{CERTS_NAME}/{ISSUED_NAME}")
"""Files of the state directory: the owner's token, the tokens of clients and agents, what an authority took back."""

IDENTITY = "identity"
KEY = "secrets.key"
"""Names under which a database holds the identity of the state, and which key its members have."""

BEYOND = 1_000_000
"""How far the numbers of workers and groups go on behind those of a backup: more than can have been given since."""

_SQLITE = b"SQLite format 3\0"
"""How a file of SQLite begins."""

_PIECE_BYTES = 2 << 20
"""Most of a package that is read from a file at one time."""

_SHARED = """
CREATE TABLE IF NOT EXISTS shared (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS package (name TEXT, place INTEGER, data BLOB NOT NULL, PRIMARY KEY (name, place));
"""

_COLUMNS = {
    "snapshot": "position, line",
    "log": "sequence, line",
    "event": "revision, body",
    "past": "position, line",
    "decision": "sequence, body",
    "fruitless": "sequence, body",
    "mark": "name, value",
    "secret": "uid, component, name, value",
}
"""What is copied of each table. Whoever gets it numbers ``fruitless`` by itself."""

_ORDERS = {"fruitless": "number", "mark": "", "secret": ""}
"""By what rows are ordered, if not by their first column; empty: in Python, as databases order texts differently."""


@dataclass(frozen=True, slots=True)
class Until:
    """A point in time: a revision, or the wall clock. Exactly one is given."""

    revision: int | None = None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy holds.

    Attributes:
        rows: rows by table, each read back and compared; of ``package`` the packages.
        key: the key of its secret values, for those who need it.
    """

    rows: dict[str, int]
    revision: int
    key: Path


def which_key(path: Path) -> bytes:
    """What shows that two members have the same key, and nothing else of it.

    Raises:
        OSError: it can't be read.
    """
    return hashlib.blake2b(path.read_bytes(), digest_size=16, person=b"callboard.which").digest()


def copy_journal(source: Where, target: Where, *, key: Path | None = None) -> Copied:
    """Copies a journal that nobody uses into a place that holds none.

    Args:
        source, target: a state directory, or the URL of a PostgreSQL.
        key: the key of the secret values; None: the one in the state directory.

    Raises:
        StoreFailed: in words.
    """
    with ExitStack() as held:
        return _copied(held, source, target, key=key, alone=True)


def back_up_journal(source: Where, file: Path, *, key: Path | None = None) -> Copied:
    """Copies a journal, beside its controller, into a new file.

    Raises:
        StoreFailed: in words.
    """
    beside = _key_at(file)
    for each in (file, beside):
        if each.exists():
            raise StoreFailed(each, "is there already", "Name a new file.")
    draft = file.with_name(f".{file.name}.new")
    with translated(file):
        try:
            with ExitStack() as held:
                copied = _copied(held, source, draft, key=key, backup=True)
            _key_at(draft).replace(beside)
            draft.replace(file)
        finally:
            for each in (draft, _key_at(draft)):
                each.unlink(missing_ok=True)
    return Copied(copied.rows, copied.revision, beside)


def restore_journal(file: Path, target: Where, *, key: Path | None = None, until: Until | None = None) -> Copied:
    """Puts a backup where no journal is, as it was at some point in time.

    Raises:
        StoreFailed: in words.
    """
    with ExitStack() as held:
        if not _is_database(file):
            raise StoreFailed(file, "is not a backup", "Name a file that `callboard store backup` made.")
        return _copied(held, file, target, key=key, until=until, back=True)


def _copied(
    held: ExitStack,
    source: Where,
    target: Where,
    *,
    key: Path | None,
    alone: bool = False,
    backup: bool = False,
    until: Until | None = None,
    back: bool = False,
) -> Copied:
    """One copy.

    Args:
        held: what is open until the caller is done.
        source: a state directory, a URL or a backup.
        target: a state directory, a URL or the name of a backup.
        alone: nobody may use the source meanwhile.
        backup: a path is the name of a backup, not of a state directory.
        back: what was decided since then is undone.
    """
    if alone:
        _reserve(held, source)
    journal = source / JOURNAL_NAME if isinstance(source, Path) and source.is_dir() else source
    if isinstance(journal, Path) and not journal.is_file():
        raise StoreFailed(source, "holds no journal", "Name the state directory of a controller.")
    with reading(journal):
        pass  # What is no journal must not be said to lack a key.
    found_key = _key_of(source, target, key)
    # Twice: a job that came, and one that ended, while the journal was read.
    before = _secrets(source, found_key)
    database = held.enter_context(reading(journal))
    if database.format() != FORMAT or not database.has_table("fruitless"):
        raise StoreFailed(
            database.name,
            "was written by an earlier version",
            "Start a controller of this version on it once, and end it; then try again.",
        )
    secrets = sorted({row[:3]: row for row in (*before, *_secrets(source, found_key))}.values())
    shared = _shared_of(source, database, found_key)
    into, secrets_into, opened = _target(held, target, found_key, backup=backup)
    rows: dict[str, int] = {}
    with _in_words(into), secrets_into.exclusively() if secrets_into is not into else nullcontext(), into.exclusively():
        for name in _COLUMNS:
            at, found = (secrets_into, secrets) if name == "secret" else (into, _rows(database, name))
            rows[name] = _moved(name, found, at)
        if until is not None:
            _cut(into, history_of(into), until)
        if back:
            _go_beyond(into)
        revision = _checked(into, opened, back=until is not None)
        rows["package"] = sum(_carried(name, target, into, data) for name, data in _packages(source, database))
        _share(target, into, shared, found_key)
    return Copied(rows, revision, _key_at(target) if isinstance(target, Path) else found_key)


@contextmanager
def _in_words(database: Database) -> Iterator[None]:
    try:
        yield
    except database.errors as error:
        raise database.failure(error) from error


def _reserve(held: ExitStack, where: Where) -> None:
    """Keeps controllers away.

    Raises:
        StoreFailed: one is there.
    """
    if isinstance(where, Path):
        if not (where / JOURNAL_NAME).is_file():
            raise StoreFailed(where, "holds no journal", "Name the state directory of a controller.")
        directory = StateDir(where)
        directory.open()
        held.callback(directory.close)
        return
    database = held.enter_context(closing(_session(where)))
    with database.translated():
        _lock(database)


def _session(url: str) -> Any:
    from callboard.controller.journal.postgres import PostgresDatabase  # noqa: PLC0415 - an extra

    return PostgresDatabase(url, "copies")


def _lock(database: Any) -> None:
    from callboard.controller.journal.postgres import LOCK  # noqa: PLC0415 - an extra

    if not database.execute("SELECT pg_try_advisory_lock(?)", (LOCK,)).fetchone()[0]:
        raise StoreFailed(database.name, "is in use: a controller leads there", "End its controllers first.")


def _is_database(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(_SQLITE)) == _SQLITE


def _key_at(place: Path) -> Path:
    """Where the key of a state directory, or of a backup, lies."""
    return place / KEY_NAME if place.is_dir() else place.with_name(f"{place.name}.key")


def _key_of(source: Where, target: Where, stated: Path | None) -> Path:
    directory = next((each for each in (source, target) if isinstance(each, Path)), None)
    key = stated or (_key_at(directory) if directory is not None else Path(KEY_NAME))
    # A seal makes a key where it finds none.
    if key.is_file() and Seal.is_key(key):
        return key
    raise StoreFailed(
        key,
        "is not the key of secret values, which can't be read without it",
        f"Name the file {KEY_NAME} of a controller's state directory with --key.",
    )


def _rows(database: Database, name: str) -> Iterable[Sequence[Any]]:
    order = _ORDERS.get(name, _COLUMNS[name].partition(",")[0])
    found = database.execute(f"SELECT {_COLUMNS[name]} FROM {name}{f' ORDER BY {order}' if order else ''}")  # noqa: S608 - ours
    return found if order else sorted((first, *rest) for first, *rest in found if first != "format")


def _secrets(source: Where, key: Path) -> list[tuple[Any, ...]]:
    """The sealed values of a journal."""
    if isinstance(source, Path) and source.is_dir():
        path: Where = source / SECRETS_NAME
        if not (source / SECRETS_NAME).is_file():
            return []
    else:
        path = source
    with reading(path) as database:
        rows = database.execute(f"SELECT {_COLUMNS['secret']} FROM secret").fetchall()  # noqa: S608 - ours
    seal = Seal.of(key)
    return [(*row[:3], seal.close(row[3]) if isinstance(row[3], str) else bytes(row[3])) for row in rows]


def _shared_of(source: Where, database: Database, key: Path) -> dict[str, bytes]:
    """The identity of the state, and the credentials of its clients and agents, sealed."""
    if isinstance(source, Path) and source.is_dir():
        with translated(source):
            files = {name: source / name for name in (IDENTITY_NAME, *SHARED_FILES)}
            texts = {name: path.read_text() for name, path in files.items() if path.exists()}
            identity = texts.pop(IDENTITY_NAME, "").strip()
            seal = Seal.of(key)
            return {IDENTITY: identity.encode()} | {name: seal.close(text) for name, text in texts.items()}
    rows = database.execute("SELECT name, value FROM shared").fetchall()
    return {name: bytes(value) for name, value in rows if name != KEY}


def _packages(source: Where, database: Database) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Each package of code: its digest, and what is in it."""
    if isinstance(source, Path) and source.is_dir():
        for path in sorted((source / PACKAGES_NAME).glob("*")):
            if not path.suffix:  # else it is not whole
                yield path.name, _pieces_of(path)
    elif database.has_table("package"):  # an older backup has none
        for (name,) in database.execute("SELECT DISTINCT name FROM package ORDER BY name").fetchall():
            yield name, _pieces_in(database, name)


def _pieces_of(path: Path) -> Iterator[bytes]:
    # A controller that runs may give one up meanwhile: nobody needs it.
    with suppress(FileNotFoundError), path.open("rb") as file:
        yield from iter(lambda: file.read(_PIECE_BYTES), b"")


def _pieces_in(database: Database, name: str) -> Iterator[bytes]:
    asked = "SELECT data FROM package WHERE name = ? AND place = ?"
    for place in count():
        if (row := database.execute(asked, (name, place)).fetchone()) is None:
            return
        yield bytes(row[0])


def _carried(name: str, target: Where, into: Database, data: Iterator[bytes]) -> bool:
    """Writes one package, piece by piece. One that is not what its name says any more is left out: it is asked for
    again, as its controller would."""
    if isinstance(target, Path) and target.is_dir():
        folder = target / PACKAGES_NAME
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"{name}.part"
        with part.open("wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if sound := _is_whole(name, _pieces_of(part)):
            part.replace(folder / name)
        else:
            part.unlink()
        return sound
    into.execute("DELETE FROM package WHERE name = ?", (name,))
    for place, piece in enumerate(data):
        into.execute("INSERT INTO package (name, place, data) VALUES (?, ?, ?)", (name, place, piece))
    if not (sound := _is_whole(name, _pieces_in(into, name))):
        into.execute("DELETE FROM package WHERE name = ?", (name,))
    return sound


def _is_whole(name: str, data: Iterator[bytes]) -> bool:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest() == name


def _target(held: ExitStack, target: Where, key: Path, *, backup: bool) -> tuple[Database, Database, SecretStore]:
    """The journal and the secrets of a place that holds nothing yet.

    Raises:
        StoreFailed: it is in use, or holds something.
    """
    if isinstance(target, str):
        session = held.enter_context(closing(_session(target)))
        with session.translated():
            _lock(session)
            prepare(session)
            session.share()
            _check_empty(session)
            return session, session, SecretStore(session, key, seals_anew=False)
    with translated(target):
        if backup:
            file = held.enter_context(closing(SqliteDatabase(target)))
            prepare(file)
            file.script(_SHARED)
            return file, file, SecretStore(file, key, seals_anew=False)
        directory = StateDir(target)
        directory.open()
        held.callback(directory.close)
        journal = held.enter_context(closing(sqlite_journal(directory)))
        prepare(journal)
        _check_empty(journal)
        own = _key_at(target)
        if own.exists() and own.read_bytes() != key.read_bytes():
            raise StoreFailed(own, "is another key than that of the copy", "Name a directory that holds no state.")
        secrets = held.enter_context(closing(SqliteDatabase(directory.secrets_path)))
        for pragma in ("secure_delete=ON", "journal_mode=DELETE", "synchronous=FULL"):
            secrets.pragma(pragma)
        return journal, secrets, SecretStore(secrets, key, seals_anew=False)


def _check_empty(database: Database) -> None:
    for name in ("snapshot", "log", "event", "past", "decision"):
        if database.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone() is not None:  # noqa: S608 - ours
            raise StoreFailed(database.name, "holds a journal already", "Name an empty place; nothing was changed.")


class _Counted:
    """Rows as they pass, counted, with a digest of all."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self._rows = rows
        self._digest = hashlib.blake2b()
        self.count = 0

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for row in self._rows:
            self._digest.update(repr(tuple(row)).encode(errors="surrogatepass"))
            self.count += 1
            yield row

    @property
    def seen(self) -> tuple[int, bytes]:
        return self.count, self._digest.digest()


def _moved(name: str, rows: Iterable[Sequence[Any]], target: Database) -> int:
    """Writes rows and compares them with what is there then."""
    target.execute(f"DELETE FROM {name}{' WHERE name <> ' + chr(39) + 'format' + chr(39) if name == 'mark' else ''}")  # noqa: S608 - ours
    given = _Counted(rows)
    target.insert(f"{name} ({_COLUMNS[name]})", given)
    back = _Counted(_rows(target, name))
    for _ in back:
        pass
    if back.seen != given.seen:
        raise StoreFailed(
            target.name,
            f"did not keep the table {name} as it was written ({given.count} rows, {back.count} there)",
            "Check its disk and log; nothing was copied.",
        )
    return given.count


def _share(target: Where, into: Database, shared: dict[str, bytes], key: Path) -> None:
    """Writes the identity, the credentials and the key."""
    if isinstance(target, Path):
        own = _key_at(target)
        make_private_file(own)
        own.write_bytes(key.read_bytes())
    if not isinstance(target, Path) or not target.is_dir():
        into.execute("DELETE FROM shared")
        into.insert("shared", [(name, value) for name, value in (*shared.items(), (KEY, which_key(key))) if value])
        return
    seal = Seal.of(key)
    try:
        texts = {name: seal.open(value) for name, value in shared.items() if name in SHARED_FILES}
    except Unsealable:
        raise StoreFailed(key, "is not the key of this journal", "Name that of its controller.") from None
    for name, text in texts.items():
        make_private((target / name).parent)
        write_private(target / name, text)
    if identity := shared.get(IDENTITY, b"").decode():
        write_private(target / IDENTITY_NAME, identity + "\n")


def _cut(database: Database, history: History, until: Until) -> None:
    """Takes away what came after a point in time.

    Raises:
        StoreFailed: the journal does not reach back so far.
    """
    state = State()
    for change in history.base:
        state.apply(change)
    end, first = mark(database, "past"), state.meta.revision
    times = [decision.event.now_ms for decision in history.decisions.values()]
    begins = min(times, default=None)
    before = until.revision is not None and until.revision < first
    if before or (until.at_ms is not None and (begins is None or until.at_ms < begins)):
        when = f"revision {first}" if before else "the oldest decision that it keeps"
        raise StoreFailed(
            database.name, f"reaches back to {when} only", "Choose a later point, or restore an older backup."
        )
    for number, decision, changes in decided(history):
        if until.at_ms is not None and decision is not None and decision.event.now_ms > until.at_ms:
            break
        metas = [each.record for each in changes if isinstance(each, Put) and isinstance(each.record, MetaRecord)]
        if until.revision is not None and metas and metas[-1].revision > until.revision:
            break
        for change in changes:
            state.apply(change)
        end = number + len(changes) - 1
    write_state(database, "snapshot", state.records())
    set_mark(database, "snapshot", end)
    for table in ("log", "decision", "fruitless"):
        database.execute(f"DELETE FROM {table} WHERE sequence > ?", (end,))  # noqa: S608 - ours
    database.execute("DELETE FROM event WHERE revision > ?", (state.meta.revision,))


def _go_beyond(database: Database) -> None:
    """Lets no number be given again that was given after the state of then: an agent that ran on answers a start of
    before from memory, and would for a worker that is another one. Nobody decided that: a rerun takes it as it is."""
    changes, last = read_state(database)
    metas = [each.record for each in changes if isinstance(each, Put) and isinstance(each.record, MetaRecord)]
    if not metas:
        return
    meta = metas[-1]
    beyond = evolve(meta, next_generation=meta.next_generation + BEYOND, next_group=meta.next_group + BEYOND)
    database.insert("log", [(last + 1, sealed(last + 1, encode_change(Put(beyond))))])


def _checked(database: Database, secrets: SecretStore, *, back: bool) -> int:
    """The revision of what was copied, once all of it was read as a controller reads it.

    Raises:
        StoreFailed: something can't be read.
    """
    state = State()
    with translated(database.path if isinstance(database, SqliteDatabase) else database.name):
        try:
            for change in with_secrets(read_state(database)[0], secrets):
                state.apply(change)
        except MissingSecrets as error:
            if not back:
                raise
            raise StoreFailed(
                database.name,
                f"can't go back so far: {error}, which are forgotten once a job has ended",
                "Choose a later point, or restore an older backup.",
            ) from error
    return state.meta.revision
