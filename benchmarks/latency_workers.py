"""What runs in the workers of `latency.py`."""

from __future__ import annotations

import threading
import time


class Echo:
    """Answers at once; without hooks."""

    def echo(self, value: object) -> object:
        """The value."""
        return value


class Cooperative(Echo):
    """Busy until it is told to yield, which it does at once."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def run(self) -> None:
        """Work until told to stop."""
        self._stop.wait()

    def cancel(self) -> None:
        """Stop."""
        self._stop.set()


class Hanging(Echo):
    """Its cancel() hangs."""

    def run(self) -> None:
        """Never return."""
        time.sleep(10**6)

    def cancel(self) -> None:
        """Hang."""
        time.sleep(10**6)
