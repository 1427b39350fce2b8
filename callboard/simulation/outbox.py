"""What has an agent said that the controller may not have heard? The rules of ``callboard.agents.outbox``, no loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from callboard.v1 import agent_pb2


class Outbox:
    """Reports until they are acknowledged, and the first answers to commands. Dies with its agent."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._numbers = itertools.count(1)
        self._waiting: dict[str, agent_pb2.Report] = {}
        self._unsent: dict[str, None] = {}
        self._answers: dict[str, agent_pb2.Report | None] = {}

    def begin(self, command_id: str) -> bool:
        """Whether a command is new; one that was answered gets its first answer again."""
        if command_id not in self._answers:
            self._answers[command_id] = None
            return True
        answer = self._answers[command_id]
        if answer is not None:
            self._repeat(answer)
        return False

    def report(self, command_id: str, **content: Any) -> None:
        """Says something, as the answer to a command or to nobody."""
        report = agent_pb2.Report(report_id=f"{self._instance}-{next(self._numbers)}", command_id=command_id, **content)
        if command_id and self._answers.get(command_id) is None:
            self._answers[command_id] = report
        self._repeat(report)

    def acknowledge(self, report_ids: Iterable[str]) -> None:
        """The controller has these."""
        for report_id in report_ids:
            self._waiting.pop(report_id, None)
            self._unsent.pop(report_id, None)

    def start_over(self) -> None:
        """A new session: everything that is not acknowledged is sent again."""
        self._unsent = dict.fromkeys(self._waiting)

    def take(self) -> list[agent_pb2.Report]:
        """What is to be sent now."""
        reports = [self._waiting[report_id] for report_id in self._unsent]
        self._unsent.clear()
        return reports

    @property
    def empty(self) -> bool:
        """Whether everything is acknowledged."""
        return not self._waiting

    def _repeat(self, report: agent_pb2.Report) -> None:
        self._waiting[report.report_id] = report
        self._unsent[report.report_id] = None
