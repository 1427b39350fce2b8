"""Gauges made from the state at the moment of a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from callboard.controller.views.nodes import counts_by_state
from callboard.model.quantities import IN_BYTES, MILLI
from callboard.scheduler import State
from callboard.scheduler.account.demand import demand
from callboard.scheduler.plan.quota import borrowable
from callboard.scheduler.records.states import LIVE, JobState


def gauges(state: State, now_ms: int) -> Iterator[Metric]:
    """Every gauge. Amounts are in CPUs, GPUs, bytes and units of custom resources, ages in seconds."""
    yield from _jobs(state, now_ms)
    yield from _pools(state)
    yield from _groups(state)
    yield from _nodes(state)
    yield from _demand(state)
    starts = CounterMetricFamily(
        "callboard_worker_starts", "Workers that started, by whether they took a warm spare.", labels=["spare"]
    )
    starts.add_metric(["preloaded"], state.meta.preloaded_starts)
    starts.add_metric(["hit"], state.meta.warm_starts)
    starts.add_metric(["miss"], state.meta.cold_starts)
    yield starts


def _demand(state: State) -> Iterator[Metric]:
    """What autoscalers scale on; what a quota holds back is not in it, since nodes would not help."""
    workers = GaugeMetricFamily(
        "callboard_demand_workers",
        "Workers without a place; optional ones are those that an elastic component does without.",
        labels=["pool", "optional"],
    )
    gpus = GaugeMetricFamily("callboard_demand_gpus", "GPUs that they ask for.", labels=["pool", "optional"])
    whole = GaugeMetricFamily(
        "callboard_demand_whole_gpus",
        "Those of them that must be whole; parts of shared GPUs don't help.",
        labels=["pool", "optional"],
    )
    counts = {(pool, optional): [0, 0, 0] for pool in state.pools for optional in ("false", "true")}
    for entry in demand(state):
        if not entry.quota_blocked:
            for optional, count in (("false", entry.count - entry.optional), ("true", entry.optional)):
                sums = counts.setdefault((entry.pool, optional), [0, 0, 0])
                sums[0] += count
                sums[1] += count * entry.shape.gpu_milli
                sums[2] += count * (entry.shape.gpu_milli // MILLI)
    for labels, (count, gpu_milli, whole_gpus) in sorted(counts.items()):
        workers.add_metric(list(labels), count)
        gpus.add_metric(list(labels), gpu_milli / MILLI)
        whole.add_metric(list(labels), whole_gpus)
    yield workers
    yield gpus
    yield whole


def _jobs(state: State, now_ms: int) -> Iterator[Metric]:
    length = GaugeMetricFamily("callboard_queue_length", "Jobs that wait.", labels=["pool"])
    wait = GaugeMetricFamily("callboard_queue_wait_seconds", "How long the first job of a pool waits.", labels=["pool"])
    waiting: Counter[str] = Counter(dict.fromkeys(state.pools, 0))
    oldest: dict[str, int] = {}
    for uid in state.jobs_by_state[JobState.PENDING]:
        pool, since_ms = state.specs[uid].spec.pool, state.jobs[uid].submit_ms
        waiting[pool] += 1
        oldest[pool] = min(since_ms, oldest.get(pool, since_ms))
    for pool, count in sorted(waiting.items()):
        length.add_metric([pool], count)
        wait.add_metric([pool], max(0, now_ms - oldest[pool]) / 1000 if pool in oldest else 0)
    yield length
    yield wait
    jobs = GaugeMetricFamily("callboard_jobs", "Jobs by state.", labels=["state"])
    for job_state in JobState:
        jobs.add_metric([job_state.value], len(state.jobs_by_state[job_state]))
    yield jobs
    members = GaugeMetricFamily(
        "callboard_component_workers", "Workers of a component that live.", labels=["job", "component"]
    )
    # By name: while one job of a name ends, the next may start.
    living = Counter(
        (state.jobs[worker.job].name if worker.job in state.jobs else worker.job, worker.component)
        for worker in state.workers.values()
        if worker.state in LIVE
    )
    for (job, component), count in sorted(living.items()):
        members.add_metric([job, component], count)
    yield members
    workers = GaugeMetricFamily("callboard_workers", "Workers by state.", labels=["state"])
    for name, count in sorted(Counter([worker.state for worker in state.workers.values()]).items()):
        workers.add_metric([name.value], count)
    yield workers


def _pools(state: State) -> Iterator[Metric]:
    usage = GaugeMetricFamily("callboard_pool_usage", "What a pool is charged.", labels=["pool", "resource"])
    limit = GaugeMetricFamily(
        "callboard_pool_limit", "What a pool may be charged, with what others may lend.", labels=["pool", "resource"]
    )
    for name, pool in sorted(state.pools.items()):
        charged = state.charged(name)
        limits = dict(pool.spec.nominal)
        for resource in dict.fromkeys([*(resource for resource, _ in charged.items()), *limits]):
            usage.add_metric([name, resource], in_units(resource, charged.get(resource)))
        for resource, nominal in limits.items():
            most = nominal + borrowable(state.pools, pool.spec, resource)
            limit.add_metric([name, resource], in_units(resource, most))
    yield usage
    yield limit


def _groups(state: State) -> Iterator[Metric]:
    groups = GaugeMetricFamily(
        "callboard_placement_groups", "Placement groups there are.", labels=["pool", "kind", "state"]
    )
    found = Counter((group.pool, group.group_kind.value, group.state.value) for group in state.groups.values())
    for labels, count in sorted(found.items()):
        groups.add_metric(labels, count)
    yield groups
    counted = {
        "reuses": "Times an existing group was used again.",
        "creations": "Groups that were asked for.",
        "hits": "Jobs that found a group.",
        "misses": "Jobs that found none.",
    }
    for field, what in counted.items():
        family = CounterMetricFamily(f"callboard_placement_group_{field}", what, labels=["pool"])
        for name, pool in sorted(state.pools.items()):
            family.add_metric([name], getattr(pool.counts, field))
        yield family


def _nodes(state: State) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("callboard_nodes", "Nodes by state.", labels=["state"])
    for name, count in sorted(counts_by_state(state).items()):
        nodes.add_metric([name], count)
    yield nodes
    gpus = GaugeMetricFamily("callboard_gpus", "Devices by what they are used for, in GPUs.", labels=["state"])
    use = state.cluster_use
    for name, part in (("used", use.used), ("held", use.held), ("free", use.free), ("quarantined", use.quarantined)):
        gpus.add_metric([name], part.gpu_milli / MILLI)
    yield gpus
    free = GaugeMetricFamily(
        "callboard_free_gpus",
        "GPUs that can be given: whole ones, and what is left of shared ones, which no whole GPU can be made of.",
        labels=["kind"],
    )
    free.add_metric(["whole"], use.free_gpus.whole)
    free.add_metric(["part"], use.free_gpus.parts_milli / MILLI)
    yield free


def in_units(resource: str, amount: int) -> float:
    """An amount as Prometheus counts: bytes as they are, everything else in whole units."""
    return float(amount) if resource in IN_BYTES else amount / MILLI
