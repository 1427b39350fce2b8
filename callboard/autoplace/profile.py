"""What did each component cost per iteration? Averages of recorded timings, for ``profile_data`` or a cost table.

A recording is a JSON object per line::

    {"component": "rollout", "seconds": 59.9, "gpus": 8}

``gpus`` or ``envs_per_instance`` say what it was measured at, and may be missing. An iteration of a component takes as
long as its slowest ``rank``. ``devices`` (what a worker's ``ctx.timed`` records) are counted over all ranks when
``gpus`` is missing. A new ``attempt`` is a new start, with a warm-up of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.located import shown
from callboard.model.names import NAME_PATTERN, is_name

MAX_LINES = 5_000_000
MAX_FAULTS = 20

_KEYS = "component, seconds, gpus, envs_per_instance, rank, attempt, iteration, devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One recorded run of one rank.

    Attributes:
        component: whose.
        seconds: how long it took.
        gpus: GPUs of the whole component; None: not stated.
        envs: environments per instance; None: not stated.
        rank: of the component's worker.
        attempt: of the job.
        iteration: which; None: in the order recorded.
        devices: GPUs of this worker, unique in the cluster.
    """

    component: str
    seconds: float
    gpus: int | None = None
    envs: int | None = None
    rank: int = 0
    attempt: int = 0
    iteration: int | None = None
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A component's mean.

    Attributes:
        component: whose.
        gpus: GPUs it was measured on; None: not known.
        envs: environments per instance; None: it has none.
        seconds: mean per iteration.
        spread_seconds: standard deviation of the iterations.
        iterations: how many were averaged.
        dropped: how many were left out as warm-up.
    """

    component: str
    gpus: int | None
    envs: int | None
    seconds: float
    spread_seconds: float
    iterations: int
    dropped: int


def read_timings(lines: Iterable[str], source: str) -> list[Timing]:
    """The recordings of a JSONL text; empty lines are skipped.

    Args:
        lines: its lines.
        source: what to call it in faults.

    Raises:
        InvalidInput: every line that is none, up to :data:`MAX_FAULTS`.
    """
    found: list[Timing] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        if number > MAX_LINES:
            faults.append(Fault(source, f"more than {MAX_LINES} lines", number, 1))
            break
        if not line.strip():
            continue
        try:
            found.append(_timing(line))
        except ValueError as error:
            faults.append(Fault(source, str(error), number, 1))
            if len(faults) == MAX_FAULTS:
                break
    if faults:
        raise InvalidInput(faults)
    return found


def measured(timings: Iterable[Timing], *, warmup: int) -> tuple[Measured, ...]:
    """The mean of each component at each size, in the order in which they were first recorded.

    Args:
        timings: in the order recorded.
        warmup: iterations to leave out at the start of each attempt.

    Raises:
        InvalidInput: nothing was recorded, or warm-up leaves nothing of a component.
    """
    starts: dict[tuple[str, int | None, int | None, int], list[Timing]] = {}
    for timing in timings:
        starts.setdefault((timing.component, timing.gpus, timing.envs, timing.attempt), []).append(timing)
    sizes: dict[tuple[str, int | None, int | None], tuple[list[float], int]] = {}
    for (component, gpus, envs, _), runs in starts.items():
        iterations = list(_iterations(runs))
        devices = frozenset[str]().union(*(run.devices for run in runs))
        kept, dropped = sizes.setdefault((component, gpus or len(devices) or None, envs), ([], 0))
        kept += iterations[warmup:]
        sizes[component, gpus or len(devices) or None, envs] = kept, dropped + min(warmup, len(iterations))
    faults = [
        Fault(component, f"{dropped} iterations were recorded and {warmup} are warm-up; record more, or lower --warmup")
        for (component, _, _), (kept, dropped) in sizes.items()
        if not kept
    ]
    if not sizes:
        faults = [Fault("", f"no timings; write a JSON object per line, with the keys {_KEYS}")]
    if faults:
        raise InvalidInput(faults)
    return tuple(_mean(key, kept, dropped) for key, (kept, dropped) in sizes.items())


def profile_data(found: Iterable[Measured]) -> dict[str, Any]:
    """The means as RLinf's ``profile_data``: a number per component, a table where several sizes were measured."""
    tables: dict[str, dict[int | None, float]] = {}
    for each in found:
        key = f"{each.component}_cost" if each.envs is None else f"{each.component}_profile_data"
        tables.setdefault(key, {})[each.gpus if each.envs is None else each.envs] = _rounded(each.seconds)
    return {
        key: next(iter(table.values())) if len(table) == 1 and key.endswith("_cost") else _ascending(table)
        for key, table in tables.items()
    }


def components(found: Iterable[Measured]) -> dict[str, Any]:
    """The means as ``workflow.components`` of the general form.

    Raises:
        InvalidInput: it isn't known on how many GPUs a component ran.
    """
    tables: dict[str, dict[int | None, float]] = {}
    faults = []
    for each in found:
        if each.gpus is None:
            faults.append(Fault(each.component, 'on how many GPUs it ran isn\'t known; record "gpus" (0: none)'))
        tables.setdefault(each.component, {})[each.gpus] = _rounded(each.seconds)
    if faults:
        raise InvalidInput(faults)
    return {name: {"seconds_by_gpus": _ascending(table)} for name, table in tables.items()}


def _timing(line: str) -> Timing:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{shown(found)} is not an object with the keys {_KEYS}")  # noqa: TRY004 - told with its line
    component = found.get("component")
    if not isinstance(component, str) or not is_name(component):
        raise ValueError(f"component: {shown(component)} is not a name; names match {NAME_PATTERN}")
    seconds = found.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds: {shown(seconds)} is not a measured time; more than 0 s is allowed")
    devices = found.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise ValueError(f"devices: {shown(devices)} is not a list of texts")
    return Timing(
        component=component,
        seconds=float(seconds),
        gpus=_whole(found, "gpus"),
        envs=_whole(found, "envs_per_instance", low=1),
        rank=_whole(found, "rank") or 0,
        attempt=_whole(found, "attempt") or 0,
        iteration=_whole(found, "iteration"),
        devices=frozenset(devices),
    )


def _whole(found: Mapping[str, Any], key: str, *, low: int = 0) -> int | None:
    value = found.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 1 << 63:
        raise ValueError(f"{key}: {shown(value)} is not a whole number from {low} on")
    return value


def _iterations(runs: Iterable[Timing]) -> Iterator[float]:
    """Seconds of each iteration that every rank has ended: those of its slowest rank."""
    by_rank: dict[int, dict[int, float]] = {}
    for run in runs:
        own = by_rank.setdefault(run.rank, {})
        own[len(own) if run.iteration is None else run.iteration] = run.seconds
    shared = set.intersection(*(set(own) for own in by_rank.values()))
    yield from (max(own[iteration] for own in by_rank.values()) for iteration in sorted(shared))


def _mean(key: tuple[str, int | None, int | None], kept: list[float], dropped: int) -> Measured:
    mean = math.fsum(kept) / len(kept)
    spread = math.sqrt(math.fsum((each - mean) ** 2 for each in kept) / len(kept))
    component, gpus, envs = key
    return Measured(
        component=component,
        gpus=gpus,
        envs=envs,
        seconds=mean,
        spread_seconds=spread,
        iterations=len(kept),
        dropped=dropped,
    )


def _rounded(seconds: float) -> float:
    """Five figures: more than any measurement repeats."""
    return float(f"{seconds:.5g}")


def _ascending(table: Mapping[int | None, float]) -> dict[int, float]:
    return {size: table[size] for size in sorted(table, key=lambda size: size or 0) if size is not None}
