"""The place of :mod:`callboard.demo.workers` in version 0.1."""

from callboard.demo.workers import RLHFWorker, SlowCancelWorker

__all__ = ["RLHFWorker", "SlowCancelWorker"]
