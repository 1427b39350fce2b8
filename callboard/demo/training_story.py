"""The story of the training, line by line, and at its end a chart of the throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from callboard.demo.training_loop import Counts, Step

_RULE = "=" * 60
_BAR = 32
"""Longest bar of the chart, in characters."""

_ROWS = 12
"""Most rows of the chart."""


class TrainingStory:
    """Writes the story to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begins(self, how_to_add: str) -> None:
        """The loop begins."""
        for line in (
            "🎯 DYNAMIC TRAINING LOOP STARTED",
            _RULE,
            "💡 This training loop will:",
            "   • Run training steps on all available actors",
            "   • Monitor for new workers at each step",
            "   • Automatically scale up when new workers join",
            "   • Go on without workers that are lost or drained",
            "   • Use 1 GPU per training actor",
            "",
            f"🔄 To add workers: {how_to_add}",
            _RULE,
        ):
            self._say(line)

    def node_joined(self, node_id: str, gpus: float) -> None:
        """A node takes work."""
        self._say("")
        if gpus:
            self._say(f"🆕 Detected new worker: {node_id} with {gpus:.1f} GPUs")
        else:
            self._say(f"⚠️  {node_id} joined without a GPU: no actor runs there")

    def node_changed(self, node_id: str, state: str, reason: str) -> None:
        """A node takes no more work."""
        self._say("")
        self._say(f"🔻 Worker {node_id} is {state}: {reason}")

    def group_made(self, number: int) -> None:
        """There is one placement group more."""
        self._say(f"✅ Created placement group {number}")

    def actor_spawned(self, rank: int, node_id: str) -> None:
        """A worker is there."""
        self._say(f"🎭 Spawned training actor {rank} on node {node_id}")

    def actor_lost(self, rank: int, node_id: str) -> None:
        """A worker is gone and nobody wished it."""
        self._say("")
        self._say(f"💥 Lost training actor {rank} on node {node_id}; going on without it")

    def actor_left(self, rank: int, node_id: str) -> None:
        """A worker left with its node, as asked."""
        self._say(f"👋 Training actor {rank} left node {node_id}, which is being emptied")

    def recovered(self, rank: int) -> None:
        """A lost worker is back."""
        self._say(f"♻️  Training actor {rank} is back")

    def step_starts(self, number: int, actors: int) -> None:
        """A step begins."""
        self._say("")
        self._say(f"🚀 Running training step {number} on {actors} actors...")

    def step_ended(self, number: int, answers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """A step ended: (rank, what that worker answered) of each."""
        good = [answer for _, answer in answers if "value" in answer]
        durations = [_duration(answer) for answer in good]
        self._say(f"📊 Step {number} completed:")
        self._say(f"   - {len(good)} actors trained")
        if durations:
            self._say(f"   - Average duration: {sum(durations) / len(durations):.3f}s")
        for rank, answer in answers:
            self._say(f"   - Actor {rank}: {_answer_text(answer)}")

    def total(self, number: int, actor_steps: int, actors: int, most: int) -> None:
        """Every so many steps."""
        self._say("")
        self._say(f"📈 Total after {number} steps: {actor_steps} actor steps, {actors} actors now, {most} at most")

    def happening(self, text: str) -> None:
        """What the demonstration itself does to the cluster."""
        self._say("")
        self._say(f"🎬 {text}")

    def summary(self, steps: Sequence[Step], counts: Counts, actors: int) -> None:
        """The end: what happened, and how much was done when."""
        self._say("")
        self._say(_RULE)
        self._say(
            f"🏁 {len(steps)} steps, {sum(step.trained for step in steps)} actor steps; actors: {actors} at the end, "
            f"{counts.workers_max} at most; {counts.joins} joined, {counts.losses} lost, {counts.recoveries} "
            f"recovered, {counts.drained} drained"
        )
        self._say("Throughput, in actor steps per second:")
        for line in chart(steps):
            self._say(line)

    def failed(self, what: str) -> None:
        """Something that must hold does not."""
        self._say(f"❌ {what}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def chart(steps: Sequence[Step], rows: int = _ROWS) -> list[str]:
    """A bar for each stretch of steps: how many actor steps a second were done in it."""
    if len(steps) < 2:
        return ["  (too few steps)"]
    size = -(-(len(steps) - 1) // rows)
    stretches: list[tuple[str, float, int]] = []
    # Each stretch is timed from the end of the step before it: pauses and waits count.
    for first in range(1, len(steps), size):
        within = steps[first : first + size]
        seconds = within[-1].at_s - steps[first - 1].at_s
        label = f"{within[0].number}–{within[-1].number}"
        stretches.append((label, sum(step.trained for step in within) / seconds, within[-1].actors))
    highest = max(rate for _, rate, _ in stretches) or 1.0
    return [
        f"  steps {label:>9} {'█' * max(1, round(rate / highest * _BAR)):<{_BAR}} {rate:6.1f}  {actors} actors"
        for label, rate, actors in stretches
    ]


def _duration(answer: Mapping[str, Any]) -> float:
    value = answer["value"]
    stated = value.get("duration_s") if isinstance(value, Mapping) else None
    return float(stated) if isinstance(stated, int | float) else float(answer["seconds"])


def _answer_text(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return f"failed: {answer['error']}"
    value = answer["value"]
    if not isinstance(value, Mapping):
        return str(value)
    if "message" in value:
        return str(value["message"])
    return ", ".join(f"{name}={item}" for name, item in value.items()) or "done"
