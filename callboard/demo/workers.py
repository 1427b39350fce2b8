"""What runs inside the workers of the demonstration: plain Python, no Ray, no callboard."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any


class RLHFWorker:
    """A stand-in for a rollout, reward or training worker.

    It counts steps, stops when it is asked to, and goes on from its checkpoint when it is started again.
    """

    def __init__(self, role: str, step_s: float = 0.02) -> None:
        self.role = role
        self.step_s = step_s
        self.steps_done = 0
        self.resumed_from = 0
        self._stop = threading.Event()

    def run(self, steps: int) -> dict[str, Any]:
        """Does ``steps`` steps, fewer when it is asked to stop. Says what it did and which GPUs it sees."""
        for _ in range(steps):
            if self._stop.wait(self.step_s):
                break
            self.steps_done += 1
        return {
            "role": self.role,
            "steps_done": self.steps_done,
            "resumed_from": self.resumed_from,
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "pid": os.getpid(),
        }

    def cancel(self) -> None:
        """Lets a busy ``run`` end after its step."""
        self._stop.set()

    def checkpoint(self) -> bytes:
        """What the next attempt needs."""
        return json.dumps({"steps_done": self.steps_done}).encode()

    def restore(self, state: bytes) -> None:
        """Goes on from where an earlier attempt was stopped."""
        self.steps_done = self.resumed_from = json.loads(state)["steps_done"]


class SlowCancelWorker(RLHFWorker):
    """A worker whose ``cancel()`` takes far longer than anybody should wait."""

    HANG_S = 8.0

    def cancel(self) -> None:
        time.sleep(self.HANG_S)
