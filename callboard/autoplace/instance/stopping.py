"""The end of a search: somebody says so, an alarm goes off, or its nodes are spent. No clock is read here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


class Stop:
    """Why a search has to end, if it has to.

    Used as a context: the alarm runs inside it only.

    Args:
        time_limit: seconds until the alarm; None: none.
        asked: polled by the search; True: its caller wants the incumbent now.
    """

    def __init__(self, time_limit: float | None, asked: Callable[[], bool] | None) -> None:
        self._rung = threading.Event()
        self._asked = asked
        self._timer = None if time_limit is None else threading.Timer(time_limit, self._rung.set)
        self.time_limit = time_limit
        self.interrupted = False

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def late(self) -> bool:
        """Whether the alarm went off, and nobody else ended the search."""
        return self._rung.is_set() and not self.interrupted

    def __call__(self) -> bool:
        """Whether to end now."""
        if self._asked is not None and not self.interrupted and self._asked():
            self.interrupted = True
        return self.interrupted or self._rung.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether to end, after at most ``seconds``."""
        self._rung.wait(seconds)
        return self()


class Stopped(Exception):
    """The search was stopped before it was done: by its caller or by its number of nodes."""


@dataclass(slots=True)
class Budget:
    """How much may be spent.

    Attributes:
        nodes: nodes left; None: any number.
        stopped: asked at every node.
    """

    nodes: int | None = None
    stopped: Callable[[], bool] = lambda: False

    def spend(self) -> None:
        """One node.

        Raises:
            Stopped: nothing is left.
        """
        if self.nodes is not None:
            if self.nodes <= 0:
                raise Stopped
            self.nodes -= 1
        if self.stopped():
            raise Stopped
