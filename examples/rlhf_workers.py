"""The workers of `rlhf_pg_pool.py`: plain Python classes. callboard imports them inside the worker processes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any


class RLHFWorker:
    """Stands for a rollout, reward or training worker."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._stop = threading.Event()

    def run(self, steps: int) -> dict[str, Any]:
        """Works; says what it did and which GPUs it sees."""
        done = 0
        while done < steps and not self._stop.wait(0.02):
            done += 1
        return {"role": self.role, "steps": done, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}

    def cancel(self) -> None:
        """Called when the job must yield: let `run` end early."""
        self._stop.set()


class SlowCancelWorker(RLHFWorker):
    """Takes far longer to cancel than anybody should wait."""

    def cancel(self) -> None:
        """Hangs."""
        time.sleep(8)
