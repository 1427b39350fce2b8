"""The journal in a PostgreSQL that several controllers share: one leads and writes, the others follow."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from callboard.controller.journal.copying import IDENTITY, KEY, which_key
from callboard.controller.journal.credentials import Credentials
from callboard.controller.journal.database import without_password
from callboard.controller.journal.journal import Followed, Follower, Member, StoreJournal
from callboard.controller.journal.leading import POLL_S, Leadership
from callboard.controller.journal.postgres import WRITES, PostgresDatabase
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import KEY_NAME, StoreFailed
from callboard.controller.journal.store import Store, prepare


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
            url: the database.
            member: this controller.
            state_dir: with the key of secret values, which every member has, and the credentials that they share.
            lease_ms: silence of the leader after which another one may lead.
            events_kept, changes_per_snapshot: as of every journal.
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
        """The database."""
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
