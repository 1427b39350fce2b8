"""What survives a crash of the controller? Lines of the real codec, and a digest of all ever written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from callboard.controller.codec import decode_change, encode_change, encode_event, encode_record
from callboard.scheduler import State
from callboard.scheduler.records import Change, EventRecord

SNAPSHOT_AFTER = 4_000
"""Changes in the log until a snapshot pays."""


class Journal:
    """The disk."""

    def __init__(self) -> None:
        self._snapshot: list[str] = []
        self._log: list[str] = []
        self._digest = hashlib.sha256()
        self.changes = 0
        self.bytes = 0

    @property
    def digest(self) -> str:
        """SHA-256 of everything ever committed, in hex."""
        return self._digest.hexdigest()

    def commit(self, changes: Sequence[Change], events: Sequence[EventRecord]) -> None:
        """Writes a batch."""
        lines = [encode_change(change) for change in changes]
        self._log.extend(lines)
        self.changes += len(lines)
        for text in (*lines, *map(encode_event, events)):
            raw = text.encode()
            self.bytes += len(raw)
            self._digest.update(raw)
            self._digest.update(b"\n")

    def compact(self, state: State) -> None:
        """Takes a snapshot of ``state``, which is what the journal holds, when it pays."""
        if len(self._log) > SNAPSHOT_AFTER + len(self._snapshot):
            self._snapshot = [encode_record(record) for record in state.records()]
            self._log.clear()

    def replay(self) -> State:
        """The state that the journal holds."""
        state = State()
        for line in (*self._snapshot, *self._log):
            state.apply(decode_change(line))
        return state
