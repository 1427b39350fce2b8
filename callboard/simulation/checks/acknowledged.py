"""What was acknowledged, which must still be true. (R1, I8)

A client that got an answer may rely on it: whatever the controller says afterwards, also after a crash, is checked
against the answers it gave.
"""

from __future__ import annotations

from collections.abc import Sequence

from callboard.scheduler import State
from callboard.scheduler.records.job_records import Change, JobRecord, Put
from callboard.scheduler.records.states import ENDED, JobState
from callboard.simulation.world.rules import RuleBroken

_ACTIVE = (JobState.PENDING, JobState.STARTING, JobState.RUNNING, JobState.PREEMPTING, JobState.RECOVERING)


class Acknowledged:
    """Every answer that still binds the controller."""

    def __init__(self) -> None:
        self.accepted: dict[str, None] = {}
        """Jobs whose submission was acknowledged and that are still listed."""
        self._over: dict[str, None] = {}
        self._pools: dict[str, int] = {}
        self._going: dict[str, None] = {}
        self._deleted: dict[str, None] = {}
        self._states: dict[str, JobState] = {}
        self._uid_of_request: dict[str, str] = {}
        self.kept = 0

    # ---- answers ----

    def submitted(self, uid: str, request_id: str, known: bool) -> None:
        """A submission was acknowledged.

        Args:
            known: the job is still listed.
        """
        earlier = self._uid_of_request.setdefault(request_id, uid)
        if earlier != uid and earlier in self.accepted:
            raise RuleBroken("R6", f"request {request_id} was accepted as {earlier} and as {uid}", uid)
        if known:
            self.accepted[uid] = None
        self.kept += 1

    def over(self, uid: str) -> None:
        """A cancel or complete was acknowledged."""
        self._over[uid] = None
        self.kept += 1

    def pool_comes(self, name: str) -> None:
        """A pool's creation is asked for: from now on it may be there or not."""
        self._deleted.pop(name, None)

    def pool_created(self, name: str) -> None:
        self._deleted.pop(name, None)
        self._going.pop(name, None)
        self._pools[name] = 1
        self.kept += 1

    def pool_changed(self, name: str, version: int) -> None:
        if name not in self._going:
            self._pools[name] = max(version, self._pools.get(name, 0))
        self.kept += 1

    def pool_goes(self, name: str) -> None:
        """A pool's deletion is asked for: from now on it may be there or not."""
        self._going[name] = None
        self._pools.pop(name, None)

    def pool_deleted(self, name: str) -> None:
        self._deleted[name] = None
        self.kept += 1

    # ---- checks ----

    def committed(self, changes: Sequence[Change]) -> None:
        """Notes which jobs ended and were then taken off the list, which is the only way to go."""
        for change in changes:
            if isinstance(change, Put):
                if isinstance(change.record, JobRecord):
                    self._states[change.record.uid] = change.record.state
            elif change.kind == "job":
                uid = str(change.key)
                state = self._states.pop(uid, None)
                if state not in ENDED:
                    raise RuleBroken("R1/I8", f"job {uid} was taken off the list while {state}", uid)
                self.accepted.pop(uid, None)
                self._over.pop(uid, None)

    def check(self, state: State) -> None:
        """Checks that everything acknowledged is still true.

        Raises:
            RuleBroken: it isn't.
        """
        for uid in self.accepted:
            if uid not in state.jobs:
                raise RuleBroken("R1/I8", f"the accepted job {uid} is lost", uid)
        for uid in self._over:
            job = state.jobs.get(uid)
            if job is not None and job.state in _ACTIVE:
                raise RuleBroken("R1", f"the end of {job.name} was acknowledged and it is {job.state}", uid)
        for name, version in self._pools.items():
            pool = state.pools.get(name)
            if pool is None or pool.spec_version < version:
                raise RuleBroken("R1", f"a change of pool {name} was acknowledged and is lost")
        for name in self._deleted:
            pool = state.pools.get(name)
            if pool is not None and not pool.deleting:
                raise RuleBroken("R1", f"the deletion of pool {name} was acknowledged and is lost")
