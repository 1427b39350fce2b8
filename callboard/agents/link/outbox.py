"""The outbox: what the agent has said that the controller may not have heard.

Every report stays here until the controller acknowledged that it is journaled, and is sent again on each new
session. The same id always carries the same content, so hearing it twice changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from callboard.v1 import agent_pb2

MAX_UNACKNOWLEDGED = 10_000
"""While as many wait, no further commands are read: the controller isn't journaling what we say."""

MAX_ANSWERS = 10_000
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""First answers kept for repeated commands, oldest forgotten first: more than a controller has under way."""


class Outbox:
    """Reports in the order they were made, until they are acknowledged; and the answers to commands."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._numbers = itertools.count(1)
        self._waiting: dict[str, agent_pb2.Report] = {}
        self._unsent: dict[str, None] = {}
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()
        self._then: dict[str, Callable[[], None]] = {}
        self._answers: OrderedDict[str, agent_pb2.Report | None] = OrderedDict()
        self._answer_bytes = 0

    def begin(self, command_id: str) -> bool:
        """Whether this command is new; one that was answered gets its first answer again."""
        if command_id not in self._answers:
            self._answers[command_id] = None
            return True
        answer = self._answers[command_id]
        if answer is not None:
            self.repeat(answer)
        return False

    def report(self, command_id: str, **content: Any) -> agent_pb2.Report:
        """Say something: one field of `Report.content`, as the answer to a command or to nobody ("")."""
        report = agent_pb2.Report(report_id=f"{self._instance}-{next(self._numbers)}", command_id=command_id, **content)
        assert report.WhichOneof("content") is not None, "a report must say something"
        if command_id and self._answers.get(command_id) is None:
            self._keep_answer(command_id, report)
        self.repeat(report)
        return report

    def repeat(self, report: agent_pb2.Report) -> None:
        """Say something again, under its old id."""
        self._waiting[report.report_id] = report
        self._unsent[report.report_id] = None
        self._more.set()

    def when_acknowledged(self, report: agent_pb2.Report, then: Callable[[], None]) -> None:
        """Do something once the controller has this report; not at all if this agent ends before."""
        self._then[report.report_id] = then

    def acknowledge(self, report_ids: Iterable[str]) -> None:
        """The controller has these."""
        for report_id in report_ids:
            self._waiting.pop(report_id, None)
            self._unsent.pop(report_id, None)
            then = self._then.pop(report_id, None)
            if then is not None:
                then()
        self._fewer.set()

    def start_over(self) -> None:
        """A new session: everything unacknowledged counts as unsent."""
        self._unsent = dict.fromkeys(self._waiting)
        self._more.set()

    async def next(self) -> agent_pb2.Report:
        """The next report to send in this session."""
        while not self._unsent:
            self._more.clear()
            await self._more.wait()
        report_id = next(iter(self._unsent))
        del self._unsent[report_id]
        return self._waiting[report_id]

    async def wait_room(self) -> None:
        """Return while fewer than `MAX_UNACKNOWLEDGED` reports wait."""
        await self._wait_at_most(MAX_UNACKNOWLEDGED - 1)

    async def wait_empty(self) -> None:
        """Return once everything is acknowledged."""
        await self._wait_at_most(0)

    def _keep_answer(self, command_id: str, report: agent_pb2.Report) -> None:
        self._answers[command_id] = report
        self._answers.move_to_end(command_id)
        self._answer_bytes += report.ByteSize()
        while len(self._answers) > MAX_ANSWERS or self._answer_bytes > MAX_ANSWER_BYTES:
            # The oldest may be unanswered: then its answer is on the way and nothing may be forgotten of it.
            oldest = next((each for each, answer in self._answers.items() if answer), command_id)
            if oldest == command_id:
                return
            forgotten = self._answers.pop(oldest)
            assert forgotten is not None
            self._answer_bytes -= forgotten.ByteSize()

    async def _wait_at_most(self, count: int) -> None:
        while len(self._waiting) > count:
            self._fewer.clear()
            await self._fewer.wait()
