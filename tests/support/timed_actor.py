"""A worker class that times what it does, as a user would write it: plain Python, no import of callboard."""

from __future__ import annotations

from typing import Any


class Timed:
    """Times three rollouts and ends."""

    def setup(self, ctx: Any) -> None:
        """Keeps the context."""
        self.ctx = ctx

    def run(self) -> None:
        """Three iterations."""
        for _ in range(3):
            with self.ctx.timed("rollout"):
                sum(range(1000))
