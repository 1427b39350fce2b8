"""A probe: a class to run where one's own would, to see what a worker sees before anything expensive starts.

``callboard job submit --config FILE`` runs it for every component that no class was named for: each worker writes its
report to its log and answers :meth:`Probe.report`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

SHOWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "CALLBOARD_NODE_GROUP",
)
"""Variables that say where a worker is. No others: their values may be secrets."""


class Probe:
    """Reports where it runs and what it was given."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def setup(self, ctx: Any) -> None:
        """Keeps what the worker is told and writes the first report to the log."""
        self._told = {
            name: getattr(ctx, name)
            for name in (
                "job_name",
                "component",
                "rank",
                "world_size",
                "local_rank",
                "local_world_size",
                "node_rank",
                "node_group",
            )
        }
        self._told["devices"] = list(ctx.devices)
        self._told["hardware"] = [dict(settings) for settings in ctx.hardware]
        sys.stdout.write(json.dumps(self.report()) + "\n")
        sys.stdout.flush()

    def report(self) -> dict[str, Any]:
        """Where it runs: what it was told, the variables it sees, host, process and interpreter."""
        return {
            **self._told,
            "variables": {name: os.environ[name] for name in SHOWN if name in os.environ},
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "interpreter": sys.executable,
        }

    def variables(self, names: list[str]) -> dict[str, str | None]:
        """Values of the variables that the caller names; None: not set."""
        return {name: os.environ.get(name) for name in names}
