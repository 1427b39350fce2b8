"""What is a solution of an instance? An option for each task, when it runs, and on which GPUs of each pool."""

from __future__ import annotations

from dataclasses import dataclass

from callboard.autoplace.tasks import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan for an instance.

    Attributes:
        length: end of its last task, in units.
        options: one per task.
        starts: earliest starts.
        ends: ends.
        columns: first GPU by task and pool index.
    """

    length: int
    options: tuple[Option, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    columns: tuple[dict[int, int], ...]

    @property
    def gpus(self) -> tuple[int, ...]:
        """The tie breaker: GPUs in total, then by task."""
        each = tuple(option.gpus for option in self.options)
        return (sum(each), *each)
