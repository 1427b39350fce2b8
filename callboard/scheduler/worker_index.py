"""Whose are the workers, and what do they hold?"""

from __future__ import annotations

from callboard.scheduler.indexes import InOrder, Members, add, remove
from callboard.scheduler.records import WorkerRecord
from callboard.scheduler.states import HOLDING, WorkerState


class WorkerIndex:
    """The indexes over workers, in the order of their generations.

    Attributes:
        of_job: every worker of a job.
        holding_of_job, in_group, on_node: those that hold room (I4).
        leaving_extras: extra ones that stop while their job runs on.
    """

    def __init__(self) -> None:
        self.of_job: dict[str, Members[int]] = {}
        self.holding_of_job: dict[str, Members[int]] = {}
        self.in_group: dict[str, Members[int]] = {}
        self.on_node: dict[str, Members[int]] = {}
        self.leaving_extras: InOrder[int, int] = InOrder()

    def update(self, old: WorkerRecord | None, new: WorkerRecord | None) -> None:
        """Follows a worker after its record changed."""
        if old is None and new is not None:
            add(self.of_job, new.job, new.generation, new.generation)
        elif old is not None and new is None:
            remove(self.of_job, old.job, old.generation)
        before = old if old is not None and old.state in HOLDING else None
        after = new if new is not None and new.state in HOLDING else None
        if before is None and after is not None:
            add(self.in_group, after.group_id, after.generation, after.generation)
            add(self.on_node, after.node_id, after.generation, after.generation)
            add(self.holding_of_job, after.job, after.generation, after.generation)
        elif before is not None and after is None:
            remove(self.in_group, before.group_id, before.generation)
            remove(self.on_node, before.node_id, before.generation)
            remove(self.holding_of_job, before.job, before.generation)
        if new is not None and new.extra and new.state is WorkerState.STOPPING:
            self.leaving_extras.put(new.generation, new.generation)
        elif old is not None and old.extra:
            self.leaving_extras.pop(old.generation, None)
