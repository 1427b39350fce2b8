"""The store of secret values: a file of their own, so that the journal can be copied, read and mailed.

A controller must start workers again after a restart, so it has to remember the values of variables that look secret
(:func:`callboard.model.names.is_secret`) or are declared to be. The journal holds the names only. The values lie
in ``secrets.sqlite`` (mode 0600 in a directory of mode 0700, freed pages overwritten) until their job has ended and a
snapshot is taken, sealed with the key in ``secrets.key``: a search of either file finds none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from callboard.controller.journal.database import Database, SqliteDatabase
from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.controller.journal.state_dir import KEY_NAME
from callboard.model.names import is_secret
from callboard.model.specs import ComponentSpec, Labels
from callboard.scheduler.records.job_records import SpecRecord

_SCHEMA = """
CREATE TABLE IF NOT EXISTS secret (
    uid TEXT NOT NULL, component TEXT NOT NULL, name TEXT NOT NULL, value {data} NOT NULL,
    PRIMARY KEY (uid, component, name)
)
"""


class MissingSecrets(Exception):
    """The journal names secret variables whose values are gone."""


class SecretStore:
    """Values of secret variables by job, component and name. Used by the journal's thread only."""

    def __init__(self, database: Database, key_path: Path, *, seals_anew: bool) -> None:
        """
        Args:
            database: holds the sealed values.
            seals_anew: with a new key, now: nobody else has the key.

        Raises:
            OSError, or one of the database: a file can't be used.
        """
        self._key_path = key_path
        self._seal = Seal.of(key_path)
        self._database = database
        database.script(_SCHEMA.format(data=database.words.data))
        if seals_anew:
            self._seal_again()

    @classmethod
    def of(cls, path: Path) -> SecretStore:
        """Those in a file of their own, sealed with the key beside it.

        Raises:
            OSError, sqlite3.Error: a file can't be used.
        """
        database = SqliteDatabase(path)
        try:
            # No write-ahead log, in which overwritten values would stay readable for a while.
            for pragma in ("secure_delete=ON", "journal_mode=DELETE", "synchronous=FULL"):
                database.pragma(pragma)
            return cls(database, path.with_name(KEY_NAME), seals_anew=True)
        except BaseException:
            database.close()
            raise

    def keep(self, record: SpecRecord) -> SpecRecord:
        """Stores the secrets of a spec, durably, and returns the spec without their values."""
        rows: list[tuple[object, ...]] = [
            (record.uid, owner, name, self._seal.close(value))
            for owner, env, declared in _environments(record)
            for name, value in env
            if declared or is_secret(name)
        ]
        if not rows:
            return record
        self._write(rows)
        return without_values(record)

    def _seal_again(self) -> None:
        """Seals everything anew with a new key: a copy of the old one, and the form of an earlier version, go with each
        start. A value whose key is lost stays as it is."""
        self._seal = self._seal.rotated(self._key_path)
        rows = self._database.execute("SELECT uid, component, name, value FROM secret").fetchall()
        opened = [(*owner, self._opened(kept)) for *owner, kept in rows]
        self._write([(*owner, self._seal.close(value)) for *owner, value in opened if value is not None])
        self._seal = self._seal.only(self._key_path)

    def _write(self, rows: list[tuple[object, ...]]) -> None:
        """Stores uid, component, name and sealed value: all rows, durably, or none."""
        if not rows:
            return
        replacing = "ON CONFLICT (uid, component, name) DO UPDATE SET value = excluded.value"
        with self._database.exclusively():
            for row in rows:
                self._database.execute(f"INSERT INTO secret VALUES (?, ?, ?, ?) {replacing}", row)  # noqa: S608 - no input

    def restore(self, record: SpecRecord, *, needed: bool) -> SpecRecord:
        """The spec with its secret values.

        Args:
            record: spec as the journal has it.
            needed: its job has not ended, so workers may have to be started.

        Raises:
            MissingSecrets: values are ``needed`` and gone.
        """
        named = [
            (owner, name)
            for owner, env, declared in _environments(record)
            for name, _ in env
            if declared or is_secret(name)
        ]
        if not named:
            return record
        rows = self._database.execute("SELECT component, name, value FROM secret WHERE uid = ?", (record.uid,))
        values = {(owner, name): value for owner, name, kept in rows if (value := self._opened(kept)) is not None}
        missing = [f"{component}.{name}" for component, name in named if (component, name) not in values]
        if missing and needed:
            raise MissingSecrets(f"job {record.spec.name} needs the secret variables {', '.join(missing)}")
        return _with_values(record, values)

    def _opened(self, kept: bytes | str) -> str | None:
        """A kept value; None: its key is gone."""
        if isinstance(kept, str):
            return kept  # Of a version that sealed nothing.
        try:
            return self._seal.open(bytes(kept))
        except Unsealable:
            return None

    def forget_all_but(self, uids: Iterable[str]) -> None:
        """Deletes the secrets of every job that is not among ``uids``."""
        kept = set(uids)
        stored = [uid for (uid,) in self._database.execute("SELECT DISTINCT uid FROM secret")]
        for uid in stored:
            if uid not in kept:
                self._database.execute("DELETE FROM secret WHERE uid = ?", (uid,))

    def close(self) -> None:
        self._database.close()


def without_values(record: SpecRecord) -> SpecRecord:
    """The spec with its secret variables' names only."""
    return _with_values(record, {})


def _with_values(record: SpecRecord, values: dict[tuple[str, str], str]) -> SpecRecord:
    components = tuple(_component(component, component.name, values) for component in record.spec.components)
    return replace(record, spec=replace(record.spec, components=components))


def _environments(record: SpecRecord) -> Iterator[tuple[str, Labels, bool]]:
    """Every set of variables of a job, with a name for whose it is, and whether all of it was declared secret."""
    for component in record.spec.components:
        yield from _environments_of(component, component.name)


def _environments_of(component: ComponentSpec, owner: str) -> Iterator[tuple[str, Labels, bool]]:
    yield owner, component.env, False
    yield _declared_name(owner), component.secret_env, True
    for rank, place in enumerate(component.places):
        yield _place_name(owner, rank), place.env, False
    for member in component.members:
        yield from _environments_of(member, _member_name(owner, member))


# No component has such names: they hold characters that names don't.


def _place_name(owner: str, rank: int) -> str:
    return f"{owner}[{rank}]"


def _declared_name(owner: str) -> str:
    return f"{owner}!"


def _member_name(owner: str, member: ComponentSpec) -> str:
    return f"{owner}/{member.name}"


def _component(component: ComponentSpec, owner: str, values: dict[tuple[str, str], str]) -> ComponentSpec:
    places = tuple(
        replace(place, env=_env(place.env, _place_name(owner, rank), values))
        for rank, place in enumerate(component.places)
    )
    return replace(
        component,
        env=_env(component.env, owner, values),
        secret_env=_env(component.secret_env, _declared_name(owner), values, declared=True),
        places=places,
        members=tuple(_component(member, _member_name(owner, member), values) for member in component.members),
    )


def _env(env: Labels, owner: str, values: dict[tuple[str, str], str], *, declared: bool = False) -> Labels:
    return tuple((name, values.get((owner, name), "") if declared or is_secret(name) else value) for name, value in env)
