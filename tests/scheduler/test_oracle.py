"""The core against the oracle: on small random clusters both say who can start and who must yield.

Each seed is one case. A failure shrinks its case first and prints it; ``ORACLE_SEEDS=1000:3000`` tries others.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from callboard.model.quantities import Number, Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, JobSpec, PgPoolSpec, PoolSpec, Strategy
from callboard.scheduler import Refusal
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo
from callboard.scheduler.records.pool_records import BundleRecord
from callboard.scheduler.records.states import GroupKind, JobState
from tests.scheduler import oracle
from tests.scheduler.world import World, job_spec, pool_spec

RULES = {"role": {"train": ["rollout", "reward"], "reward": ["rollout"]}}
MIN_RUNTIME_MS = 10_000
PREEMPTOR = "p"
PREEMPTORS = 4


@dataclass(frozen=True)
class Case:
    """One cluster and what is asked of it.

    Attributes:
        nodes: amounts by node; the custom resource ``slot`` and the label ``zone`` beside.
        jobs: submitted in this order; those that can't start at once are taken back.
        done: names of jobs that complete before the preemptor comes.
        cordoned: nodes that are cordoned then.
        lowered: pools whose quotas are halved then.
        cards: memory in bytes and model of each GPU, by node; empty: they are all alike, and nobody knows what.
        preemptor: comes last.
    """

    nodes: tuple[tuple[str, tuple[tuple[str, Number], ...], str], ...]
    pools: tuple[PoolSpec, ...]
    policy: tuple[tuple[str, Any], ...]
    jobs: tuple[JobSpec, ...]
    done: frozenset[str]
    cordoned: frozenset[str]
    lowered: frozenset[str]
    preemptor: JobSpec
    cards: tuple[tuple[str, tuple[tuple[int, str], ...]], ...] = ()


# ---- cases ----


def random_case(seed: int, *, cards: bool = False) -> Case:
    """A case of one of three families: no groups kept, groups kept, a cohort. Of some preemptors that could come, one
    is taken that needs victims, where there is one: whoever fits at once, or never, tells little.

    Args:
        seed: of all chance.
        cards: the GPUs are of several sizes and models, for which workers ask. Chance of its own decides about them.
    """
    choose, deal = random.Random(seed), random.Random(f"cards {seed}")
    with_cards = partial(_for_cards, deal) if cards else lambda spec: spec
    family = choose.choice(["private", "private", "groups", "groups", "cohort", "cohort"])
    nodes = tuple(_node(choose, n) for n in range(choose.randint(1, 4)))
    pools = _pools(choose, family)
    jobs = tuple(with_cards(_job(choose, family, f"j{n}")) for n in range(choose.randint(3, 14)))
    policy = {
        "enable_cross_pool": choose.random() < 0.9,
        "cross_pool_threshold_milli": choose.choice([2000, 5000]),
        "protected_pools": choose.choice([(), (), (), ("b",)]),
    }
    case = Case(
        nodes=nodes,
        pools=pools,
        policy=tuple(policy.items()),
        jobs=jobs,
        done=frozenset(job.name for job in jobs if choose.random() < 0.15),
        cordoned=frozenset(name for name, _, _ in nodes if choose.random() < 0.05),
        lowered=frozenset(pool.name for pool in pools if choose.random() < 0.1),
        preemptor=with_cards(_preemptor(choose, family)),
        cards=tuple((name, _cards(deal, dict(amounts)["gpu"])) for name, amounts, _ in nodes) if cards else (),
    )
    cluster = facts(built(case))
    for _ in range(PREEMPTORS):
        model = oracle.Model(cluster, asked(case.preemptor))
        if not model.fits() and model.lowest_level() is not None:
            break
        case = replace(case, preemptor=with_cards(_preemptor(choose, family)))
    return case


def _cards(deal: random.Random, count: Number) -> tuple[tuple[int, str], ...]:
    return tuple((deal.choice([16, 40]) << 30, deal.choice(["V100", "A100"])) for _ in range(int(count)))


def _for_cards(deal: random.Random, spec: JobSpec) -> JobSpec:
    """A job some of whose workers ask for memory of their GPUs, or for certain ones."""

    def choosing(component: ComponentSpec) -> ComponentSpec:
        ask = component.resources
        if not ask.gpu_milli:
            return component
        each = deal.choice([0, 0, 0, 4, 8, 16, 24]) << 30
        model, least = deal.choice([("", 0), ("", 0), ("", 0), ("", 0), ("A100", 0), ("V100", 0), ("", 40)])
        chosen = replace(
            ask,
            gpu_memory_bytes=each * max(1, ask.gpu_milli // 1000),
            gpu_model=model,
            gpu_memory_min_bytes=least << 30,
        )
        return replace(component, resources=chosen)

    return replace(spec, components=tuple(choosing(component) for component in spec.components))


def _preemptor(choose: random.Random, family: str) -> JobSpec:
    return replace(
        _job(choose, family, PREEMPTOR),
        priority_milli=choose.choice([3000, 6000, 8000, 9000]),
        preemptible=True,
        min_runtime_ms=0,
        wait_for_nodes_ms=10**9,
    )


def _node(choose: random.Random, n: int) -> tuple[str, tuple[tuple[str, Number], ...], str]:
    amounts: dict[str, Number] = {"cpu": choose.choice([2, 4, 8]), "memory": "8GiB", "gpu": choose.randint(0, 4)}
    if choose.random() < 0.3:
        amounts["slot"] = choose.randint(1, 2)
    return f"n{n}", tuple(amounts.items()), choose.choice(["x", "x", "y"])


def _pools(choose: random.Random, family: str) -> tuple[PoolSpec, ...]:
    def quota() -> dict[str, Number]:
        quota: dict[str, Number] = {}
        if choose.random() < 0.6:
            quota["gpu"] = choose.randint(2, 10)
        if choose.random() < 0.2:
            quota["cpu"] = choose.randint(4, 16)
        return quota

    if family == "cohort":
        pools = [pool_spec(name, gpu=choose.randint(0, 4)) for name in ("a", "b")]
        pools = [
            replace(
                spec,
                cohort="team",
                lend_limit=choose.choice([(), (), (("gpu", 1000),)]),
                borrow_limit=choose.choice([(), (), (("gpu", 2000),)]),
            )
            for spec in pools
        ]
        return (*pools, pool_spec("c", pg_pool=NO_PG_POOL, **quota()))
    if family == "groups":
        shape = Resources.parse({"cpu": 1, "gpu": 1})
        kept = PgPoolSpec(
            reserved=(shape,) * choose.choice([0, 1, 2]),
            max_dynamic=choose.choice([1, 2, 3, 20]),
            reserved_lendable=choose.random() < 0.6,
        )
        return tuple(pool_spec(name, pg_pool=pg_pool, **quota()) for name, pg_pool in (("a", kept), ("b", NO_PG_POOL)))
    return tuple(pool_spec(name, pg_pool=NO_PG_POOL, **quota()) for name in ("a", "b"))


def _job(choose: random.Random, family: str, name: str) -> JobSpec:
    pools = ["a", "a", "b", "c"] if family == "cohort" else ["a", "a", "b"]
    pool = choose.choice(pools)
    other = choose.choice(pools) if choose.random() < 0.6 else pool
    comes = name == PREEMPTOR
    kinds = choose.choice([1, 1, 2, 2, 3] if comes else [1, 1, 1, 1, 1, 1, 2])
    components = []
    for kind in range(kinds):
        amounts: dict[str, Number] = {}
        gpu = choose.choice([0, 1, 1, 1, 1, 2, 0.3, 0.4, 0.5, 0.6])
        if gpu:
            amounts["gpu"] = gpu
        if not gpu or choose.random() < 0.3:
            amounts["cpu"] = choose.choice([0.5, 1, 1, 2])
        if choose.random() < 0.08:
            amounts["slot"] = 1
        count = choose.choice([1, 1, 2, 2, 3] if comes else [1, 1, 1, 1, 1, 2])
        components.append(
            ComponentSpec(
                name=f"c{kind}",
                actor="a:B",
                min_workers=count,
                max_workers=count,
                resources=Resources.parse(amounts),
                pool=other if kind else "",
            )
        )
    return job_spec(
        name,
        pool=pool,
        priority=choose.choice([1, 1, 2, 3, 5, 7.5, 7.5, 9]),
        labels=choose.choice([{}, {"role": "train"}, {"role": "reward"}, {"role": "rollout"}]),
        components=components,
        placement=choose.choice([Strategy.PACK, Strategy.PACK, *Strategy]),
        preemptible=choose.random() < 0.9,
        min_runtime_ms=choose.choice([0, 0, 0, MIN_RUNTIME_MS]),
        node_selector=choose.choice([(), (), (), (("zone", "x"),)]),
        never_preempts=not comes,
    )


def built(case: Case) -> World:
    """The world before the preemptor comes: whatever was submitted runs or is gone."""
    world = World()
    cards = dict(case.cards)
    for name, amounts, zone in case.nodes:
        has, fields = dict(amounts), {}
        if cards:
            has["gpu_memory"] = sum(memory for memory, _ in cards[name])
            fields["devices"] = tuple(
                DeviceInfo(str(i), model=f"NVIDIA {model}", memory_bytes=memory)
                for i, (memory, model) in enumerate(cards[name])
            )
        world.join(name, has, labels=(("zone", zone),), **fields)
    world.policy(RULES, **dict(case.policy))
    for pool in case.pools:
        world.pool(pool)
    for n, spec in enumerate(case.jobs):
        if n == len(case.jobs) // 2:
            world.tick(MIN_RUNTIME_MS)  # so that some are past their minimal runtime
        world.tick(n * 37 % 100)  # so that they lose unlike work
        try:
            world.submit(spec)
        except Refusal:
            continue
        if world.status(spec.name) is not JobState.RUNNING:
            world.cancel(spec.name)
    for name in sorted(case.done):
        if world.state.live_job_named(name):
            world.complete(name)
    for name in sorted(case.cordoned):
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id=name, cordoned=True))
    for name in sorted(case.lowered):
        pool = world.state.pools[name].spec
        halved = tuple((resource, amount // 2 // 1000 * 1000) for resource, amount in pool.nominal)
        world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(pool, nominal=halved)))
    world.hold_stops_of(*(spec.name for spec in case.jobs))
    return world


# ---- the same, in the oracle's words ----


def facts(world: World) -> oracle.Cluster:
    """What there is, for the oracle."""
    state = world.state
    policy = state.meta.policy
    running = [state.jobs[uid] for uid in state.jobs_by_state[JobState.RUNNING]]
    pools = {}
    for name, record in state.pools.items():
        spec = record.spec
        pools[name] = oracle.Pool(
            name=name,
            nominal=dict(spec.nominal),
            cohort=spec.cohort,
            borrow_limit=dict(spec.borrow_limit),
            lend_limit=dict(spec.lend_limit),
            protected=spec.protected or name in policy.protected_pools,
            max_dynamic=spec.pg_pool.max_dynamic if spec.pg_pool.enable else None,
            reserved_from=spec.pg_pool.reserved_min_priority_milli,
            lendable=spec.pg_pool.reserved_lendable,
        )
    return oracle.Cluster(
        nodes=tuple(
            oracle.Node(
                name=node.node_id,
                capacity=dict(node.capacity.items()),
                devices=len(node.devices),
                labels=dict(node.labels),
                usable=node.usable,
                cards=tuple((device.memory_bytes, device.model) for device in node.devices)
                if node.capacity.gpu_memory_bytes
                else (),
            )
            for node in state.nodes.values()
        ),
        pools=pools,
        running=tuple(_running(world, job.uid) for job in running),
        reserved=tuple(
            oracle.Reserved(
                pool=group.pool,
                piece=_piece(bundle),
                holder=next((state.jobs[w.job].name for w in state.workers_in(group.group_id)), ""),
            )
            for group in state.groups.values()
            if group.group_kind is GroupKind.RESERVED
            for bundle in group.bundles
        ),
        policy=oracle.Policy(
            beats=RULES,
            cross_pool=policy.enable_cross_pool,
            cross_pool_gap=policy.cross_pool_threshold_milli,
        ),
    )


def asked(spec: JobSpec) -> oracle.Job:
    """A job that wants to start."""
    return oracle.Job(
        name=spec.name,
        pool=spec.pool,
        priority=spec.priority_milli,
        workers=tuple(
            oracle.Worker(
                pool=component.pool or spec.pool,
                ask=dict(component.resources.items()),
                model=component.resources.gpu_model,
                least_memory=component.resources.gpu_memory_min_bytes,
            )
            for component in spec.components
            for _ in range(component.min_workers)
        ),
        labels=dict(spec.labels),
        preemptible=spec.preemptible,
        strategy=spec.placement.value,
        selector=dict(spec.node_selector),
    )


def _running(world: World, uid: str) -> oracle.Job:
    state = world.state
    job, spec = state.jobs[uid], state.specs[uid].spec
    held = [state.groups[group_id] for group_id in job.groups]
    own = [group for group in held if group.group_kind is not GroupKind.RESERVED]
    return replace(
        asked(spec),
        young=world.now_ms + 1 < job.running_ms + spec.min_runtime_ms,  # a submission takes a millisecond
        lost_ms=world.now_ms + 1 - job.running_ms,
        pieces=tuple(_piece(bundle) for group in own for bundle in group.bundles),
        dynamic=Counter(group.pool for group in held if group.group_kind is GroupKind.DYNAMIC),
    )


def _piece(bundle: BundleRecord) -> oracle.Piece:
    devices = {share.index: share.milli for share in bundle.devices}
    return oracle.Piece(node=bundle.node_id, amounts=dict(bundle.resources.items()), devices=devices)


# ---- who is right? ----


def disagreement(case: Case) -> str:
    """How the core and the oracle differ about a case; empty if they don't."""
    world = built(case)
    cluster = facts(world)
    model = oracle.Model(cluster, asked(case.preemptor))
    before = len(world.preempted())
    try:
        world.submit(case.preemptor)
    except Refusal as refusal:
        return f"refused ({refusal}), but it fits" if model.fits() else ""
    victims = [victim for victim, _ in world.preempted()[before:]]
    starts = world.status(PREEMPTOR) is JobState.RUNNING
    fits = model.fits()
    if fits or starts:
        if victims:
            return f"{victims} yield, although it fits without"
        return "" if fits and starts else f"the core starts it: {starts}, it fits: {fits}"
    if not victims:
        return _wrongly_blocked(world, cluster, model)
    return _wrong_victims(cluster, model, victims)


def _wrongly_blocked(world: World, cluster: oracle.Cluster, model: oracle.Model) -> str:
    """Nobody yields: then no set of jobs that must yield lets it start (PC-02, PC-04)."""
    if world.job(PREEMPTOR).nominated:
        return "it is nominated, and nobody is on the way out"
    helpful = next((found for found in model.sets() if _is_owed(cluster, model, found)), None)
    return "" if helpful is None else f"nobody yields, although it would start without {sorted(helpful)}"


def _wrong_victims(cluster: oracle.Cluster, model: oracle.Model, victims: list[str]) -> str:
    unwilling = [victim for victim in victims if not model.rules[victim]]
    if unwilling:
        return f"{unwilling} need not yield"
    if not model.fits(victims):
        return f"{victims} yield in vain"
    spare = [victim for victim in victims if model.fits([other for other in victims if other != victim])]
    if spare:
        return f"of {victims}, {spare} yield needlessly"
    priority = {job.name: job.priority for job in cluster.running}
    top = max(priority[victim] for victim in victims)
    lowest = model.lowest_level()
    if lowest != top:
        return f"{victims} yield up to priority {top}, {lowest} would do"
    if not _is_owed(cluster, model, set(victims)):
        return f"{victims} give back more than was lent"
    least, taken = model.least(top), model.taken(victims)
    return "" if taken == least else f"{victims} lose {taken}, {least} would do"


def _is_owed(cluster: oracle.Cluster, model: oracle.Model, victims: set[str]) -> bool:
    return oracle.owed(cluster, [victim for victim in victims if model.rules[victim] == "reclaim"])


def shrunk(case: Case) -> Case:
    """The case with everything left out that the disagreement doesn't need."""
    while True:
        for smaller in _smaller(case):
            try:
                differs = disagreement(smaller)
            except Exception:  # noqa: BLE001 - a smaller case may be none at all
                continue
            if differs:
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    for i in range(len(case.jobs)):
        yield replace(case, jobs=case.jobs[:i] + case.jobs[i + 1 :])
    for i in range(len(case.nodes)):
        yield replace(case, nodes=case.nodes[:i] + case.nodes[i + 1 :])
    for name in sorted(case.done):
        yield replace(case, done=case.done - {name})
    for name in sorted(case.cordoned):
        yield replace(case, cordoned=case.cordoned - {name})
    for name in sorted(case.lowered):
        yield replace(case, lowered=case.lowered - {name})
    for i, pool in enumerate(case.pools):
        for fields in ({"nominal": ()}, {"cohort": ""}, {"pg_pool": replace(pool.pg_pool, reserved=())}):
            smaller = replace(pool, **fields)
            if smaller != pool:
                yield replace(case, pools=(*case.pools[:i], smaller, *case.pools[i + 1 :]))
    for i, job in enumerate(case.jobs):
        for spec in _smaller_job(job):
            yield replace(case, jobs=(*case.jobs[:i], spec, *case.jobs[i + 1 :]))
    for spec in _smaller_job(case.preemptor):
        yield replace(case, preemptor=spec)


def _smaller_job(spec: JobSpec) -> Iterator[JobSpec]:
    for i, component in enumerate(spec.components):
        rest = spec.components[:i] + spec.components[i + 1 :]
        if rest:
            yield replace(spec, components=rest)
        if component.min_workers > 1:
            fewer = replace(component, min_workers=component.min_workers - 1, max_workers=component.min_workers - 1)
            yield replace(spec, components=(*spec.components[:i], fewer, *spec.components[i + 1 :]))
        if component.resources.gpu_milli and component.resources.cpu_milli:
            lean = replace(component, resources=replace(component.resources, cpu_milli=0))
            yield replace(spec, components=(*spec.components[:i], lean, *spec.components[i + 1 :]))
    for fields in ({"placement": Strategy.PACK}, {"node_selector": ()}, {"labels": ()}, {"min_runtime_ms": 0}):
        smaller = replace(spec, **fields)
        if smaller != spec:
            yield smaller


def told(case: Case) -> str:
    """A case for people."""
    lines = [f"node {name} {dict(amounts)} zone={zone}" for name, amounts, zone in case.nodes]
    lines += [f"pool {_told_pool(pool)}" for pool in case.pools]
    lines.append(f"policy {dict(case.policy)}")
    for spec in (*case.jobs, case.preemptor):
        parts = ", ".join(
            f"{c.min_workers}×{dict(c.resources.items())}{f' in {c.pool}' if c.pool else ''}" for c in spec.components
        )
        lines.append(
            f"job {spec.name} pool={spec.pool} priority={spec.priority_milli} {spec.placement} {dict(spec.labels)} "
            f"selector={dict(spec.node_selector)} preemptible={spec.preemptible} young={spec.min_runtime_ms}: {parts}"
        )
    lines.append(
        f"cards {[(name, [(size >> 30, model) for size, model in found]) for name, found in case.cards]}; "
        f"then done {sorted(case.done)}, cordoned {sorted(case.cordoned)}, quotas halved {sorted(case.lowered)}"
    )
    return "\n".join(lines)


def seeds() -> range:
    """The seeds to try."""
    first, last = os.environ.get("ORACLE_SEEDS", "0:160").split(":")
    return range(int(first), int(last))


@pytest.mark.parametrize("block", range(4))
def test_the_core_and_the_oracle_agree(block: int) -> None:
    for seed in seeds()[block::4]:
        case = random_case(seed, cards=seed % 3 == 2)
        if disagreement(case):
            small = shrunk(case)
            raise AssertionError(f"seed {seed}: {disagreement(small)}\n{told(small)}")


def _told_pool(pool: PoolSpec) -> str:
    parts = [pool.name, *(f"{name}={amount}" for name, amount in pool.nominal)]
    if pool.cohort:
        parts.append(f"cohort={pool.cohort} borrow={pool.borrow_limit} lend={pool.lend_limit}")
    kept = pool.pg_pool
    if kept.enable:
        parts.append(f"reserved={len(kept.reserved)} max_dynamic={kept.max_dynamic} lendable={kept.reserved_lendable}")
    return " ".join(parts)


def test_shares_that_fit_by_another_packing_than_best_fit_start() -> None:
    world = World({"n1": 2})
    world.pool()
    components = [
        ComponentSpec(name=name, actor="a:B", min_workers=n, max_workers=n, resources=Resources.parse({"gpu": gpu}))
        for name, n, gpu in (("x", 2, 0.4), ("y", 4, 0.3))
    ]
    spec = job_spec("j", components=components)
    assert oracle.Model(facts(world), asked(spec)).fits()
    world.submit(spec)
    assert world.status("j") is JobState.RUNNING


def test_an_odd_job_does_not_stop_the_scheduler() -> None:
    """Twelve different workers and eleven free GPUs: 11! orders, if one tried them all."""
    world = World({f"n{n}": 1 for n in range(12)})
    world.pool()
    world.submit("one", preemptible=False)
    components = [
        ComponentSpec(name=f"c{n}", actor="a:B", resources=Resources.parse({"gpu": 1, "cpu": f"{1000 + n}m"}))
        for n in range(12)
    ]
    for n in range(12):  # no two nodes are alike
        world.submit(f"cpu{n}", ask={"cpu": f"{n + 1}m"}, node_selector=(("node", f"n{n}"),))
    started = time.process_time()
    world.submit(job_spec("odd", components=components))
    assert world.status("odd") is JobState.PENDING
    assert time.process_time() - started < 20
