"""Preemption: scenarios from public reports (PC-…), each by its id, and the rules of docs/scheduling.md."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from callboard.model.policy import Aggressiveness
from callboard.model.quantities import Resources
from callboard.model.specs import NO_PG_POOL, ComponentSpec, PgPoolSpec, PoolSpec, Strategy
from callboard.scheduler import RefusalCode, State
from callboard.scheduler.handlers import passes
from callboard.scheduler.plan import planning
from callboard.scheduler.plan.grouping import choose_groups
from callboard.scheduler.plan.planning import plan
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import JobState, StopOutcome, WorkerState
from tests.scheduler.world import World, job_spec, pool_spec


def world_of(**nodes: int) -> World:
    world = World(nodes)
    world.pool()
    return world


def test_pc01_victims_that_end_at_different_times_do_not_come_back_in_between() -> None:
    world = world_of(n1=2)
    world.submit("a", priority=1)
    world.submit("b", priority=1)
    world.hold_stops_of("a", "b")
    world.submit("h", priority=10, workers=2)
    world.tick(100)
    world.let_stop("a")
    assert world.status("a") is JobState.PENDING
    assert world.status("h") is JobState.PENDING
    world.tick(900)
    world.let_stop("b")
    assert world.status("h") is JobState.RUNNING
    assert sorted(world.preempted()) == [("a", "h"), ("b", "h")]
    assert world.status("a") is JobState.PENDING
    world.complete("h")
    assert world.status("a") is JobState.RUNNING
    assert world.status("b") is JobState.RUNNING


def test_pc02_a_job_is_evicted_once_however_often_it_comes_back() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    world.submit("high", priority=10)
    for n in range(20):
        world.submit(f"again-{n}", priority=1)
        world.tick(1000)
    assert world.preempted() == [("low", "high")]
    assert world.status("high") is JobState.RUNNING


def test_pc02_an_impossible_job_evicts_nobody() -> None:
    world = world_of(n1=3)
    world.submit("low", priority=1)
    refusal = world.refused("m", priority=10, workers=4)
    assert refusal.code == "UNSCHEDULABLE"
    world.submit("m2", priority=10, workers=4, wait_for_nodes_ms=60_000)
    world.tick(10_000)
    assert world.preempted() == []
    assert world.status("low") is JobState.RUNNING


def test_pc04_nobody_is_evicted_for_a_job_that_still_could_not_start() -> None:
    world = World({"n1": 2, "n2": 2})
    world.join("n3", 1, labels=(("zone", "b"),))
    world.pool()
    for n in range(4):
        world.submit(f"l{n}", priority=1)
    spec = job_spec("h", priority=10, ask={"gpu": 2}, node_selector=(("zone", "b"),), wait_for_nodes_ms=10**7)
    world.submit(spec)
    world.tick(5000)
    assert world.preempted() == []
    assert world.status("h") is JobState.PENDING
    account = world.explain("h")
    assert any(reason.code == "LABEL_MISMATCH" for reason in account.reasons)
    assert any(reason.code == "NODE_LACKS" and reason.subject == "nodes/n3" for reason in account.reasons)


def test_pc05_a_gang_takes_the_free_node_and_one_victim() -> None:
    world = world_of(n1=2, n2=2)
    world.submit("low", priority=1, ask={"gpu": 2})
    world.submit("h", priority=10, workers=2, ask={"gpu": 2})
    assert world.preempted() == [("low", "h")]
    assert world.status("h") is JobState.RUNNING
    assert sorted(world.devices("h")) == ["n1:0,1", "n2:0,1"]


def test_pc07_one_victim_serves_two_components() -> None:
    world = world_of(n1=2)
    world.submit("low", priority=1, ask={"gpu": 2})
    gpu = Resources.parse({"gpu": 1})
    components = [ComponentSpec(name=name, actor="a:B", resources=gpu) for name in ("actor", "rollout")]
    world.submit(job_spec("h", priority=10, components=components))
    assert world.preempted() == [("low", "h")]
    assert world.status("h") is JobState.RUNNING


def test_pc08_a_preempted_job_runs_again() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    submitted = world.job("low").submit_ms
    world.submit("high", priority=10)
    world.submit("later", priority=1)
    world.tick(1000)
    world.complete("high")
    low = world.job("low")
    assert low.state is JobState.RUNNING
    assert (low.attempt, low.submit_ms, low.restarts, low.failures) == (2, submitted, 0, ())
    assert world.status("later") is JobState.PENDING


def test_pc08_the_checkpoint_is_handed_to_the_next_attempt() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    world.checkpoints["low"] = b"step 7"
    world.submit("high", priority=10)
    world.auto = False
    world.complete("high")
    world.answer(lambda command: not isinstance(command, cmd.StartWorker))
    start = next(c for c in world.held if isinstance(c, cmd.StartWorker))
    assert start.checkpoint is not None
    assert start.checkpoint.data == b"step 7"


def test_a_checkpoint_of_a_worker_whose_node_leaves_is_handed_to_the_next_attempt() -> None:
    world = world_of(n1=1, n2=1)
    world.submit("low", priority=1)
    (worker,) = world.workers("low")
    world.auto = False
    world.send(
        ev.WorkerStopped(
            now_ms=world.now_ms,
            node_id=worker.node_id,
            generation=worker.generation,
            outcome=StopOutcome.COOPERATIVE,
            checkpoint_data=b"step 7",
        )
    )
    world.tick(60_000)
    world.answer(lambda command: not isinstance(command, cmd.StartWorker))
    start = next(c for c in world.held if isinstance(c, cmd.StartWorker))
    assert start.checkpoint is not None
    assert start.checkpoint.data == b"step 7"


def test_pc13_cancel_at_any_moment_leaves_nothing() -> None:
    for answered in range(4):
        world = world_of(n1=1)
        world.auto = False
        world.submit("a")
        for _ in range(answered):
            if world.held:
                world.reply(world.held.pop(0))
        world.cancel("a")
        world.auto = True
        world.answer()
        assert world.status("a") is JobState.CANCELLED
        world.submit("b")
        assert world.status("b") is JobState.RUNNING, f"after {answered} answers"


def test_pc14_a_name_is_free_as_soon_as_its_job_has_ended() -> None:
    world = world_of(n1=1)
    seen = set()
    for _ in range(50):
        world.submit("j")
        generation = world.workers("j")[0].generation
        assert generation not in seen
        seen.add(generation)
        world.cancel("j")
        assert world.job("j").state is JobState.CANCELLED


def test_pc14_a_name_is_free_as_soon_as_its_job_is_cancelled_and_leads_to_the_next() -> None:
    world = world_of(n1=1)
    world.hold_stops_of("j")
    uids = [world.submit("j")]
    for _ in range(20):
        world.cancel("j")
        uids.append(world.submit("j"))
        assert world.job("j").uid == uids[-1], "the name leads to the newest"
        assert world.status("j") is JobState.PENDING, "the device is the first one's until it is gone"
    refusal = world.refused("j")
    assert refusal.code is RefusalCode.ALREADY_EXISTS
    world.hold = lambda command: False
    world.answer()
    assert world.status("j") is JobState.RUNNING
    assert [world.state.jobs[uid].state for uid in uids[:-1]] == [JobState.CANCELLED] * 20


def test_pc16_a_resource_nobody_is_short_of_never_blocks() -> None:
    world = World({"n1": 4})
    world.pool(pool_spec("p1", gpu=2))
    world.pool(pool_spec("p2"))
    for n in range(4):
        world.submit(f"low{n}", pool="p2", priority=1)
    world.submit("h", pool="p1", priority=9, ask={"gpu": 1, "cpu": 1})
    assert world.status("h") is JobState.RUNNING
    world.submit("zero", pool="p1", priority=1, ask={"gpu": 0, "cpu": 1})
    assert world.status("zero") is JobState.RUNNING


def test_pc17_a_victim_that_is_gone_already_counts_as_gone() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    world.hold_stops_of("low")
    world.submit("high", priority=10)
    world.cancel("low")
    world.outcomes["low"] = StopOutcome.ALREADY_GONE
    world.let_stop("low")
    assert world.status("low") is JobState.CANCELLED
    assert world.status("high") is JobState.RUNNING


@pytest.mark.parametrize(("victim", "preemptor", "yields"), [(5, 5, False), (5, 5.9, False), (5, 6, True)])
def test_pc19_the_gap_must_reach_the_threshold_inclusive(victim: float, preemptor: float, yields: bool) -> None:
    world = world_of(n1=1)
    world.submit("low", priority=victim)
    world.submit("high", priority=preemptor)
    assert world.preempted() == ([("low", "high")] if yields else [])


def test_pc19_of_equal_victims_the_youngest_yields() -> None:
    world = world_of(n1=2)
    world.submit("old", priority=1)
    world.tick(99_000)
    world.submit("young", priority=1)
    world.tick(1_000)
    world.submit("high", priority=9)
    assert world.preempted() == [("young", "high")]


def test_pc19_a_job_never_preempts_its_own_components() -> None:
    world = world_of(n1=1)
    gpu = Resources.parse({"gpu": 1})
    components = [ComponentSpec(name=name, actor="a:B", resources=gpu) for name in ("actor", "rollout")]
    assert world.refused(job_spec("j", priority=10, components=components)).code == "UNSCHEDULABLE"


def test_pc20_what_a_victim_frees_goes_to_nobody_but_the_preemptor() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    world.hold_stops_of("low")
    world.submit("high", priority=10)
    for n in range(100):
        world.submit(f"small{n}", priority=1)
    world.let_stop("low")
    for n in range(100):
        assert world.status(f"small{n}") is JobState.PENDING
    assert world.status("high") is JobState.RUNNING


def test_a_nominee_is_overtaken_by_one_who_may_preempt_it() -> None:
    world = world_of(n1=1)
    world.submit("low", priority=1)
    world.hold_stops_of("low")
    world.submit("high", priority=5)
    world.submit("higher", priority=9)
    world.let_stop("low")
    assert world.status("higher") is JobState.RUNNING
    assert world.status("high") is JobState.PENDING
    assert world.preempted() == [("low", "high")]


def test_a_second_preemptor_waits_for_victims_that_stop_already() -> None:
    world = world_of(n1=2)
    world.submit("a", priority=1, ask={"gpu": 2})
    world.hold_stops_of("a")
    world.submit("h1", priority=9)
    world.submit("h2", priority=9)
    assert world.preempted() == [("a", "h1")]
    world.let_stop("a")
    assert world.status("h1") is JobState.RUNNING
    assert world.status("h2") is JobState.RUNNING


def test_the_lowest_level_yields_and_the_set_is_irreducible() -> None:
    world = world_of(n1=2, n2=2)
    world.submit("p1", priority=1)
    world.submit("p2", priority=2)
    world.submit("p3", priority=3, ask={"gpu": 2})
    world.submit("h", priority=9, ask={"gpu": 2})
    assert sorted(victim for victim, _ in world.preempted()) == ["p1", "p2"]


def test_ft_d1_the_victim_is_the_one_from_whom_least_is_taken_away() -> None:
    world = world_of(n1=8, n2=1)
    world.submit("big", priority=1, ask={"gpu": 8})
    world.submit("small", priority=1, workers=2, ask={"gpu": 0.5})
    world.submit("h", priority=10)
    assert world.preempted() == [("small", "h")], "the workers of small are more, what they hold is less"


def test_ft_d1_two_small_jobs_yield_rather_than_one_large() -> None:
    world = world_of(n1=8, n2=2)
    world.submit("big", priority=1, ask={"gpu": 8})
    world.tick(50)
    for n in range(2):
        world.submit(f"s{n}", priority=1)
    world.submit("h", priority=10, ask={"gpu": 2})
    assert sorted(world.preempted()) == [("s0", "h"), ("s1", "h")]


def test_ft_d1_a_limit_on_the_number_of_victims_is_kept_by_taking_more_away() -> None:
    world = world_of(n1=8, n2=2)
    world.policy(max_victims_per_round=1)
    world.submit("big", priority=1, ask={"gpu": 8})
    for n in range(2):
        world.submit(f"s{n}", priority=1)
    world.submit("h", priority=10, ask={"gpu": 2})
    assert world.preempted() == [("big", "h")]


def test_ft_d1_of_equal_devices_the_smaller_share_of_other_resources_yields() -> None:
    world = World({"n1": {"gpu": 3, "cpu": 32, "memory": "64GiB"}})
    world.pool()
    for name, ask in (("cpus", {"cpu": 16}), ("memory", {"memory": "16GiB"}), ("less", {"cpu": 4, "memory": "8GiB"})):
        world.submit(name, priority=1, ask={"gpu": 1, **ask})
        world.tick(1_000)
    for n in range(3):
        world.submit(f"h{n}", priority=10, ask={"gpu": 1})
    assert [victim for victim, _ in world.preempted()] == ["less", "memory", "cpus"]


def test_ft_d1_a_gang_goes_to_the_nodes_where_least_is_taken_away() -> None:
    world = world_of(n1=8, n2=8, n3=8, n4=8)
    for n, sizes in enumerate(([8], [4, 4], [2, 2, 4], [1, 1, 1, 5]), start=1):
        for k, size in enumerate(sizes):
            world.submit(f"j{n}{k}", priority=1, ask={"gpu": size}, node_selector=(("node", f"n{n}"),))
    world.submit("h", priority=10, workers=2, ask={"gpu": 3}, placement=Strategy.STRICT_SPREAD)
    # Three of n4 give 3 GPUs, one of n2 or n3 gives 4: nothing less gives a node of its own to each worker.
    assert sorted(victim for victim, _ in world.preempted()) in (
        ["j32", "j40", "j41", "j42"],
        ["j20", "j40", "j41", "j42"],
        ["j21", "j40", "j41", "j42"],
        ["j30", "j31", "j40", "j41", "j42"],
    )
    assert world.status("h") is JobState.RUNNING


def test_ft_d1_workers_above_the_minimum_yield_before_a_job_that_holds_more() -> None:
    world = world_of(n1=4, n2=4)
    elastic = ComponentSpec(name="c", actor="a:B", min_workers=1, max_workers=4, resources=Resources.parse({"gpu": 1}))
    world.submit("big", priority=1, ask={"gpu": 4})
    world.submit(job_spec("grown", priority=1, components=[elastic]))
    assert len(world.workers("grown")) == 4
    world.submit("h", priority=10, ask={"gpu": 3})
    assert world.preempted() == [("grown", "h")] * 3
    assert world.status("grown") is JobState.RUNNING
    assert world.status("big") is JobState.RUNNING


@pytest.mark.parametrize("seed", range(3))
def test_ft_d1_no_exchange_on_a_larger_cluster_takes_less_away(seed: int) -> None:
    """Too many for every set to be looked at: then no single node's worth of victims is cheaper."""
    choose = random.Random(seed)
    world = World({f"n{n}": 8 for n in range(12)})
    world.pool()
    for n in range(60):
        world.submit(f"j{n}", priority=1, ask={"gpu": choose.choice([1, 1, 2, 2, 3, 4])})
        world.tick(choose.randint(0, 50))
        if world.status(f"j{n}") is not JobState.RUNNING:
            world.cancel(f"j{n}")
    free = {node: 8 - world.state.node_use(node).used.gpu_milli // 1000 for node in world.state.nodes}
    needed = 6
    cheapest = min(
        sum(sizes)
        for node in world.state.nodes
        for held in [[w.resources.gpu_milli // 1000 for w in world.state.workers_on(node)]]
        for count in range(len(held) + 1)
        for sizes in itertools.combinations(held, count)
        if free[node] + sum(sizes) >= needed
    )
    world.submit("h", priority=10, ask={"gpu": needed})
    taken = [world.job(victim).uid for victim, _ in world.preempted()]
    assert sum(world.state.shapes[uid].least.gpu_milli for uid in taken) == cheapest * 1000


def test_a_label_shields_whatever_the_numbers_say() -> None:
    world = world_of(n1=1)
    world.policy({"role": {"train": ["rollout"]}})
    world.submit("train", priority=1, labels={"role": "train"})
    world.submit("rollout", priority=100, labels={"role": "rollout"})
    assert world.preempted() == []
    assert any("above" in reason.message for reason in world.explain("rollout").reasons)


def test_a_matching_label_lowers_the_gap() -> None:
    world = world_of(n1=1)
    world.policy({"role": {"train": ["rollout"]}}, aggressiveness=Aggressiveness.MEDIUM)
    world.submit("rollout", priority=5, labels={"role": "rollout"})
    world.submit("close", priority=5.4, labels={"role": "train"})
    assert world.preempted() == []
    world.submit("train", priority=5.5, labels={"role": "train"})
    assert world.preempted() == [("rollout", "train")]


def test_another_pool_yields_only_from_the_larger_gap_and_never_when_protected() -> None:
    world = World({"n1": 3})
    for pool in (pool_spec("a"), pool_spec("b"), PoolSpec(name="c", protected=True)):
        world.pool(pool)
    world.submit("b1", pool="b", priority=3)
    world.submit("c1", pool="c", priority=1)
    world.submit("b2", pool="b", priority=8)
    world.submit("a1", pool="a", priority=7.9)
    assert world.preempted() == []
    world.submit("a2", pool="a", priority=8)
    assert world.preempted() == [("b1", "a2")]


def test_not_preemptible_and_min_runtime_are_kept() -> None:
    world = world_of(n1=2)
    world.submit("fixed", priority=1, preemptible=False)
    world.submit("fresh", priority=1, min_runtime_ms=10_000)
    world.submit("high", priority=9)
    assert world.preempted() == []
    world.tick(9_000)
    assert world.preempted() == []
    world.tick(1_500)
    assert world.preempted() == [("fresh", "high")]


def test_on_preempt_cancel_ends_the_victim() -> None:
    from callboard.model.specs import OnPreempt

    world = world_of(n1=1)
    world.submit("low", priority=1, on_preempt=OnPreempt.CANCEL)
    world.submit("high", priority=9)
    assert world.status("low") is JobState.CANCELLED
    assert world.status("high") is JobState.RUNNING


def test_i6_a_stop_without_an_answer_ends_quarantined_and_its_device_is_not_used() -> None:
    world = world_of(n1=2)
    world.policy(cancel_timeout_ms=500, kill_timeout_ms=1000)
    world.submit("low", priority=1)
    world.submit("low2", priority=1)
    world.hold_stops_of("low2")
    world.submit("high", priority=9)
    assert world.status("low2") is JobState.PREEMPTING
    world.tick(60_000)
    # low2's worker could not be proved gone: high takes the next victim's device instead.
    assert world.status("low2") is JobState.PENDING
    assert [w.state for w in world.state.workers.values()].count(WorkerState.QUARANTINED) == 1
    assert world.status("high") is JobState.RUNNING
    quarantined = next(w for w in world.state.workers.values() if w.state is WorkerState.QUARANTINED)
    assert world.devices("high") != [f"n1:{quarantined.devices[0].id}"]
    assert world.state.node_use("n1").quarantined.gpu_milli == 1000
    world.let_stop("low2")
    assert world.state.node_use("n1").quarantined.gpu_milli == 0


def test_by_hand_a_job_yields_to_another_whatever_the_rules_say() -> None:
    world = world_of(n1=1)
    world.submit("a", priority=9, preemptible=False)
    world.submit("b", priority=1)
    world.submit("c", priority=1.5)
    world.send(ev.JobPreempted(now_ms=world.now_ms, uid=world.job("a").uid, for_uid=world.job("b").uid))
    assert world.status("b") is JobState.RUNNING
    assert world.status("a") is JobState.PENDING
    assert world.preempted() == [("a", "b")]
    world.complete("b")
    assert world.status("a") is JobState.RUNNING


def test_a_wave_of_preemptions_leaves_no_job_that_every_event_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted(state: State, uid: str, *rest: Any) -> Any:
        looks.append(uid)
        return plan(state, uid, *rest)

    world = World({f"n{n}": 4 for n in range(8)})
    world.pool()
    for n in range(32):
        world.submit(f"low{n}", priority=1)
    for n in range(31):
        world.submit(f"high{n}", priority=9)
    assert len(world.preempted()) == 31
    monkeypatch.setattr(passes, "plan", counted)
    # Each of them yielded to another job, so they are not alike; but none could start even if it had not.
    world.send(ev.NodeJoined(now_ms=world.now_ms, node_id="n9", instance="i", capacity=Resources(cpu_milli=64_000)))
    assert len(looks) <= 2
    world.complete("high0")
    assert world.state.jobs_by_state[JobState.PENDING].keys() < {world.job(f"low{n}").uid for n in range(32)}


@pytest.mark.parametrize("why", ["silent", "labels"])
def test_a_search_for_victims_passes_over_those_that_leave_no_room(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the nodes are silent, or are not for the job: what runs there is as cheap as what runs elsewhere."""
    tries = 0
    real = choose_groups

    def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return real(*args)

    counts = []
    for nodes in (12, 40):
        world = World(auto=True)
        for number in range(nodes):
            world.join(f"n{number:02}", 1, labels=(("half", str(2 * number // nodes)),))
        world.pool(pool_spec())
        for number in range(nodes):
            world.submit(job_spec(f"j{number}", priority=1))
        away = [node for node in world.state.nodes.values() if dict(node.labels)["half"] == "1"]
        if why == "silent":
            for node in away:
                world.send(ev.NodeSuspected(now_ms=world.now_ms, node_id=node.node_id, epoch=node.epoch))
        with monkeypatch.context() as patch:
            patch.setattr(planning, "choose_groups", counted)
            for number in range(nodes // 2):
                tries = 0
                world.submit(job_spec(f"urgent{number}", priority=50, node_selector=(("half", "0"),)))
                counts.append(tries)
        running = [world.workers(f"urgent{number}")[0].node_id for number in range(nodes // 2)]
        assert len(set(running)) == nodes // 2
        assert not {node.node_id for node in away} & set(running)
    assert max(counts) <= 12


def test_one_that_only_lacks_quota_has_those_yield_that_leave_no_room() -> None:
    world = World({"n1": 2, "n2": 2, "n3": 2})
    world.pool(pool_spec(gpu=2))
    for name in ("a", "b"):
        world.submit(job_spec(name, priority=1))
    (there,) = {worker.node_id for name in ("a", "b") for worker in world.workers(name)}
    node = world.state.nodes[there]
    world.send(ev.NodeSuspected(now_ms=world.now_ms, node_id=there, epoch=node.epoch))
    world.submit(job_spec("urgent", priority=50))
    assert world.workers("urgent")[0].node_id != there
    assert sum(world.job(name).preemptions for name in ("a", "b")) == 1


@pytest.mark.parametrize("pg_pool", [NO_PG_POOL, PgPoolSpec(enable=True, dynamic=True)], ids=["private", "dynamic"])
def test_the_one_victim_that_is_enough_is_found_behind_others(
    pg_pool: PgPoolSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return choose_groups(*args)

    world = World({f"n{number}": 2 for number in range(9)})
    world.pool(pool_spec(pg_pool=pg_pool))
    # Every node is full but the one of the job that has run longest: it would lose most, and alone leaves two GPUs.
    world.submit(job_spec("alone", priority=1))
    world.tick(60_000)
    for number in range(8):
        world.submit(job_spec(f"high{number}", priority=9, ask={"gpu": 1}, node_selector=(("node", f"n{number + 1}"),)))
        world.submit(job_spec(f"low{number}", priority=1, ask={"gpu": 1}, node_selector=(("node", f"n{number + 1}"),)))
    assert world.workers("alone")[0].node_id == "n0"
    monkeypatch.setattr(planning, "choose_groups", counted)
    world.submit(job_spec("two", priority=5, ask={"gpu": 2}))
    assert world.preempted() == [("alone", "two")]
    assert tries <= 16
