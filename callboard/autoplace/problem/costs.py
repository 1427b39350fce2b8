"""The cost of a component on g GPUs: measured points verbatim, interpolation between, laws where named.

Between two measured counts the time is interpolated on log-log axes (a power law through both, which is how scaling
is plotted); outside the measured range there is no cost unless a law is named. A law has the shape of the curve there
and the nearest measured count its height: real points rarely lie on their law, and a jump between the two would be a
gain that only the search sees. Whatever isn't measured is marked *estimated*. Monotone data is not required: real data
isn't.

The laws are RLinf's own. They are kept so that answers can be compared with RLinf's (``toolkits/auto_placement`` at
a3816b596), and because one measurement is all that its users have. Published measurements are missed by 21 … 136 %
(actor, log-probabilities, rollout), which is why a measured count always goes before a law.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import combinations
from types import MappingProxyType

from callboard.model.frozen import dataclass

Law = Callable[[int], float | None]
"""Seconds on a number of GPUs; None where the law says nothing."""

_AMDAHL: tuple[Callable[[int], float], ...] = (lambda _: 1.0, lambda g: 1.0 / g)
_USL: tuple[Callable[[int], float], ...] = (lambda g: 1.0 / g, lambda g: (g - 1.0) / g, lambda g: g - 1.0)


class CostError(ValueError):
    """A law that can't be fitted to these points; the text says why."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """A named law.

    Attributes:
        model: ``amdahl``, ``usl``, ``linear``, ``megatron`` or ``rollout``.
        parameters: of the law, by name.
    """

    model: str
    parameters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds at one count.

    Attributes:
        seconds: for the whole batch.
        estimated: not measured.
    """

    seconds: float
    estimated: bool


def interpolated(points: Mapping[int, float], gpus: int) -> float | None:
    """Seconds on ``gpus`` between two measured counts, log-log; None outside the measured range.

    Args:
        points: measured seconds by GPUs, both positive.
        gpus: at least 1.
    """
    counts = sorted(points)
    if not counts or not counts[0] <= gpus <= counts[-1]:
        return None
    if gpus in points:
        return points[gpus]
    above = bisect_left(counts, gpus)
    low, high = counts[above - 1], counts[above]
    share = math.log(gpus / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(points[low]) + share * math.log(points[high]))


def law_of(scaling: Scaling, points: Mapping[int, float]) -> Law:
    """The law through the measured points.

    ``amdahl``: a + b/g by non-negative least squares over ≥ 2 points, or through one point with ``serial_fraction``.
    ``usl`` (Gunther's universal scalability law): A/g + B·(g−1)/g + C·(g−1) the same way, ≥ 2 points, or one with
    ``contention`` and ``coherency``. ``linear``: b/g. ``megatron`` and ``rollout``: RLinf's one-point laws, from
    the largest measured count down.

    Raises:
        CostError: too few points, or parameters that the law needs are missing.
    """
    if not points:
        raise CostError(f"the law {scaling.model} needs at least one measured count above 0")
    given = scaling.parameters
    if scaling.model == "linear":
        return _fitted(points, (_AMDAHL[1],))
    if scaling.model == "amdahl":
        return _amdahl(points, given.get("serial_fraction"))
    if scaling.model == "usl":
        return _usl(points, given.get("contention"), given.get("coherency"))
    full = max(points)
    if scaling.model == "megatron":
        return lambda gpus: megatron_seconds(points[full], full, gpus) if gpus < full else None
    if scaling.model == "rollout":
        return _rollout(points[full], full, given)
    raise CostError(f"the law {scaling.model} is unknown")


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """The non-negative weights w that minimise ‖rows·w − targets‖², for up to three columns.

    Every subset of columns is solved and the best non-negative one kept: for so few columns that is exact and needs
    no library (Lawson and Hanson, 1974, prove that the optimum is the plain solution on its own support).

    Args:
        rows: one row per point, one column per basis function.
        targets: one number per row.
    """
    width = len(rows[0])
    best: tuple[float, tuple[float, ...]] = (math.fsum(target * target for target in targets), (0.0,) * width)
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            solved = _least_squares([[row[c] for c in columns] for row in rows], targets)
            if solved is None or min(solved) < 0:
                continue
            weights = [0.0] * width
            for column, weight in zip(columns, solved, strict=True):
                weights[column] = weight
            error = math.fsum(
                (math.fsum(w * x for w, x in zip(weights, row, strict=True)) - target) ** 2
                for row, target in zip(rows, targets, strict=True)
            )
            # Fewer columns first: a law with fewer terms that fits as well is kept.
            if error < best[0] * (1 - 1e-9):
                best = (error, tuple(weights))
    return best[1]


def costs_at(counts: Iterable[int], points: Mapping[int, float], scaling: Scaling | None) -> dict[int, Cost]:
    """The cost at each of ``counts`` that has one.

    Args:
        counts: candidate GPU counts; 0 stands for CPU only and has a cost only when measured.
        points: measured seconds by GPUs.
        scaling: the law for counts outside the measured range; None: they have no cost.

    Raises:
        CostError: the law can't be fitted.
    """
    on_gpus = {gpus: seconds for gpus, seconds in points.items() if gpus > 0}
    law = law_of(scaling, on_gpus) if scaling is not None else None
    found: dict[int, Cost] = {}
    for gpus in counts:
        if gpus in points:
            found[gpus] = Cost(points[gpus], estimated=False)
            continue
        seconds = interpolated(on_gpus, gpus) if gpus > 0 else None
        if seconds is None and law is not None and gpus > 0:
            seconds = _continued(on_gpus, law, gpus)
        if seconds is not None:
            found[gpus] = Cost(seconds, estimated=True)
    return found


def _continued(points: Mapping[int, float], law: Law, gpus: int) -> float | None:
    """What a law says outside the measured range, from the nearest measured count on. RLinf's laws say nothing of the
    count that they are derived from, and are taken as they are from a single point."""
    end = min(points) if gpus < min(points) else max(points)
    beyond, there = law(gpus), law(end)
    return beyond if beyond is None or there is None else points[end] * (beyond / there)


def _amdahl(points: Mapping[int, float], serial_fraction: float | None) -> Law:
    if serial_fraction is not None:
        gpus, seconds = max(points.items())
        alone = seconds / (serial_fraction + (1 - serial_fraction) / gpus)
        return lambda g: alone * (serial_fraction + (1 - serial_fraction) / g)
    if len(points) < 2:
        raise CostError("the law amdahl needs two measured counts, or one and serial_fraction")
    return _fitted(points, _AMDAHL)


def _usl(points: Mapping[int, float], contention: float | None, coherency: float | None) -> Law:
    if contention is not None or coherency is not None:
        sigma, kappa = contention or 0.0, coherency or 0.0
        gpus, seconds = max(points.items())

        def slowdown(g: int) -> float:
            return (1 + sigma * (g - 1) + kappa * g * (g - 1)) / g

        return lambda g: seconds / slowdown(gpus) * slowdown(g)
    if len(points) < 2:
        raise CostError("the law usl needs two measured counts, or one and contention and coherency")
    return _fitted(points, _USL)


def _fitted(points: Mapping[int, float], basis: Sequence[Callable[[int], float]]) -> Law:
    counts = sorted(points)
    # Rows are divided by their target: times over 1 … 1024 GPUs span decades, and each shall fit relatively.
    rows = [[term(gpus) / points[gpus] for term in basis] for gpus in counts]
    weights = nonnegative_least_squares(rows, [1.0] * len(counts))

    def seconds(gpus: int) -> float | None:
        value = math.fsum(weight * term(gpus) for weight, term in zip(weights, basis, strict=True))
        return value if value > 0 else None

    return seconds


def _rollout(full_seconds: float, full_gpus: int, given: Mapping[str, float]) -> Law:
    missing = [key for key in ("requests", "max_running_requests") if key not in given]
    if missing:
        raise CostError(f"the law rollout needs {' and '.join(missing)}")

    def seconds(gpus: int) -> float | None:
        if gpus >= full_gpus:
            return None
        return rollout_seconds(
            full_seconds,
            full_gpus,
            gpus,
            instance_gpus=int(given.get("instance_gpus", 1)),
            requests=int(given["requests"]),
            max_running_requests=int(given["max_running_requests"]),
        )

    return seconds


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Weights of the plain least-squares fit by the normal equations; None when they are singular."""
    width = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(width)]
        + [math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True))]
        for i in range(width)
    ]
    for column in range(width):
        pivot = max(range(column, width), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) <= 1e-12 * (1 + abs(matrix[column][column])):
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for r in range(width):
            if r != column:
                factor = matrix[r][column] / matrix[column][column]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[column], strict=True)]
    return [matrix[i][width] / matrix[i][i] for i in range(width)]


QUEUE_FREE_SHARE = 0.9
"""Share of ``max_running_requests`` that runs without waiting, from :data:`QUEUE_FROM` requests on."""

QUEUE_FROM = 128


def megatron_seconds(full_seconds: float, full_gpus: int, gpus: int) -> float:
    """Seconds of a training or log-probability step on ``gpus``, from the one on ``full_gpus``.

    ``t(W)·s / (1 + min(0.9, max(s/10, 0.1)))`` with ``s = W/g``: fewer ranks lose less to communication.

    Args:
        full_seconds: measured seconds on all GPUs.
        full_gpus: W, how many those were.
        gpus: g, fewer than W. The measured size itself is taken verbatim: here the law has a jump.
    """
    assert 0 < gpus < full_gpus
    scale = full_gpus / gpus
    return full_seconds * scale / (1 + min(0.9, max(scale / 10, 0.1)))


def rollout_seconds(
    full_seconds: float, full_gpus: int, gpus: int, *, instance_gpus: int, requests: int, max_running_requests: int
) -> float:
    """Seconds of a generation step on ``gpus``, from the one on ``full_gpus``.

    Flat while the instances take all requests at once, else inversely proportional to the GPUs.

    Args:
        full_seconds: measured seconds on all GPUs.
        full_gpus: W, how many those were.
        gpus: g, fewer than W.
        instance_gpus: GPUs of one engine: tensor × pipeline parallel size.
        requests: sequences of one iteration, ``rollout_batch_size · group_size``.
        max_running_requests: sequences that one engine runs at once.
    """
    assert 0 < gpus < full_gpus
    share = QUEUE_FREE_SHARE if max_running_requests >= QUEUE_FROM else 1
    at_once = gpus // instance_gpus * math.ceil(max_running_requests * share)
    return full_seconds if at_once >= requests else full_seconds * full_gpus / gpus


def envs_per_instance(env_num: int, instances: int) -> int | None:
    """Environments of the fullest instance; None when an instance would have none.

    ``ceil``, not floor: 40 environments on 3 instances make one of them step 14 (AP-10).
    """
    return math.ceil(env_num / instances) if instances <= env_num else None
