"""The transaction of one event: it changes the state wholly or not at all.

A transaction applies each change at once, so that later parts of the decision see it, and remembers how to undo it:
when the decision raises, everything is taken back (records are frozen, so the old ones are still there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callboard.scheduler.records.commands import Command
from callboard.scheduler.records.job_records import (
    STORY_LIMIT,
    Change,
    Drop,
    EventRecord,
    JobRecord,
    Key,
    MetaRecord,
    Put,
    Record,
    StoryLine,
    WorkerRecord,
    evolve,
)
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.refusals import ImpossibleTransition
from callboard.scheduler.records.states import (
    GROUP_MOVES,
    JOB_MOVES,
    JOB_PENDING,
    NODE_MOVES,
    WORKER_MOVES,
    GroupKind,
    GroupState,
    JobState,
    NodeState,
    WorkerState,
    allowed,
)
from callboard.scheduler.state.deadlines import Deadline
from callboard.scheduler.state.state import State

RETRY_MS = 1_000
"""Between attempts at a deadline whose handling raised: a defect, which must neither be lost nor keep the loop busy."""

MOST_STARTS = 128
"""Most workers that one event asks for; those of a larger gang are asked for in the next ones, at once."""

MOST_GROWTH = 32
"""Most extra workers that one event looks for a place for; the next ones go on, at once."""


_JOB_EVENTS = {state: (f"job.{state.value.lower()}", state.value) for state in JobState}
_WORKER_EVENTS = {state: (f"worker.{state.value.lower()}", state.value) for state in WorkerState}
_GROUP_EVENTS = {state: (f"group.{state.value.lower()}", state.value) for state in GroupState}
"""Type of the event of entering a state, and the state's name in it."""

_GROUP_KINDS = {kind: kind.value for kind in GroupKind}


class Transaction:
    """The changes, commands and log entries of one event."""

    def __init__(self, state: State, now_ms: int, cause: str) -> None:
        self.state = state
        # The wall clock may jump back; the scheduler's time never does.
        self.now_ms = max(now_ms, state.meta.now_ms)
        self.cause = cause
        self.changes: list[Change] = []
        self.commands: list[Command] = []
        self.events: list[EventRecord] = []
        self.fresh: list[str] = []
        """Jobs that became PENDING or eligible in this transaction: to be looked at, whatever was known before."""
        self.starts_left, self.growth_left = MOST_STARTS, MOST_GROWTH
        self.growth_looked = self.growth_cut = False
        """Whether a place to grow was looked for, and whether a job would have looked for further ones."""
        self._replaced: list[tuple[Change, Record | None]] = []
        """What was applied, and the record that was there before."""
        self._drawn: dict[str, int] = {}
        """Counters that were drawn from, and where they stand; written down at the end."""
        self._meta_at = -1
        """Where in the changes that of the counters is; -1: none yet."""
        self._due: list[Deadline] = []
        self.room_version, self.leaving_version = state.room_version, state.leaving_version
        """Where these counters stood before the event."""

    def put(self, record: Record) -> None:
        change = Put(record)
        self._replaced.append((change, self.state.apply(change)))
        self.changes.append(change)

    def drop(self, kind: str, key: Key) -> None:
        change = Drop(kind, key)
        old = self.state.apply(change)
        if old is not None:
            self._replaced.append((change, old))
            self.changes.append(change)

    def count(self, **fields: Any) -> MetaRecord:
        """Changes counters and settings of the cluster and returns the record before the change. Only what they are at
        the end is worth journaling."""
        before = self.state.meta
        change = Put(evolve(before, **fields))
        self.state.apply(change)
        if self._meta_at < 0:
            self._meta_at = len(self.changes)
            self._replaced.append((change, before))
            self.changes.append(change)
        else:
            self.changes[self._meta_at] = change
        return before

    def draw(self, counter: str, amount: int = 1) -> int:
        """Moves a counter of the cluster on and returns where it stood: the first of ``amount`` new numbers."""
        stood: int = self._drawn[counter] if counter in self._drawn else getattr(self.state.meta, counter)
        self._drawn[counter] = stood + amount
        return stood

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def event(self, kind: str, subject: str, state: str, reason: str, facts: Mapping[str, str] | None = None) -> int:
        """Adds an entry of the log and returns its revision."""
        return self._note(kind, subject, state, reason, tuple(sorted(facts.items())) if facts else ())

    def _note(self, kind: str, subject: str, state: str, reason: str, facts: tuple[tuple[str, str], ...]) -> int:
        """The same with the facts in their order, by name."""
        revision = self.state.meta.revision + len(self.events) + 1
        self.events.append(
            EventRecord(
                revision=revision,
                at_ms=self.now_ms,
                type=kind,
                subject=subject,
                state=state,
                reason=reason,
                cause=self.cause,
                facts=facts,
            )
        )
        return revision

    def due(self) -> list[Deadline]:
        """What is due now, earliest first."""
        self._due = self.state.deadlines.due(self.now_ms)
        return self._due

    def close(self) -> None:
        """Ends the transaction: time and revision move on with it, if anything changed."""
        if self.changes or self.events or self._drawn:
            revision = self.state.meta.revision + max(len(self.events), 1)
            self.count(now_ms=self.now_ms, revision=revision, **self._drawn)

    def fail(self) -> None:
        """Takes everything back, for it raised: what was due is tried again after a while, each alone (I6)."""
        self.undo()
        self.state.deadlines.pause(self._due, self.now_ms + RETRY_MS)

    def undo(self) -> None:
        """Takes everything back: the state is what it was, the order of every index included."""
        for change, old in reversed(self._replaced):
            if old is not None:
                self.state.apply(Put(old))
            elif isinstance(change, Put):
                self.state.apply(Drop(change.record.kind, change.record.key))
        self._replaced.clear()
        self._drawn.clear()
        self.changes.clear()
        self.commands.clear()
        self.events.clear()

    # ---- moves: the table is asked, the story is written ----

    def move_job(self, uid: str, state: JobState, reason: str, **fields: Any) -> JobRecord:
        """Moves a job to a state, with further fields, and writes its story."""
        job = self.state.jobs[uid]
        if not allowed(JOB_MOVES, job.state, state):
            raise _impossible(f"jobs/{job.name}", job.state, state, _story(job))
        kind, name = _JOB_EVENTS[state]
        facts = (("from", _JOB_EVENTS[job.state][1]), ("uid", uid))
        revision = self._note(kind, f"jobs/{job.name}", name, reason, facts)
        line = StoryLine(revision, self.now_ms, name, reason, self.cause)
        new = evolve(
            job,
            state=state,
            reason=reason,
            story=(*job.story[-STORY_LIMIT + 1 :], line),
            cause=self.cause,
            revision=revision,
            **fields,
        )
        self.put(new)
        return new

    def add_job(self, uid: str, name: str, reason: str, **fields: Any) -> JobRecord:
        """Adds a job, PENDING, and begins its story."""
        kind, state = _JOB_EVENTS[JOB_PENDING]
        revision = self._note(kind, f"jobs/{name}", state, reason, (("from", state), ("uid", uid)))
        new = JobRecord(
            uid=uid,
            name=name,
            state=JOB_PENDING,
            reason=reason,
            submit_ms=self.now_ms,
            story=(StoryLine(revision, self.now_ms, state, reason, self.cause),),
            cause=self.cause,
            revision=revision,
            **fields,
        )
        self.put(new)
        return new

    def add_line(self, uid: str, reason: str) -> None:
        """Writes into the story of a job what happened to it in the state it is in."""
        job = self.state.jobs[uid]
        name = job.state.value
        revision = self.event("job.hastened", f"jobs/{job.name}", name, reason, {"uid": uid})
        line = StoryLine(revision, self.now_ms, name, reason, self.cause)
        self.put(evolve(job, story=(*job.story[-STORY_LIMIT + 1 :], line), revision=revision))

    def change_job(self, uid: str, **fields: Any) -> JobRecord:
        """Changes fields of a job, not its state."""
        new = evolve(self.state.jobs[uid], **fields)
        self.put(new)
        return new

    def move_worker(self, generation: int, state: WorkerState, reason: str, **fields: Any) -> WorkerRecord:
        """Moves a worker to a state, with further fields."""
        worker = self.state.workers[generation]
        subject = self.worker_subject(worker)
        if not allowed(WORKER_MOVES, worker.state, state):
            raise _impossible(subject, worker.state, state, f"generation {generation}: {worker.reason}")
        kind, name = _WORKER_EVENTS[state]
        facts = (("attempt", str(worker.attempt)), ("generation", str(generation)), ("node", worker.node_id))
        revision = self._note(kind, subject, name, reason, facts)
        new = evolve(worker, state=state, reason=reason, revision=revision, **fields)
        self.put(new)
        return new

    def note_progress(self, worker: WorkerRecord, reason: str) -> None:
        """Notes what the start of a worker is at; its state stays."""
        facts = (("generation", str(worker.generation)), ("node", worker.node_id))
        revision = self._note("worker.progress", self.worker_subject(worker), "Progress", reason, facts)
        self.put(evolve(worker, reason=reason, revision=revision))

    def move_group(self, group_id: str, state: GroupState, reason: str, **fields: Any) -> GroupRecord:
        """Moves a placement group to a state, with further fields."""
        group = self.state.groups[group_id]
        if not allowed(GROUP_MOVES, group.state, state):
            raise _impossible(f"placementGroups/{group_id}", group.state, state, group.reason)
        revision = self.note_group(group_id, state, reason, group.pool, group.group_kind)
        new = evolve(group, state=state, reason=reason, revision=revision, **fields)
        self.put(new)
        return new

    def note_group(self, group_id: str, state: GroupState, reason: str, pool: str, kind: GroupKind) -> int:
        """Adds the entry of the log that a placement group enters a state."""
        what, name = _GROUP_EVENTS[state]
        facts = (("kind", _GROUP_KINDS[kind]), ("pool", pool))
        return self._note(what, f"placementGroups/{group_id}", name, reason, facts)

    def change_group(self, group_id: str, **fields: Any) -> GroupRecord:
        """Changes fields of a placement group, not its state."""
        new = evolve(self.state.groups[group_id], **fields)
        self.put(new)
        return new

    def add_node(self, node_id: str, state: NodeState, reason: str, **fields: Any) -> NodeRecord:
        """Adds a node, whole from the start: what is journaled and indexed of a join is one record."""
        revision = self.event(f"node.{state.value.lower()}", f"nodes/{node_id}", state.value, reason)
        new = NodeRecord(node_id=node_id, state=state, reason=reason, revision=revision, **fields)
        self.put(new)
        return new

    def move_node(self, node_id: str, state: NodeState, reason: str, **fields: Any) -> NodeRecord:
        """Moves a node to a state, with further fields."""
        node = self.state.nodes[node_id]
        if not allowed(NODE_MOVES, node.state, state):
            raise _impossible(f"nodes/{node_id}", node.state, state, node.reason)
        revision = self.event(f"node.{state.value.lower()}", f"nodes/{node_id}", state.value, reason)
        new = evolve(node, state=state, reason=reason, revision=revision, **fields)
        self.put(new)
        return new

    def worker_subject(self, worker: WorkerRecord) -> str:
        """Name of a worker in the log."""
        job = self.state.jobs.get(worker.job)
        return f"jobs/{job.name if job else worker.job}/workers/{worker.component}/{worker.rank}"


def _impossible(subject: str, old: str, new: str, story: str) -> ImpossibleTransition:
    return ImpossibleTransition(f"{subject} cannot go from {old} to {new}; its story: {story}")


def _story(job: JobRecord) -> str:
    return " → ".join(f"{line.state} ({line.reason})" for line in job.story) or "none yet"
