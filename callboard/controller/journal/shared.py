"""The journal in a PostgreSQL that several controllers share: one leads and writes, the others follow.

The leader holds an advisory lock on a session of its own and says something there every eighth of the lease. The server
ends the session of one that was silent for the lease (``idle_session_timeout``), and with it the lock; the leader stops
a quarter of the lease before, by its own clock, counted from when it *sent* what was answered last. So the old leader
has stopped deciding before a new one begins, whatever was cut off, stopped or killed. A database that was started anew
knows no locks: whoever gets the lock there waits for a whole lease first.

What clocks can't promise the fence does (`journal/postgres.py`): nothing of an old leader is
ever written after a new one began.

They share credentials, too: what lets clients and agents in at one does at each. The leader writes its files to the
database when they change, sealed; a standby takes them over. The key that opens them lies with each controller and
never in the database.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from callboard.controller.journal.codec import UnreadableChange, decode_change, decode_event, unsealed
from callboard.controller.journal.copying import IDENTITY, KEY, SHARED_FILES, which_key
from callboard.controller.journal.database import without_password
from callboard.controller.journal.journal import Followed, Follower, Member, StoreJournal
from callboard.controller.journal.postgres import LOCK, WRITES, PostgresDatabase
from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import KEY_NAME, StoreFailed
from callboard.controller.journal.store import Store, mark, prepare, read_state
from callboard.security.places import make_private, write_private
from callboard.security.tokens import TOKEN_NAME, controller_token

POLL_S = 0.2
"""How often a standby looks at what the leader wrote, and whether there is one."""

_AT_ONCE = 5_000
"""Most changes, and most events, that a standby takes in one look."""

_MEMBERS_S = 1.0
"""How often it is looked who else is there."""

NEWEST_EVENTS = 10_000
"""Events that one that begins to follow reads."""


def boot_s() -> float:
    """A clock that never goes back, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Credentials:
    """The credentials of one controller, as the others have them."""

    def __init__(self, state_dir: Path, key_path: Path) -> None:
        self._state_dir = state_dir
        self._key_path = key_path
        self._known: dict[str, str] = {}

    def exchange(self, database: PostgresDatabase, *, leads: bool) -> None:
        """Writes what changed here, or takes what changed there.

        Raises:
            OSError: a file can't be read or written.
            StoreFailed: what is there was sealed with another key.
        """
        (self._push if leads else self._pull)(database)

    def agree(self, database: PostgresDatabase) -> None:
        """Takes what is there; makes the owner's token when there is none yet, as the first that starts.

        Raises:
            OSError, UnsafeFile: a file can't be read or written.
            StoreFailed: what is there was sealed with another key.
        """
        self._pull(database)
        if TOKEN_NAME not in self._known:
            token = controller_token(self._state_dir) + "\n"
            database.agreed(TOKEN_NAME, Seal.of(self._key_path).close(token))
            self._pull(database)

    def _push(self, database: PostgresDatabase) -> None:
        for name in SHARED_FILES:
            path = self._state_dir / name
            text = path.read_text() if path.exists() else ""
            if text and self._known.get(name) != text:
                replacing = "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
                sealed = Seal.of(self._key_path).close(text)
                database.execute(f"INSERT INTO shared VALUES (?, ?) {replacing}", (name, sealed))  # noqa: S608 - no input
                self._known[name] = text

    def _pull(self, database: PostgresDatabase) -> None:
        rows = database.execute("SELECT name, value FROM shared").fetchall()
        for name, sealed in rows:
            if name not in SHARED_FILES:
                continue
            try:
                text = Seal.of(self._key_path).open(bytes(sealed))
            except Unsealable:
                raise StoreFailed(
                    self._key_path, "is not the key of the other controllers", "Copy their secrets.key here."
                ) from None
            path = self._state_dir / name
            if not path.exists() or path.read_text() != text:
                make_private(path.parent)
                write_private(path, text)
            self._known[name] = text


class Leadership:
    """This member's session. All but :attr:`holds` and :meth:`look` run in one thread, the journal's."""

    def __init__(
        self,
        url: str,
        member: Callable[[], Member],
        credentials: Credentials,
        *,
        lease_ms: int,
        lost: Callable[[], None],
    ) -> None:
        """
        Args:
            member: this controller; its addresses are known once it listens.
            credentials: exchanged with the other members every second.
            lease_ms: silence after which the server lets another one lead.
            lost: called, in any thread, when the leadership is lost.
        """
        self._url = url
        self._member = member
        self._credentials = credentials
        self._lease_ms = lease_ms
        self._lost = lost
        self._session: PostgresDatabase | None = None
        self._sent_s = 0.0
        self._good_until_s = 0.0
        self._begins_s = 0.0
        self._held = False
        self._pinging: threading.Thread | None = None
        self._ended = threading.Event()
        self._sequence = -1
        self._revision = 0
        self._members_at_s = 0.0
        self.members: list[Member] = []
        """All that were there about a second ago, the leader first."""

    @property
    def holds(self) -> bool:
        """Whether this process may decide, as far as its clock says."""
        return self._held and boot_s() < self._good_until_s

    def acquire(self) -> bool:
        """Whether this process may begin to lead now. Nobody else does from then on.

        Raises:
            StoreFailed: the database can't be asked.
        """
        if self._held and not self.holds:
            self.release()
        session = self._opened()
        if not self._held:
            with session.translated():
                sent_s = boot_s()
                if not session.execute("SELECT pg_try_advisory_lock(?)", (LOCK,)).fetchone()[0]:
                    return False
                self._hear(sent_s)
                known, now = session.execute(
                    "SELECT incarnation, pg_postmaster_start_time()::text FROM leader"
                ).fetchone()
                self._begins_s = boot_s() + (self._lease_ms / 1000 if known not in ("", now) else 0.0)
                session.execute("SELECT set_config('application_name', ?, false)", (self._name("leads"),))
            self._held = True
            self._ended = threading.Event()
            self._pinging = threading.Thread(
                target=self._ping, args=(session, self._ended), name="callboard-leader", daemon=True
            )
            self._pinging.start()
        return self.holds and boot_s() >= self._begins_s

    def begin(self, database: PostgresDatabase) -> None:
        """Takes the fence for a session that writes; transactions of the one before end.

        Raises:
            StoreFailed: the leadership was lost.
        """
        member = self._member()
        with database.translated():
            database.end_other_writers()
            (database.fence,) = database.execute(
                "UPDATE leader SET fence = fence + 1, address = ?, tokens_at = ?, "
                "incarnation = pg_postmaster_start_time()::text RETURNING fence",
                (member.address, member.tokens_at),
            ).fetchone()
        if not self.holds:
            raise StoreFailed(
                database.name, "was given to another leader meanwhile", "Nothing to do: this one follows."
            )

    def look(self) -> bool:
        """Notices that the leadership is over; to be called now and then, on the loop."""
        if self._held and not self.holds:
            self._give_up()
            return True
        return False

    def release(self) -> None:
        """Lets go of everything; another member may lead at once."""
        self._held = False
        self._ended.set()
        if self._session is not None:
            self._session.cut()
            if self._pinging is not None and self._pinging is not threading.current_thread():
                self._pinging.join()
            self._session.close()
            self._session, self._pinging = None, None
        self._sequence = -1

    def follow(self) -> Followed:
        """What changed since the last look.

        Raises:
            StoreFailed: the database can't be asked, or a newer version wrote what is there.
        """
        session = self._opened()
        try:
            return self._seen(session)
        except UnreadableChange as error:
            self._sequence = -1
            remedy = "Start the version of callboard that the leader has, or restore a backup."
            raise StoreFailed(session.name, f"can't be followed ({error})", remedy) from error

    def _seen(self, session: PostgresDatabase) -> Followed:
        with session.translated():
            self._look_around(session)
            leader = self._leader(session)
            if self._sequence < mark(session, "past") or self._sequence < 0:
                return self._anew(session, leader)
            # Events first: the state may be ahead of what is told of it, never behind.
            bodies = session.execute(
                "SELECT revision, body FROM event WHERE revision > ? ORDER BY revision LIMIT ?",
                (self._revision, _AT_ONCE),
            ).fetchall()
            lines = session.execute(
                "SELECT sequence, line FROM log WHERE sequence > ? ORDER BY sequence LIMIT ?",
                (self._sequence, _AT_ONCE),
            ).fetchall()
            if lines and lines[0][0] != self._sequence + 1:
                return self._anew(session, leader)
        events = [decode_event(unsealed(*row)) for row in bodies]
        self._sequence = lines[-1][0] if lines else self._sequence
        self._revision = events[-1].revision if events else self._revision
        return Followed(leader, [decode_change(unsealed(*row)) for row in lines], events)

    @staticmethod
    def _leader(session: PostgresDatabase) -> Member:
        """Who led last; empty: nobody did."""
        address, tokens_at = session.execute("SELECT address, tokens_at FROM leader").fetchone()
        return Member(address, tokens_at, leads=True)

    def _look_around(self, session: PostgresDatabase) -> None:
        if boot_s() - self._members_at_s < _MEMBERS_S:
            return
        rows = session.execute(
            "SELECT DISTINCT application_name FROM pg_stat_activity "
            "WHERE datname = current_database() AND (starts_with(application_name, 'callboard leads ') "
            "OR starts_with(application_name, 'callboard follows '))"
        ).fetchall()
        found = (name.split(" ", 2) for (name,) in rows)
        members = (Member(address, leads=part == "leads") for _, part, address in found)
        with suppress(OSError):  # the next look tries again; the files there are still hold
            self._credentials.exchange(session, leads=self._held)
        self.members, self._members_at_s = sorted(members, key=lambda each: (not each.leads, each.address)), boot_s()

    def _anew(self, session: PostgresDatabase, leader: Member) -> Followed:
        with session.as_of_now():
            changes, self._sequence = read_state(session)
            newest = "SELECT revision, body FROM event ORDER BY revision DESC LIMIT ?"
            found = session.execute(newest, (NEWEST_EVENTS,)).fetchall()
            events = [decode_event(unsealed(*row)) for row in reversed(found)]
        self._revision = events[-1].revision if events else 0
        return Followed(leader, changes, events, anew=True)

    def _name(self, part: str) -> str:
        return f"callboard {part} {self._member().address}"

    def _opened(self) -> PostgresDatabase:
        if self._session is not None and self._session.ended and not self._held:
            self.release()  # the server was started anew, or ended a session that was silent for too long
        if self._session is None:
            self._session = PostgresDatabase(
                self._url, "follows", member=self._member().address, lease_ms=self._lease_ms
            )
            self._sequence = -1
        return self._session

    def _hear(self, sent_s: float) -> None:
        self._good_until_s = sent_s + self._lease_ms * 0.75 / 1000

    def _ping(self, session: PostgresDatabase, ended: threading.Event) -> None:
        """Says that this leader lives. In a thread of its own: neither a busy loop nor a long write delays it."""
        while not ended.wait(self._lease_ms / 8 / 1000):
            sent_s = boot_s()
            try:
                session.execute("SELECT 1").fetchone()
                self._look_around(session)
            except PostgresDatabase.errors:
                if not ended.is_set():
                    self._give_up()
                return
            if self.holds:  # one that was held up for longer must not come back
                self._hear(sent_s)

    def _give_up(self) -> None:
        self._good_until_s = 0.0
        self._lost()


class PostgresJournal(StoreJournal):
    """The journal as one member of the cluster has it."""

    def __init__(
        self,
        url: str,
        member: Callable[[], Member],
        state_dir: Path,
        *,
        lease_ms: int,
        events_kept: int,
        changes_per_snapshot: int,
    ) -> None:
        """
        Args:
            state_dir: with the key of secret values, which every member has, and the credentials that they share.
            lease_ms: silence of the leader after which another one may lead.
        """
        super().__init__(events_kept=events_kept, changes_per_snapshot=changes_per_snapshot)
        self._url = url
        self._key_path = state_dir / KEY_NAME
        self._credentials = Credentials(state_dir, self._key_path)
        self._lost: Callable[[], object] = lambda: None
        self._leadership = Leadership(url, member, self._credentials, lease_ms=lease_ms, lost=self._is_lost)
        self._writer: PostgresDatabase | None = None
        self._looking: asyncio.Task[None] | None = None
        self._lease_ms = lease_ms
        self._look_s = lease_ms / 16 / 1000

    @property
    def members(self) -> list[Member]:
        """All that are there, the leader first; as of a second ago."""
        return self._leadership.members

    @property
    def where(self) -> str:
        return self._url

    async def prepare(self) -> str:
        """Makes the tables where there are none, and returns the identity of the state.

        Raises:
            StoreFailed: the database can't be used, or this member has another key than the others.
        """
        return await self._run(self._prepare)

    async def lead(self, follower: Follower) -> bool:
        """Follows the leader until this process leads itself."""
        loop = asyncio.get_running_loop()
        self._lost = lambda: None
        seen = Followed(Member(""))
        while follower.wants_to_lead:
            try:
                if await self._run(self._leadership.acquire):
                    self._lost = partial(loop.call_soon_threadsafe, follower.woken)
                    self._looking = self._looking or asyncio.create_task(self._look())
                    return True
                seen = await self._run(self._leadership.follow)
            except StoreFailed as failure:
                seen = Followed(seen.leader, trouble=str(failure))
            follower.followed(seen)
            await asyncio.sleep(POLL_S)
        return False

    def check(self) -> None:
        """
        Raises:
            StoreFailed: this process does not lead any more.
        """
        if not self._leadership.holds:
            raise StoreFailed(
                without_password(self._url),
                "does not hear from this controller, which leads no more",
                "The controllers go on by themselves: one of them leads.",
            )

    async def close(self) -> None:
        """Lets go of the leadership, and ends the threads."""
        if self._looking is not None:
            self._looking.cancel()
        await self._run(self._leadership.release)
        await super().close()

    def _prepare(self) -> str:
        database = PostgresDatabase(self._url, "prepares")
        try:
            with database.translated():
                prepare(database)
                database.share()
                SecretStore(database, self._key_path, seals_anew=False)
                key = which_key(self._key_path)
                if database.agreed(KEY, key) != key:
                    raise StoreFailed(
                        self._key_path,
                        "is not the key that the other controllers of this database have",
                        "Copy theirs here: the file secrets.key of a state directory.",
                    )
                self._credentials.agree(database)
                return database.agreed(IDENTITY, hashlib.blake2b(key, digest_size=8).hexdigest().encode()).decode()
        finally:
            database.close()

    def _make_store(self) -> Store:
        database = PostgresDatabase(self._url, WRITES, lease_ms=self._lease_ms, writes=True)
        try:
            self._leadership.begin(database)
            with database.translated():
                secrets = SecretStore(database, self._key_path, seals_anew=False)
            self._writer = database
            return Store(database, secrets, events_kept=self._events_kept)
        except BaseException:
            database.close()
            raise

    async def _look(self) -> None:
        """Notices the end of the lease, and then lets no write wait for a database that does not answer."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._leadership.look() and self._writer is not None:
                self._writer.cut()
                self._writer = None

    def _is_lost(self) -> None:
        self._lost()
