"""A search on the screen: its best plan and bound so far; Ctrl-C ends it with what there is."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

from rich.status import Status

from callboard.autoplace.answer.gantt import seconds_text
from callboard.autoplace.problem.plan import Plan
from callboard.autoplace.problem.problem import Problem
from callboard.autoplace.solve.search import search
from callboard.cli.show import consoles


class Searching:
    """Runs searches for a person who waits. Inside it, Ctrl-C asks them to end; a second one is Python's own."""

    def __init__(self, time_limit_s: float, *, quiet: bool) -> None:
        """
        Args:
            time_limit_s: most seconds of each search.
        """
        self._time_limit_s = time_limit_s
        self._console = consoles.stderr()
        self._shows = not quiet and self._console.is_terminal
        self._status: Status | None = None
        self._before: Any = None
        self.interrupted = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self._shows:
            self._status = self._console.status("searching …")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        self._restore()

    def search(self, problem: Problem) -> Plan:
        """The best plan of a problem.

        Raises:
            NoPlan: there is none.
        """
        return search(
            problem, time_limit=self._time_limit_s, on_progress=self._on_progress, stop=lambda: self.interrupted
        )

    def _on_progress(self, incumbent_seconds: float, bound_seconds: float) -> None:
        if self._status is not None:
            self._status.update(progress_text(incumbent_seconds, bound_seconds))

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.interrupted = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def progress_text(incumbent_seconds: float, bound_seconds: float) -> str:
    """ "searching … 190 s so far, and no plan is below 180 s (5.3 %)"."""
    gap = (incumbent_seconds - bound_seconds) / incumbent_seconds if incumbent_seconds > 0 else 0.0
    return (
        f"searching … {seconds_text(incumbent_seconds)} so far, and no plan is below {seconds_text(bound_seconds)} "
        f"({gap:.1%}); Ctrl-C takes what there is"
    )
