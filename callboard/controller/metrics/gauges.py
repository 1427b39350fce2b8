"""Gauges made from the state at the moment of a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from callboard.controller.views.nodes import counts_by_state
from callboard.model.quantities import IN_BYTES, MILLI
from callboard.scheduler import State
from callboard.scheduler.account.demand import demand
from callboard.scheduler.plan.quota import borrowable
from callboard.scheduler.records.states import LIVE, JobState

Sample = tuple[Sequence[str], float]
"""Values of the labels, and the figure."""


def _family(
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[Sample],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(f"callboard_{name}", text, labels=labels)
    for values, figure in samples:
        family.add_metric(values, figure)
    return family


def gauges(state: State, now_ms: int) -> Iterator[Metric]:
    """Every gauge. Amounts are in CPUs, GPUs, bytes and units of custom resources, ages in seconds."""
    yield from _jobs(state, now_ms)
    yield from _pools(state)
    yield from _groups(state)
    yield from _nodes(state)
    yield from _demand(state)
    meta = state.meta
    starts = {"preloaded": meta.preloaded_starts, "hit": meta.warm_starts, "miss": meta.cold_starts}
    text = "Workers that started, by whether they took a warm spare."
    yield _family("worker_starts", text, ["spare"], _by_name(starts), CounterMetricFamily)


def _by_name(figures: Mapping[str, float]) -> Iterator[Sample]:
    return (([name], figure) for name, figure in figures.items())


def _demand(state: State) -> Iterator[Metric]:
    """What autoscalers scale on; what a quota holds back is not in it, since nodes would not help."""
    counts = {(pool, optional): [0, 0, 0] for pool in state.pools for optional in ("false", "true")}
    for entry in demand(state):
        if not entry.quota_blocked:
            for optional, count in (("false", entry.count - entry.optional), ("true", entry.optional)):
                sums = counts.setdefault((entry.pool, optional), [0, 0, 0])
                sums[0] += count
                sums[1] += count * entry.shape.gpu_milli
                sums[2] += count * (entry.shape.gpu_milli // MILLI)
    families = (
        ("workers", "Workers without a place; optional ones are those that an elastic component does without.", 1),
        ("gpus", "GPUs that they ask for.", MILLI),
        ("whole_gpus", "Those of them that must be whole; parts of shared GPUs don't help.", 1),
    )
    for place, (name, text, unit) in enumerate(families):
        samples = ((labels, sums[place] / unit) for labels, sums in sorted(counts.items()))
        yield _family(f"demand_{name}", text, ["pool", "optional"], samples)


def _jobs(state: State, now_ms: int) -> Iterator[Metric]:
    waiting: Counter[str] = Counter(dict.fromkeys(state.pools, 0))
    oldest: dict[str, int] = {}
    for uid in state.jobs_by_state[JobState.PENDING]:
        pool, since_ms = state.specs[uid].spec.pool, state.jobs[uid].submit_ms
        waiting[pool] += 1
        oldest[pool] = min(since_ms, oldest.get(pool, since_ms))
    yield _family("queue_length", "Jobs that wait.", ["pool"], _by_name(dict(sorted(waiting.items()))))
    waits = {pool: max(0, now_ms - oldest[pool]) / 1000 if pool in oldest else 0 for pool in sorted(waiting)}
    yield _family("queue_wait_seconds", "How long the first job of a pool waits.", ["pool"], _by_name(waits))
    jobs = {job_state.value: len(state.jobs_by_state[job_state]) for job_state in JobState}
    yield _family("jobs", "Jobs by state.", ["state"], _by_name(jobs))
    # By name: while one job of a name ends, the next may start.
    living = Counter(
        (state.jobs[worker.job].name if worker.job in state.jobs else worker.job, worker.component)
        for worker in state.workers.values()
        if worker.state in LIVE
    )
    text = "Workers of a component that live."
    yield _family("component_workers", text, ["job", "component"], sorted(living.items()))
    workers = Counter([worker.state.value for worker in state.workers.values()])
    yield _family("workers", "Workers by state.", ["state"], _by_name(dict(sorted(workers.items()))))


def _pools(state: State) -> Iterator[Metric]:
    usage: list[Sample] = []
    limit: list[Sample] = []
    for name, pool in sorted(state.pools.items()):
        charged = state.charged(name)
        limits = dict(pool.spec.nominal)
        resources = dict.fromkeys([*(resource for resource, _ in charged.items()), *limits])
        usage += [([name, each], in_units(each, charged.get(each))) for each in resources]
        limit += [
            ([name, each], in_units(each, nominal + borrowable(state.pools, pool.spec, each)))
            for each, nominal in limits.items()
        ]
    yield _family("pool_usage", "What a pool is charged.", ["pool", "resource"], usage)
    text = "What a pool may be charged, with what others may lend."
    yield _family("pool_limit", text, ["pool", "resource"], limit)


def _groups(state: State) -> Iterator[Metric]:
    found = Counter((group.pool, group.group_kind.value, group.state.value) for group in state.groups.values())
    text = "Placement groups there are."
    yield _family("placement_groups", text, ["pool", "kind", "state"], sorted(found.items()))
    counted = {
        "reuses": "Times an existing group was used again.",
        "creations": "Groups that were asked for.",
        "hits": "Jobs that found a group.",
        "misses": "Jobs that found none.",
    }
    for field, what in counted.items():
        samples = [([name], getattr(pool.counts, field)) for name, pool in sorted(state.pools.items())]
        yield _family(f"placement_group_{field}", what, ["pool"], samples, CounterMetricFamily)


def _nodes(state: State) -> Iterator[Metric]:
    yield _family("nodes", "Nodes by state.", ["state"], _by_name(dict(sorted(counts_by_state(state).items()))))
    use = state.cluster_use
    parts = {"used": use.used, "held": use.held, "free": use.free, "quarantined": use.quarantined}
    gpus = {name: part.gpu_milli / MILLI for name, part in parts.items()}
    yield _family("gpus", "Devices by what they are used for, in GPUs.", ["state"], _by_name(gpus))
    free = {"whole": use.free_gpus.whole, "part": use.free_gpus.parts_milli / MILLI}
    text = "GPUs that can be given: whole ones, and what is left of shared ones, which no whole GPU can be made of."
    yield _family("free_gpus", text, ["kind"], _by_name(free))


def in_units(resource: str, amount: int) -> float:
    """An amount as Prometheus counts: bytes as they are, everything else in whole units."""
    return float(amount) if resource in IN_BYTES else amount / MILLI
