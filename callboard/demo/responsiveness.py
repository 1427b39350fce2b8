"""The controller's responsiveness: GetStats, called again and again on a connection of its own."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from callboard.client.client import Client

PAUSE_S = 0.005


class Responsiveness:
    """Measures from entering the block until :meth:`stop`, or its end.

    Attributes:
        count: calls so far.
    """

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._times_ms: list[float] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """Calls so far."""
        return len(self._times_ms)

    async def __aenter__(self) -> Self:
        await self._client.stats()  # The connection is not what is measured.
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
        await self._client.close()

    async def stop(self) -> None:
        """Ends the measurement."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    def percentile_ms(self, percent: float) -> float:
        """The time within which so many percent of the calls were answered, in milliseconds."""
        if not self._times_ms:
            return float("inf")
        ordered = sorted(self._times_ms)
        place = min(len(ordered) - 1, int(len(ordered) * percent / 100))
        return ordered[place]

    async def _sample(self) -> None:
        while not self._stopping.is_set():
            began = time.perf_counter()
            await self._client.stats()
            self._times_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(PAUSE_S)
