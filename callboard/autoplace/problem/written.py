"""The numbers and tables of a problem as people write them, each read and bounded once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated

from callboard.autoplace.problem.costs import Scaling
from callboard.autoplace.problem.problem import Async, Objective, Sync
from callboard.model.inputs.compounds import entries, table
from callboard.model.inputs.located import Misfit, Misfits, Refused, each, raise_any, shown
from callboard.model.inputs.scalars import label
from callboard.model.schema import Kind

MAX_SECONDS = 1e7
"""Longest time of anything: four months."""

MAX_GPUS = 65_536
"""Most GPUs of a cluster, and largest count in a table."""

MAX_GIB = 1e6
"""Largest memory per GPU."""

MAX_POINTS = 4096
"""Most entries of one table."""

MAX_STALENESS = 1000.0
"""Largest staleness."""

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "amdahl": ("serial_fraction",),
    "usl": ("contention", "coherency"),
    "linear": (),
    "megatron": (),
    "rollout": ("requests", "max_running_requests", "instance_gpus"),
}


def number(value: object, least: float, most: float, *, above: bool = False) -> float:
    """A finite number from ``least`` (with ``above``: greater than it) to ``most``. Text is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{shown(value)} is not a number; write it without quotes, units and powers of ten, e.g. 59.9")
    if isinstance(value, int) and value.bit_length() > 128:
        raise Refused(f"{shown(value)} is out of bounds")
    if not math.isfinite(value):
        raise Refused(f"{value} is not a finite number")
    if value < least or value > most or (above and value <= least):
        raise Refused(f"{value} is out of bounds; {'above ' if above else ''}{least:g} to {most:g} is allowed")
    return float(value)


seconds = partial(number, least=0.0, most=MAX_SECONDS, above=True)
"""A measured time: above zero, since what takes no time was not measured."""

extra_seconds = partial(number, least=0.0, most=MAX_SECONDS)
"""A cost that may be nothing."""

gib = partial(number, least=0.0, most=MAX_GIB)
"""Memory in GiB, 0 for none."""

hbm_gib = partial(number, least=0.0, most=MAX_GIB, above=True)
"""The memory of a GPU in GiB."""


def count(value: object, least: int = 1, most: int = MAX_GPUS) -> int:
    """A whole number; text that is one is converted, as keys of JSON objects are always text (AP-05)."""
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) <= 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{shown(value)} is not a whole number of GPUs")
    if not least <= value <= most:
        raise Refused(f"{shown(value)} is out of bounds; {least} to {most} is allowed")
    return value


def by_gpus(value: object, read: Callable[[object], float], what: str, least: int = 0) -> dict[int, float]:
    """A table of numbers by GPU count, every fault at its key."""
    if not isinstance(value, Mapping):
        raise Refused(f"{shown(value)} is not a mapping; write {what}")
    if len(value) > MAX_POINTS:
        raise Refused(f"{len(value)} entries are too many; {MAX_POINTS} are allowed")
    misfits: list[Misfit] = []
    table: dict[int, float] = {}
    for key, item in value.items():
        place = key if isinstance(key, int | str) and not isinstance(key, bool) else shown(key)
        gpus = each(place, lambda found: count(found, least), key, misfits)
        found = each(place, read, item, misfits)
        if gpus is None or found is None:
            continue
        if gpus in table:
            misfits.append(Misfit((place,), f"{gpus} GPUs are listed twice"))
        table[gpus] = found
    raise_any(misfits)
    return dict(sorted(table.items()))


def seconds_table(value: object) -> dict[int, float]:
    """Measured seconds by GPU count; 0 stands for CPU only."""
    return by_gpus(value, seconds, "e.g. {8: 59.9, 16: 31.2}")


def pool_tables(value: object) -> dict[str, dict[int, float]]:
    """Measured seconds by GPU count, per pool."""
    return table(value, "e.g. {h100: {8: 59.9}, l40: {8: 130}}", seconds_table, key=label)


def memory(value: object) -> dict[int, float] | float:
    """GiB per GPU: one number, or a table by GPU count where shards shrink."""
    return by_gpus(value, gib, "e.g. {8: 60, 16: 34}", least=1) if isinstance(value, Mapping) else gib(value)


def scaling(value: object) -> Scaling:
    """A named law with its parameters."""
    if isinstance(value, str):
        value = {"model": value}
    found = dict(entries(value, "e.g. {model: amdahl, serial_fraction: 0.1}"))
    model = found.pop("model", None)
    if model is None:
        raise Misfits([Misfit(("model",), f"is required; use {', '.join(_PARAMETERS)}")])
    if not isinstance(model, str) or model not in _PARAMETERS:
        raise Refused(f"the law {shown(model)} is unknown; use {', '.join(_PARAMETERS)}")
    misfits: list[Misfit] = []
    parameters: dict[str, float] = {}
    for key, item in found.items():
        if key not in _PARAMETERS[model]:
            known = ", ".join(_PARAMETERS[model]) or "none"
            misfits.append(Misfit((key,), f"is not a parameter of {model}; known: {known}"))
            continue
        most = 1.0 if key in ("serial_fraction", "contention", "coherency") else 1e9
        read = each(key, lambda it, most=most: number(it, 0.0, most, above=most > 1), item, misfits)  # type: ignore[misc]
        if read is not None:
            parameters[key] = read
    raise_any(misfits)
    return Scaling(model, parameters)


def objective(value: object) -> Objective:
    """``sync``, ``async`` or ``{async: {staleness: 1}}``."""
    if value == "sync":
        return Sync()
    if value == "async":
        return Async()
    if isinstance(value, Mapping) and set(value) == {"async"}:
        inner = dict(entries(value["async"] or {}, "e.g. {staleness: 1}"))
        misfits: list[Misfit] = []
        eta = each("staleness", partial(number, least=0.0, most=MAX_STALENESS), inner.pop("staleness", 1.0), misfits)
        misfits += [Misfit((key,), "unknown key; did you mean staleness?") for key in inner]
        misfits = [Misfit(("async", *misfit.place), misfit.message) for misfit in misfits]
        raise_any(misfits)
        return Async(1.0 if eta is None else eta)
    raise Refused(f"{shown(value)} is not an objective; write sync or {{async: {{staleness: 1}}}}")


Seconds = Annotated[float, Kind(seconds)]
ExtraSeconds = Annotated[float, Kind(extra_seconds)]
SecondsTable = Annotated[dict[int, float], Kind(seconds_table)]
PoolTables = Annotated[dict[str, dict[int, float]], Kind(pool_tables)]
Memory = Annotated[dict[int, float] | float, Kind(memory)]
HbmGib = Annotated[float, Kind(hbm_gib)]
Law = Annotated[Scaling, Kind(scaling)]
Goal = Annotated[Objective, Kind(objective)]
Count = Annotated[int, Kind(count)]
CountOrNone = Annotated[int, Kind(lambda value: count(value, 0))]
