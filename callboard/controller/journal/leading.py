"""The leadership among controllers that share a PostgreSQL, and what the others follow meanwhile.

The leader holds an advisory lock on a session of its own and says something there every eighth of the lease. The server
ends the session of one that was silent for the lease (``idle_session_timeout``), and with it the lock; the leader stops
a quarter of the lease before, by its own clock, counted from when it *sent* what was answered last. So the old leader
has stopped deciding before a new one begins, whatever was cut off, stopped or killed. A database that was started anew
knows no locks: whoever gets the lock there waits for a whole lease first.

What clocks can't promise the fence does (`journal/postgres.py`): nothing of an old leader is
ever written after a new one began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from callboard.controller.journal.codec import UnreadableChange, decode_change, decode_event, unsealed
from callboard.controller.journal.credentials import Credentials
from callboard.controller.journal.journal import Followed, Member
from callboard.controller.journal.postgres import LOCK, PostgresDatabase
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.journal.store import mark, read_state

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
            url: the database.
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
