"""The exception for a broken rule.

Programs that ship log a defect with its traceback, answer and go on. Nothing that a simulation does is reason enough
for that, so the first line of that kind is a failure of the run. Errors of the world, such as a full disk, are none.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from callboard.model.log import structlog
from callboard.simulation.world.virtual_time import Timeline, in_dead_process


class RuleBroken(AssertionError):
    """Something that must never happen did.

    Attributes:
        rule: which rule, e.g. ``"R2/I4"``.
        job: uid of the job concerned; empty: none.
    """

    def __init__(self, rule: str, message: str, job: str = "") -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.job = job


@contextmanager
def watched_logs(timeline: Timeline) -> Iterator[None]:
    """Takes in every line that is logged meanwhile; nothing is shown."""

    def take(_logger: object, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if (method == "exception" or "exc_info" in line) and not in_dead_process():
            told = {name: value for name, value in line.items() if name != "exc_info"}
            given = line.get("exc_info")
            error = given if isinstance(given, BaseException) else sys.exc_info()[1]
            trace = "".join(traceback.format_exception(error)) if error is not None else ""
            timeline.fail(RuleBroken("defect", f"production code logged an error: {told}\n{trace}"))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[take], wrapper_class=structlog.BoundLogger, cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
