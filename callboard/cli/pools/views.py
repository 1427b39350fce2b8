"""Pools and placement groups on the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from callboard.cli.show import tables, words
from callboard.cli.show.plain import short_enum
from callboard.v1.placement_group_pb2 import PlacementGroup, PlacementGroupKind, PlacementGroupState
from callboard.v1.pool_pb2 import PlacementGroupPoolStats, Pool, StopPolicy


def pool_table(pools: Sequence[Pool], *, wide: bool) -> Table:
    """A row per pool: used of nominal, per resource."""
    columns = ["NAME", "CPU", "GPU", "MEMORY", "RUNNING", "WAITING", "PLACEMENT GROUPS"]
    if wide:
        columns += ["ETAG", "REVISION"]
    rows: list[list[RenderableType]] = []
    for pool in pools:
        row: list[RenderableType] = [
            pool.name.removeprefix("pools/"),
            quota(pool, "cpu"),
            quota(pool, "gpu"),
            quota(pool, "memory"),
            str(pool.active_jobs),
            str(pool.pending_jobs),
            groups_in_short(pool.pg_stats),
        ]
        rows.append([*row, pool.etag, str(pool.revision)] if wide else row)
    return tables.table(columns, rows, right=("RUNNING", "WAITING", "REVISION"))


def pool_view(pool: Pool, *, wide: bool) -> Group:
    stats = pool.pg_stats
    removals = ", ".join(
        f"{count} {reason.lower().replace('_', ' ')}" for reason, count in sorted(stats.removals.items())
    )
    found: list[tuple[str, RenderableType]] = [
        ("Pool", pool.name.removeprefix("pools/")),
        ("Quota", words.limits(pool.spec.nominal, pool.spec.limited)),
        ("Used", words.amounts(pool.used)),
        ("Promised to jobs about to start", words.amounts(pool.nominated)),
        ("Left", words.limits(pool.available, pool.spec.limited)),
        ("Above the quota", words.amounts(pool.over)),
        ("Jobs", f"{pool.active_jobs} running, {pool.pending_jobs} waiting"),
        ("Cohort", pool.spec.cohort),
        ("May borrow at most", words.limits(pool.spec.borrow_limit, pool.spec.borrow_limited)),
        ("Lends at most", words.limits(pool.spec.lend_limit, pool.spec.lend_limited)),
        ("Takes jobs", _stopped(pool)),
        ("Exec", "" if pool.spec.exec or not pool.spec.HasField("exec") else "no programs beside its workers"),
        ("Protected", "nobody outside may preempt here" if pool.spec.protected else ""),
        ("Members", ", ".join(pool.spec.members)),
        ("Labels", words.labels(pool.spec.labels)),
        ("Placement groups", groups_in_short(stats)),
        ("  made / used again", f"{stats.creations} / {stats.reuses}"),
        ("  removed", removals),
    ]
    if wide:
        found += [("Etag", pool.etag), ("Revision", str(pool.revision))]
    return Group(tables.facts([pair for pair in found if pair[1] not in ("", "nothing")]))


def _stopped(pool: Pool) -> str:
    """Why a pool takes no new jobs; empty: it does."""
    if pool.deleting:
        return "no, it is being deleted"
    policy = short_enum(StopPolicy.DESCRIPTOR, pool.spec.stop_policy)
    return f"no, its stop policy is {policy}" if policy in ("HOLD", "HOLD_AND_DRAIN") else ""


def group_table(groups: Sequence[PlacementGroup], *, wide: bool) -> Table:
    columns = ["POOL", "KIND", "STATE", "SIZE", "WHERE", "USED BY", "USES"]
    if wide:
        columns = ["ID", *columns, "RAY ID", "REVISION"]
    rows: list[list[RenderableType]] = []
    for group in groups:
        row: list[RenderableType] = [
            group.pool,
            short_enum(PlacementGroupKind.DESCRIPTOR, group.kind).lower(),
            tables.state_text(short_enum(PlacementGroupState.DESCRIPTOR, group.state)),
            size(group),
            words.places(group.bundles),
            user(group),
            str(group.uses),
        ]
        if wide:
            row = [group.name.removeprefix("placementGroups/"), *row]
            row += [group.ray_placement_group_id, str(group.revision)]
        rows.append(row)
    return tables.table(columns, rows, right=("USES", "REVISION"))


def group_view(group: PlacementGroup, *, wide: bool) -> Group:
    found: list[tuple[str, RenderableType]] = [
        ("Pool", group.pool),
        ("Kind", short_enum(PlacementGroupKind.DESCRIPTOR, group.kind).lower()),
        ("State", tables.state_text(short_enum(PlacementGroupState.DESCRIPTOR, group.state))),
        ("Why", group.state_reason),
        ("Used by", user(group)),
        ("Idle for", words.age(group.idle_since) if group.HasField("idle_since") else ""),
        ("Uses so far", str(group.uses)),
        ("Made", f"{words.age(group.create_time)} ago"),
    ]
    if wide:
        found[:0] = [("Placement group", group.name.removeprefix("placementGroups/"))]
        found += [("Ray id", group.ray_placement_group_id), ("Revision", str(group.revision))]
    bundles = [
        [str(place), bundle.node_id, words.amounts(bundle.resources), words.devices(bundle.devices) or "none"]
        for place, bundle in enumerate(group.bundles)
    ]
    return Group(
        tables.facts(pair for pair in found if pair[1]),
        "",
        tables.table(["BUNDLE", "NODE", "BOOKS", "GPUS"], bundles, right=("BUNDLE",)),
    )


def size(group: PlacementGroup) -> str:
    """ "2 × (1 CPU, 1 GPU)": its bundles, equal ones together."""
    counted = Counter(words.amounts(bundle.resources) for bundle in group.bundles)
    return " + ".join(f"{count} × ({amounts})" if count > 1 else amounts for amounts, count in counted.items())


def user(group: PlacementGroup) -> str:
    """Who uses a group: a job, one it is promised to, or nobody."""
    if group.job:
        return group.job
    return f"promised to {group.nominee}" if group.nominee else "idle"


def quota(pool: Pool, resource: str) -> str:
    """ "4.5 of 6" used of the quota; "1 (no quota)" where it is not limited."""
    used = words.amount(pool.used, resource)
    if resource not in pool.spec.limited:
        return f"{used} (no quota)"
    return f"{used} of {words.amount(pool.spec.nominal, resource)}"


def groups_in_short(stats: PlacementGroupPoolStats) -> str:
    """ "2 reserved (1 idle), 2 dynamic"; those of a pool that keeps none are private to their jobs."""
    kinds = [
        (stats.reserved, "reserved", stats.reserved_idle),
        (stats.dynamic, "dynamic", stats.dynamic_idle),
        (stats.total - stats.reserved - stats.dynamic, "private", 0),
    ]
    shown = [f"{count} {kind}" + (f" ({idle} idle)" if idle else "") for count, kind, idle in kinds if count]
    return ", ".join(shown) or "none"
