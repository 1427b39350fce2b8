"""Members of a colocation group, as a user would write them."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path


class Trainer:
    """Takes one step at a time, and notices if two ever ran at once."""

    def __init__(self, name: str = "trainer") -> None:
        self.name = name
        self.steps = self.running = self.most_at_once = 0
        self._lock = threading.Lock()
        self._go_on = threading.Event()
        self._cancelled = threading.Event()
        self.context: object = None

    def setup(self, context: object) -> None:
        """Keep what the host says."""
        self.context = context

    def step(self, wait: bool = False) -> int:
        """One step; with ``wait`` until somebody says ``let_go`` or the worker is cancelled."""
        with self._lock:
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        if wait:
            while not self._go_on.wait(0.01) and not self._cancelled.is_set():
                pass
        with self._lock:
            self.running -= 1
            self.steps += 1
        return self.steps

    def most(self) -> int:
        """Most steps that ran at once."""
        return self.most_at_once

    def told(self) -> list[object]:
        """Component, group and the thread's name."""
        return [self.context.component, self.context.colocation_group, threading.current_thread().name]  # type: ignore[attr-defined]

    def cancel(self) -> None:
        """End the step."""
        self._cancelled.set()

    def checkpoint(self) -> bytes:
        """The number of steps."""
        return json.dumps({"steps": self.steps}).encode()

    def restore(self, data: bytes) -> None:
        """Go on from there."""
        self.steps = json.loads(data)["steps"]

    def progress(self) -> dict[str, int]:
        """How far it is."""
        return {"steps": self.steps}


class Pool:
    """Keeps items; many may put at once."""

    def __init__(self, expected: int = 1) -> None:
        self.items: list[int] = []
        self.cancelled = False
        self._all_here = threading.Barrier(expected)

    def put(self, item: int) -> int:
        """Keep an item, once as many as expected are here: fewer calls at once would never end."""
        self._all_here.wait(20)
        self.items.append(item)
        return len(self.items)

    def size(self) -> int:
        """Items kept."""
        return len(self.items)

    def step(self) -> str:
        """The name of another member's method."""
        return "the pool's"

    def cancel(self) -> None:
        """Leave a trace."""
        path = os.environ.get("CANCELLED_FILE")
        if path:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write("pool\n")

    def checkpoint(self) -> str:
        """Where its items are."""
        return f"file:///items/{len(self.items)}"

    def restore(self, uri: str) -> None:
        """Remember where they were."""
        self.items = [0] * int(uri.rpartition("/")[2])

    def progress(self) -> dict[str, int]:
        """How full it is."""
        return {"items": len(self.items)}


class Loop:
    """An async member."""

    async def step(self) -> str:
        """The name of another member's method."""
        return "the loop's"


class Heavy:
    """Leaves a checkpoint that is nearly as large as one may be."""

    def checkpoint(self) -> bytes:
        """Its state."""
        return b"x" * 700_000


class Silent:
    """Has no hooks."""

    def run(self) -> None:
        """Nothing."""


class Finishing:
    """Has an entry that ends, well or not."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem

    def run(self) -> None:
        """End."""
        if self.problem:
            raise RuntimeError(self.problem)


class Careless:
    """Tells a secret in its error."""

    def __init__(self) -> None:
        raise ValueError(f"can't log in with {os.environ['DB']} and {os.environ['API_TOKEN']}")


class Hog:
    """Takes memory without end, once a file named by GATE is there; a hundred MiB before."""

    def run(self) -> None:
        """Hold more and more."""
        held = [b"x" * (100 << 20)]
        while not Path(os.environ["GATE"]).exists():
            time.sleep(0.01)
        while True:
            held.append(b"x" * (8 << 20))
