"""What trains in `callboard demo elastic`: a small network, stepped with PyTorch, else NumPy, else plain Python.

Plain Python with no Ray and no callboard in it: whatever stands in for it (`--actor pkg.module:Class`) need not know
of either. The data is the same in every worker and every kind of step: points of a line with noise.
"""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec
from typing import Any

FEATURES = 32
SAMPLES = 1024
RATE = 0.02
PASSES = 10
"""Passes over the data in one step."""


class TrainingActor:
    """One worker of the training: learns, forgets nothing when it moves.

    The step runs on the GPU that it sees, if there is one behind the id, else on the CPU.
    """

    def __init__(self, backend: str = "") -> None:
        """Builds the model.

        Args:
            backend: "torch", "numpy" or "python"; empty: the first of them that is installed.
        """
        self.backend = backend or _installed()
        self.model = _MODELS[self.backend]()
        self.steps_done = 0

    def train_step(self, step: int) -> dict[str, Any]:
        """One step of gradient descent: its loss, how long it took, where it ran."""
        began = time.perf_counter()
        loss = 0.0
        for _ in range(PASSES):
            loss = self.model.step()
        self.steps_done += 1
        return {
            "message": f"{self.model.device} training: loss={loss:.4f}",
            "loss": loss,
            "duration_s": time.perf_counter() - began,
            "step": step,
            "steps_done": self.steps_done,
            "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "backend": self.backend,
        }

    # What an inference or an environment worker is asked, so that the sample can play these roles too.
    generate = train_step
    rollout = train_step


class _Plain:
    device = "CPU"

    def __init__(self) -> None:
        self.points, self.targets = _data()
        self.weights = [0.0] * FEATURES

    def step(self) -> float:
        slopes = [0.0] * FEATURES
        loss = 0.0
        for point, target in zip(self.points, self.targets, strict=True):
            miss = sum(weight * value for weight, value in zip(self.weights, point, strict=True)) - target
            loss += miss * miss / SAMPLES
            for place, value in enumerate(point):
                slopes[place] += 2 * miss * value / SAMPLES
        self.weights = [weight - RATE * slope for weight, slope in zip(self.weights, slopes, strict=True)]
        return loss


class _NumPy:
    device = "CPU"

    def __init__(self) -> None:
        import numpy as np  # noqa: PLC0415 - an extra

        points, targets = _data()
        self.points, self.targets = np.array(points), np.array(targets)
        self.weights = np.zeros(FEATURES)

    def step(self) -> float:
        miss = self.points @ self.weights - self.targets
        self.weights = self.weights - RATE * 2 * self.points.T @ miss / SAMPLES
        return float(miss @ miss / SAMPLES)


class _Torch:
    """PyTorch, on the GPU where there is one."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - an extra

        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device = "GPU" if where.type == "cuda" else "CPU"
        points, targets = _data()
        self.points = torch.tensor(points, device=where)
        self.targets = torch.tensor(targets, device=where)
        self.model = torch.nn.Linear(FEATURES, 1, bias=False).to(where)
        torch.nn.init.zeros_(self.model.weight)
        self.loss_of = torch.nn.MSELoss()

    def step(self) -> float:
        loss = self.loss_of(self.model(self.points).squeeze(-1), self.targets)
        loss.backward()
        # Without an optimizer of PyTorch: the first one imports its compiler, 2.5 s of CPU in each worker.
        weight = self.model.weight
        weight.data -= RATE * weight.grad
        weight.grad = None
        return float(loss.item())


_MODELS: dict[str, Any] = {"torch": _Torch, "numpy": _NumPy, "python": _Plain}


def _installed() -> str:
    return next((name for name in ("torch", "numpy") if find_spec(name) is not None), "python")


def _data() -> tuple[list[list[float]], list[float]]:
    chance = random.Random(7)  # noqa: S311 - the same data everywhere
    points = [[chance.gauss(0, 1) for _ in range(FEATURES)] for _ in range(SAMPLES)]
    truth = [chance.gauss(0, 1) for _ in range(FEATURES)]
    targets = [sum(a * b for a, b in zip(point, truth, strict=True)) + chance.gauss(0, 0.1) for point in points]
    return points, targets
