"""The credentials that the controllers of a cluster share: what lets clients and agents in at one does at each.

The leader writes its files to the database when they change, sealed; a standby takes them over. The key that opens
them lies with each controller and never in the database.
"""

from __future__ import annotations

from pathlib import Path

from callboard.controller.journal.copying import SHARED_FILES
from callboard.controller.journal.postgres import PostgresDatabase
from callboard.controller.journal.sealing import Seal, Unsealable
from callboard.controller.journal.state_dir import StoreFailed
from callboard.security.places import make_private, write_private
from callboard.security.tokens import TOKEN_NAME, controller_token


class Credentials:
    """Those of one controller."""

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
