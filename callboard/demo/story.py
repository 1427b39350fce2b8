"""The story of the demonstration: what is asked, what was decided and why, what happened, who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from callboard.cli.show import tables, words
from callboard.cli.show.exits import Failure
from callboard.cli.show.gpu_picture import GpuPicture
from callboard.model.quantities import format_milli
from callboard.v1.job_pb2 import Job
from callboard.v1.node_pb2 import Node
from callboard.v1.pool_pb2 import PlacementGroupPoolStats

_WIDTH = 112
"""Widest line of the story: longer ones are hard to read."""

_INDENT = 11


@dataclass(slots=True)
class Verdict:
    """How one act ended.

    Attributes:
        checks: (what must hold, whether it does).
        shown: the figure that shows it, for people.
        figures: everything that was measured.
    """

    name: str
    checks: list[tuple[str, bool]] = field(default_factory=list)
    shown: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that must hold does."""
        return bool(self.checks) and all(holds for _, holds in self.checks)

    def check(self, what: str, holds: bool) -> None:
        self.checks.append((what, holds))

    def failures(self) -> list[str]:
        """What does not hold."""
        return [what for what, holds in self.checks if not holds]


class Story:
    """Writes the story to a console."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def act(self, number: int, title: str) -> None:
        self.console.print()
        self._heading(f"Act {number} · {title}")

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="italic"), width=self._width)

    def attempt_failed(self, what: str, failure: Failure) -> None:
        """Something was tried and did not work; something else is tried next."""
        self._line("tried", f"{what}: {failure.what} {failure.why}", style="yellow")
        self.say("Trying with a Ray of its own.")

    def asked(self, job: Job) -> None:
        labels = words.labels(job.spec.labels)
        self._line(
            "asked",
            f"{job.spec.name}: priority {format_milli(job.spec.priority_milli)}, {labels}, {words.ask(job)}",
            style="cyan",
        )

    def decided(self, text: str) -> None:
        self._line("decided", text, style="yellow")

    def happened(self, text: str) -> None:
        """What happened, with its figures."""
        self._line("happened", text, style="green")

    def measured(self, text: str) -> None:
        self._line("measured", text, style="magenta")

    def pool(self, before: PlacementGroupPoolStats, after: PlacementGroupPoolStats) -> None:
        """The placement groups of the pool before and after."""
        built = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        for heading in ("placement groups", "reserved", "idle", "dynamic", "idle", "made so far", "used again"):
            built.add_column(heading, justify="left" if heading == "placement groups" else "right")
        for name, stats in (("  before", before), ("  after", after)):
            counts = (
                stats.reserved,
                stats.reserved_idle,
                stats.dynamic,
                stats.dynamic_idle,
                stats.creations,
                stats.reuses,
            )
            built.add_row(name, *(str(count) for count in counts))
        self.console.print(built)

    def gpus(self, nodes: Sequence[Node]) -> None:
        """Who is on which GPU."""
        self.console.print(GpuPicture(nodes))

    def verdict(self, verdict: Verdict) -> None:
        for failure in verdict.failures():
            self._line("failed", failure, style="bold red")

    def verdicts(self, verdicts: Sequence[Verdict], seconds: float) -> None:
        self.console.print()
        self._heading("Verdicts")
        rows: list[list[RenderableType]] = [
            [
                Text("passed" if verdict.passed else "FAILED", style="green" if verdict.passed else "bold red"),
                verdict.name,
                verdict.shown if verdict.passed else "; ".join(verdict.failures()),
            ]
            for verdict in verdicts
        ]
        self.console.print(tables.table(["VERDICT", "ACT", "SHOWN BY"], rows))
        self.console.print(f"\nTook {seconds:.0f} s with starting and ending the cluster.")

    def _heading(self, text: str) -> None:
        self.console.print(Rule(Text(text, style="bold"), align="left", style="dim"), width=self._width)

    @property
    def _width(self) -> int:
        return min(self.console.width, _WIDTH)

    def _line(self, kind: str, text: str, *, style: str) -> None:
        line = Table.grid(padding=(0, 1))
        line.add_column(width=_INDENT, no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(Text(f"  {kind}", style=style), Text(text))
        self.console.print(line, width=self._width)
