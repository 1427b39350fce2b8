"""Gauges that jobs report of themselves: the newest value of each in memory, for a while.

Nothing of it is journaled. After a restart a job is without gauges until it reports again, and its scaling rules wait
for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from callboard.model.faults import Fault, InvalidInput
from callboard.model.names import is_name
from callboard.model.quantities import MAX_MILLI

MAX_GAUGES = 64
"""Most gauges of a job."""

FORGOTTEN_AFTER_MS = 300_000
"""A gauge that is not reported again says nothing any more: its reporter may be gone."""


def gauges_of(reported: Mapping[str, float], field: str = "gauges") -> dict[str, int]:
    """Reported gauges in thousandths; what is beyond ±10^9 counts as that.

    Raises:
        InvalidInput: too many, a name that is none, a value that is no finite number.
    """
    if len(reported) > MAX_GAUGES:
        raise InvalidInput([Fault(field, f"{len(reported)} gauges are too many; {MAX_GAUGES} are allowed")])
    faults = [Fault(f"{field}[{name[:64]!r}]", "is not a name for a gauge") for name in reported if not is_name(name)]
    faults += [
        Fault(f"{field}[{name[:64]!r}]", f"{value} is not a finite number")
        for name, value in reported.items()
        if not math.isfinite(value)
    ]
    if faults:
        raise InvalidInput(faults)
    # Bounded first: a thousand times the largest number is none.
    most = MAX_MILLI / 1000
    return {name: round(max(-most, min(most, value)) * 1000) for name, value in reported.items()}


class GaugeBoard:
    """The newest gauges of each job."""

    def __init__(self) -> None:
        self._of_job: dict[str, dict[str, tuple[int, int]]] = {}

    def note(self, uid: str, gauges: Mapping[str, int], now_ms: int) -> tuple[tuple[str, int], ...]:
        """Remembers gauges of a job; returns all of them that are known now.

        Raises:
            InvalidInput: the job has too many different ones.
        """
        known = {**self._fresh(uid, now_ms), **{name: (value, now_ms) for name, value in gauges.items()}}
        if len(known) > MAX_GAUGES:
            raise InvalidInput([Fault("gauges", f"the job has {len(known)} gauges; {MAX_GAUGES} are allowed")])
        self._of_job[uid] = known
        return tuple(sorted((name, value) for name, (value, _) in known.items()))

    def of(self, uid: str, now_ms: int) -> dict[str, float]:
        """Gauges of a job, in the units they were reported in."""
        return {name: value / 1000 for name, (value, _) in sorted(self._fresh(uid, now_ms).items())}

    def keep_only(self, uids: Mapping[str, object]) -> None:
        """Forgets jobs that are not among ``uids``."""
        for uid in [uid for uid in self._of_job if uid not in uids]:
            del self._of_job[uid]

    def _fresh(self, uid: str, now_ms: int) -> dict[str, tuple[int, int]]:
        known = self._of_job.get(uid, {})
        return {name: pair for name, pair in known.items() if now_ms - pair[1] < FORGOTTEN_AFTER_MS}
