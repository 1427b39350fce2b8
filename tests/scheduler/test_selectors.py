"""Do jobs whose pools use different nodes start whenever they could? Every assignment is tried by brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, Labels, PgPoolSpec, Strategy, WorkerPlace
from callboard.scheduler import Refusal
from callboard.scheduler.records.refusals import RefusalCode
from callboard.scheduler.records.states import JobState
from tests.scheduler.world import World, job_spec, pool_spec

LABELS = (("disk", "ssd"), ("zone", "x"))
SELECTORS: Sequence[Labels] = ((), (LABELS[0],), (LABELS[1],), LABELS)


def case(seed: int) -> tuple[dict[str, tuple[int, Labels]], dict[str, Labels], JobSpec]:
    """Nodes with devices and labels, pools with selectors, and a job with a component in each pool."""
    choose = random.Random(seed)
    nodes = {
        f"n{n}": (choose.choice([1, 1, 2, 3]), choose.choice([*SELECTORS, *SELECTORS[1:]]))
        for n in range(choose.choice([2, 3, 4]))
    }
    pools = {f"p{n}": choose.choice(SELECTORS) for n in range(choose.choice([2, 3]))}
    components = []
    for pool in pools:
        workers = choose.choice([1, 1, 2])
        components.append(
            ComponentSpec(
                name=f"in-{pool}",
                actor="a:B",
                min_workers=workers,
                max_workers=workers,
                resources=Resources.parse({"gpu": choose.choice([1, 1, 1, 2])}),
                pool=pool,
            )
        )
    placement = choose.choice([Strategy.PACK, Strategy.PACK, *Strategy])
    return nodes, pools, job_spec("job", pool="p0", components=tuple(components), placement=placement)


def could_start(nodes: dict[str, tuple[int, Labels]], pools: dict[str, Labels], spec: JobSpec) -> bool:
    """Whether some assignment of workers to nodes keeps every label, device and strategy."""
    workers = [(c.resources.gpu_milli // 1000, pools[c.pool]) for c in spec.components for _ in range(c.min_workers)]
    for chosen in product(nodes, repeat=len(workers)):
        used: Counter[str] = Counter()
        for (gpus, selector), node_id in zip(workers, chosen, strict=True):
            used[node_id] += gpus
            if not set(selector) <= set(nodes[node_id][1]):
                break
        else:
            apart = len(set(chosen)) == len(chosen)
            together = len(set(chosen)) == 1
            if all(count <= nodes[node_id][0] for node_id, count in used.items()) and (
                (spec.placement is not Strategy.STRICT_SPREAD or apart)
                and (spec.placement is not Strategy.STRICT_PACK or together)
            ):
                return True
    return False


@pytest.mark.parametrize("block", range(2))
def test_a_job_in_pools_with_different_nodes_starts_exactly_when_it_could(block: int) -> None:
    verdicts: Counter[bool] = Counter()
    for seed in range(block * 250, block * 250 + 250):
        nodes, pools, spec = case(seed)
        expected = could_start(nodes, pools, spec)
        verdicts[expected] += 1
        assert starts(nodes, pools, spec) == expected, (
            f"seed {seed}: {nodes} {pools} {spec.placement} {spec.components}"
        )
    assert min(verdicts.values()) > 20, f"both answers are tried: {verdicts}"


def test_what_its_workers_prefer_never_decides_whether_it_starts() -> None:
    for seed in range(2000, 2120):
        nodes, pools, spec = case(seed)
        choose = random.Random(seed)
        softer = tuple(
            replace(component, node_selector=choose.choice(SELECTORS), node_selector_soft=True)
            for component in spec.components
        )
        expected = could_start(nodes, pools, spec)
        assert starts(nodes, pools, replace(spec, components=softer)) == expected, f"seed {seed}: {nodes} {softer}"


def starts(nodes: dict[str, tuple[int, Labels]], pools: dict[str, Labels], spec: JobSpec) -> bool:
    world = World()
    for node_id, (gpus, labels) in nodes.items():
        world.join(node_id, gpus, labels=labels)
    for name, selector in pools.items():
        world.pool(replace(pool_spec(name), node_selector=selector))
    try:
        world.submit(spec)
    except Refusal:
        return False
    return world.job("job").state is not JobState.PENDING


def python_spec(name: str, path: str, **fields: Any) -> JobSpec:
    worker = ComponentSpec(
        name="w", actor="m:C", resources=Resources.parse({"gpu": 1}), interpreter=path, **fields.pop("component", {})
    )
    return job_spec(name, components=[worker], **fields)


def test_ft_e1_a_worker_goes_where_its_interpreter_is_allowed() -> None:
    world = World()
    world.join("n1", 2, interpreters=("/usr/bin/python",))
    world.join("n2", 2, interpreters=("/usr/bin/python", "/opt/py"))
    world.pool(gpu=4)
    for name in ("a", "b"):
        world.submit(python_spec(name, "/opt/py"))
        assert [worker.node_id for worker in world.workers(name)] == ["n2"]
    world.submit(python_spec("c", "/opt/py"))
    assert world.status("c") is JobState.PENDING
    reasons = {reason.subject: reason.code for reason in world.explain("c").reasons}
    assert reasons["nodes/n1"] == "INTERPRETER_NOT_ALLOWED"


@pytest.mark.parametrize("placed", [False, True])
def test_ft_e1_an_interpreter_that_no_node_allows_is_refused(placed: bool) -> None:
    world = World()
    world.join("n1", 2, interpreters=("/usr/bin/python",))
    world.pool(gpu=4)
    component = {"places": (WorkerPlace(node_id="n1", devices=((0, 1000),)),)} if placed else {}
    with pytest.raises(Refusal) as refused:
        world.submit(python_spec("a", "/opt/py", component=component))
    assert refused.value.code is RefusalCode.UNSCHEDULABLE
    assert any(reason.code == "INTERPRETER_NOT_ALLOWED" for reason in refused.value.reasons)
    assert any("--interpreter /opt/py" in change for change in refused.value.unblock)
    world.submit(python_spec("a", "/opt/py", component=component, wait_for_nodes_ms=60_000))
    assert world.status("a") is JobState.PENDING
    world.lose("n1")
    world.join("n1", 2, instance="again", interpreters=("/usr/bin/python", "/opt/py"))
    assert world.status("a") is JobState.RUNNING


def spread_job(name: str, of_rollout: Strategy | None, job: Strategy, **fields: Any) -> JobSpec:
    """Two trainers with two GPUs each, and two rollouts with one."""
    components = [
        ComponentSpec(
            name=role,
            actor="m:C",
            min_workers=2,
            max_workers=2,
            resources=Resources.parse({"gpu": gpus}),
            placement=own,
        )
        for role, gpus, own in (("train", 2, None), ("rollout", 1, of_rollout))
    ]
    return job_spec(name, components=components, placement=job, **fields)


def nodes_of(world: World, name: str, component: str) -> list[str]:
    return [worker.node_id for worker in world.workers(name) if worker.component == component]


@pytest.mark.parametrize(
    ("own", "job", "trainers", "rollouts"),
    [
        (None, Strategy.PACK, 1, 1),
        (Strategy.SPREAD, Strategy.PACK, 1, 2),
        (Strategy.STRICT_SPREAD, Strategy.STRICT_PACK, 1, 2),
        (Strategy.STRICT_PACK, Strategy.STRICT_SPREAD, 2, 1),
        (Strategy.PACK, Strategy.SPREAD, 2, 1),
    ],
)
def test_ft_e2_a_component_has_a_strategy_of_its_own(
    own: Strategy | None, job: Strategy, trainers: int, rollouts: int
) -> None:
    world = World({"n1": 6, "n2": 6})
    world.pool(gpu=12)
    world.submit(spread_job("a", own, job))
    assert world.status("a") is JobState.RUNNING
    assert len(set(nodes_of(world, "a", "train"))) == trainers
    assert len(set(nodes_of(world, "a", "rollout"))) == rollouts


def test_ft_e2_a_strict_strategy_of_a_component_is_kept_or_named() -> None:
    world = World({"n1": 6})
    world.pool(gpu=12)
    with pytest.raises(Refusal) as refused:
        world.submit(spread_job("a", Strategy.STRICT_SPREAD, Strategy.PACK))
    assert "ONE_EACH" in {reason.code for reason in refused.value.reasons}
    assert refused.value.unblock == ("add a node, with 1 GPU free",)
    world.join("n2", 1)
    world.submit(spread_job("a", Strategy.STRICT_SPREAD, Strategy.PACK))
    assert sorted(nodes_of(world, "a", "rollout")) == ["n1", "n2"]
    assert nodes_of(world, "a", "train") == ["n1", "n1"]


def test_ft_e2_extra_workers_keep_the_strategy_of_their_component() -> None:
    world = World({"n1": 4, "n2": 1})
    world.pool(gpu=12)
    spread = ComponentSpec(
        name="w",
        actor="m:C",
        min_workers=1,
        max_workers=4,
        resources=Resources.parse({"gpu": 1}),
        placement=Strategy.STRICT_SPREAD,
    )
    world.submit(job_spec("a", components=[spread]))
    assert sorted(nodes_of(world, "a", "w")) == ["n1", "n2"]
    world.join("n3", 1)
    assert sorted(nodes_of(world, "a", "w")) == ["n1", "n2", "n3"]


def test_ft_e2_a_kept_group_is_used_where_it_suits_the_strategy_of_a_component() -> None:
    world = World({"n1": 6, "n2": 6})
    world.pool(pool_spec("pool", pg_pool=PgPoolSpec(enable=True), gpu=12))
    world.submit(spread_job("a", None, Strategy.PACK))
    world.complete("a")
    (group,) = world.state.groups.values()
    world.submit(spread_job("b", None, Strategy.PACK))
    assert {worker.group_id for worker in world.workers("b")} == {group.group_id}
    world.complete("b")
    world.submit(spread_job("c", Strategy.STRICT_SPREAD, Strategy.PACK))
    assert len(set(nodes_of(world, "c", "rollout"))) == 2


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_ft_e2_extra_workers_pass_by_the_nodes_that_their_strategy_closes(own: bool, kept: bool) -> None:
    """The node that would be chosen by itself is one where they may not go."""
    for strategy in (Strategy.STRICT_SPREAD, Strategy.STRICT_PACK):
        world = World({"n1": 3, "n2": 4})
        world.pool(pool_spec("pool", pg_pool=PgPoolSpec(enable=kept)))
        parts = [
            ComponentSpec(
                name="w",
                actor="m:C",
                min_workers=1,
                max_workers=2,
                resources=Resources.parse({"gpu": 1}),
                placement=strategy if own else None,
            ),
        ]
        if strategy is Strategy.STRICT_PACK:
            world.submit(job_spec("hole", ask={"gpu": 3}))
            assert nodes_of(world, "hole", "main") == ["n1"]
        world.submit(job_spec("a", components=parts, placement=Strategy.PACK if own else strategy))
        if strategy is Strategy.STRICT_PACK:
            assert nodes_of(world, "a", "w") == ["n2", "n2"]
            (extra,) = [worker for worker in world.workers("a") if worker.extra]
            world.complete("hole")  # n1 is the smaller hole now
            world.exit("a", rank=extra.rank)
            world.tick(60_000)
            assert nodes_of(world, "a", "w") == ["n2", "n2"]
        else:
            assert sorted(nodes_of(world, "a", "w")) == ["n1", "n2"]
