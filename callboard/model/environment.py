"""Environment variables that belong to the scheduler.

One list for everything that accepts variables from outside: job specs, placement configs, agents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OWNED_VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ASCEND_RT_VISIBLE_DEVICES",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
"""Variables the scheduler sets for every worker; a job that names one is refused."""

WORKER_PORTS = range(20_000, 30_000)
"""Ports that workers are given: below the range from which systems give ports to clients."""

OWNED_PREFIXES = ("CALLBOARD_", "RAY_")
"""Prefixes of further variables the scheduler owns."""

INJECTED_VARIABLES = frozenset({"LD_PRELOAD", "LD_AUDIT", "PYTHONSTARTUP", "PYTHONHOME"})
"""Variables that would run foreign code in a worker before the scheduler's own; refused as well (SE-06)."""

PLACEHOLDERS = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "device", "devices")
"""What variables of a job may name in braces, for each worker to have its own value."""

_PLACEHOLDER = re.compile(r"(?<!\$)(?<!\$\{)(?:\{\{(NAME)\}\}|\{(NAME)\})".replace("NAME", "|".join(PLACEHOLDERS)))
"""``{rank}`` and the like. Whatever else is in braces is the value's own: JSON, or another program's template."""

_SECRET_SUFFIXES = ("_KEY", "_TOKEN", "_SECRET")


def why_refused(name: str) -> str | None:
    """Why a job may not set ``name``, or None if it may."""
    if name in OWNED_VARIABLES or name.startswith(OWNED_PREFIXES):
        return "the scheduler sets this variable itself"
    if name in INJECTED_VARIABLES:
        return "it would load foreign code into the worker"
    return None


def filled(value: str, facts: Mapping[str, str]) -> str:
    """A variable's value for one worker: ``{rank}`` is what ``facts`` says of it, ``{{rank}}`` the text ``{rank}``.

    Only the names of the placeholders are looked for, so that a value with other braces means what it always meant:
    ``{"rank": 1}``, ``${rank}``, ``{epoch}`` and ``{{ rank }}`` stay as they are.
    """

    return _PLACEHOLDER.sub(lambda found: facts[found[2]] if found[2] else f"{{{found[1]}}}", value)


def is_secret(name: str) -> bool:
    """Whether the value of ``name`` must appear in no log, event, status, metric or journal."""
    upper = name.upper()
    return upper.endswith(_SECRET_SUFFIXES) or "PASSWORD" in upper


def prefix_of(passed: str) -> str:
    """What variables begin with that ``NEXRL_*`` stands for: ``NEXRL_``; empty for the name of one variable.

    A prefix ends with an underscore: an agent's whole environment is never passed on (docs/roles.md).
    """
    return passed[:-1] if passed.endswith("_*") else ""
