"""Names: one pattern for everything a person may name, and the environment variables that belong to the scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

Labels = tuple[tuple[str, str], ...]
"""(key, value), sorted by key."""

NAME_PATTERN = r"[A-Za-z][A-Za-z0-9_.-]{0,62}"
"""Names of nodes, pools, jobs and components. No slash, space, percent or control character, so that a name
is safe in resource names, actor names, file names and log lines alike."""

LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?"
"""Label keys and values (the shape Kubernetes uses, with a slash allowed in keys)."""

ACTOR_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
"""Import paths ``pkg.module:Class``."""

ENV_NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
"""Names of environment variables."""

GPU_SELECTORS = frozenset({"gpu_model", "gpu_memory_min"})
"""What stands among the resources of a worker and is no amount: which GPUs it may have."""

OWN_RESOURCES = frozenset({"cpu", "gpu", "memory", "gpu_memory"}) | GPU_SELECTORS
"""Resources that every node states by other means; no custom one has such a name, however it is written."""

RESOURCES_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gpus", "num_gpus", "nvidia.com/gpu"), "gpu"),
        **dict.fromkeys(("cpus", "num_cpus", "cores"), "cpu"),
        **dict.fromkeys(("mem", "ram"), "memory"),
    }
)
"""What other systems call our resources. As custom ones they would be asked for and be nowhere."""

OWN_LABELS = frozenset({"node", "node_group"})
"""Labels that every node has, its id and its group: one that states them would pass for another."""

_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
_ACTOR = re.compile(ACTOR_PATTERN)
_ENV_NAME = re.compile(ENV_NAME_PATTERN)


def is_name(text: str) -> bool:
    """Whether ``text`` may name a node, pool, job or component."""
    return _NAME.fullmatch(text) is not None


def is_custom_resource(text: str) -> bool:
    """Whether ``text`` may name a custom resource."""
    return is_name(text) and text.lower() not in OWN_RESOURCES


def is_label(text: str) -> bool:
    """Whether ``text`` may be a label key or value."""
    return _LABEL.fullmatch(text) is not None


def is_actor_path(text: str) -> bool:
    """Whether ``text`` is an import path ``pkg.module:Class``."""
    return len(text) <= 512 and _ACTOR.fullmatch(text) is not None


def is_module(text: str) -> bool:
    """Whether ``text`` may name a module."""
    return is_actor_path(f"{text}:_")


def is_env_name(text: str) -> bool:
    """Whether ``text`` may name an environment variable."""
    return _ENV_NAME.fullmatch(text) is not None


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
