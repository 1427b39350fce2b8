"""The actor classes of examples/nexrl_style.py: plain Python, no import of callboard or Ray.

Each is what such a worker is in a real framework, with arithmetic instead of models. `cancel()` is what callboard calls
when the job is to end: it leaves a line in the experiment's folder, so that one can see that every member was reached.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path


class Worker:
    """What they have in common."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """End soon, and say so."""
        self.cancelled.set()
        with (Path(os.environ["EXPERIMENT_PATH"]) / "cancelled.txt").open("a", encoding="utf-8") as file:
            file.write(f"{type(self).__name__}\n")


class DataLoader(Worker):
    """Hands out prompts."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.left = list(range(items))

    def next(self, count: int) -> list[int]:
        """The next prompts; fewer at the end."""
        batch, self.left = self.left[:count], self.left[count:]
        return batch


class Rollout(Worker):
    """Plays prompts with the newest weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0.0

    def generate(self, prompt: int) -> dict[str, float]:
        """One trajectory."""
        return {"prompt": prompt, "reward": random.Random(prompt).random() + self.weights}  # noqa: S311 - a toy policy

    def load(self, weights: float) -> float:
        """Take new weights."""
        self.weights = weights
        return weights


class TrajectoryPool(Worker):
    """Keeps trajectories until the trainer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, float]] = []
        self.inside = self.most_inside = 0
        self._lock = threading.Lock()
        self._crowd: threading.Barrier | None = None

    def expect(self, putters: int) -> None:
        """From now on no put ends before so many are inside at the same time."""
        self._crowd = threading.Barrier(putters)

    def put(self, trajectory: dict[str, float]) -> int:
        """Keep one."""
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        if self._crowd is not None:
            self._crowd.wait(60)
        with self._lock:
            self.kept.append(trajectory)
            self.inside -= 1
            return len(self.kept)

    def take(self, count: int) -> list[dict[str, float]]:
        """Some, which are the trainer's from now on."""
        with self._lock:
            batch, self.kept = self.kept[:count], self.kept[count:]
        return batch

    def served(self) -> int:
        """Most putters that were inside at the same time."""
        return self.most_inside


class Trainer(Worker):
    """Takes one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0.0
        self.steps = self.running = self.most_running = 0
        self._lock = threading.Lock()

    def step(self, batch: list[dict[str, float]]) -> dict[str, float]:
        """One step on a batch."""
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        mean = sum(item["reward"] for item in batch) / len(batch) if batch else 0.0
        self.cancelled.wait(0.02)  # what a GPU would be busy with
        self.weights += 0.1 * (1.0 - mean)
        with self._lock:
            self.running -= 1
            self.steps += 1
        return {"step": self.steps, "mean_reward": mean, "weights": self.weights}

    def long_step(self) -> Iterator[str]:
        """A step that says when it has begun, and only ends when the worker is cancelled."""
        yield "begun"
        yield "cancelled" if self.cancelled.wait(120) else "nobody came"

    def at_once(self) -> int:
        """Most steps that ran at the same time."""
        return self.most_running

    def state(self) -> float:
        """The weights."""
        return self.weights


class WeightSync(Worker):
    """Carries weights from the trainer to the rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.versions = 0

    def publish(self, weights: float) -> dict[str, float]:
        """What the rollouts are to load."""
        self.versions += 1
        return {"version": self.versions, "weights": weights}


class Validator(Worker):
    """Judges weights now and then."""

    def judge(self, weights: float) -> str:
        """A verdict."""
        return "better than nothing" if weights > 0 else "no better than nothing"
