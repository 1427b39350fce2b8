"""Scenarios from public reports that need nothing but the core, each by its id, beside those in the other modules."""

from __future__ import annotations

from dataclasses import replace

from callboard.model.quantities import NOTHING, Resources
from callboard.model.specs import ENVIRONMENT_MS, ComponentSpec, PgPoolSpec, RestartPolicy, Strategy, WorkerPlace
from callboard.scheduler.account.stats import pool_use
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import GroupState, JobState
from tests.scheduler.world import World, job_spec, pool_spec


def component(name: str, count: int = 1, **ask: float) -> ComponentSpec:
    return ComponentSpec(name=name, actor="a:B", min_workers=count, max_workers=count, resources=Resources.parse(ask))


# ---- quota ----


def test_ql01_a_start_that_times_out_while_it_restarts_holds_no_quota_when_it_is_stopped() -> None:
    world = World({"n1": 1})
    world.pool(pool_spec(gpu=1))
    world.submit("j", restart=RestartPolicy(max_restarts=1, backoff_base_ms=1), start_timeout_ms=1000)
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.exit("j")
    world.tick(1)
    assert world.status("j") is JobState.STARTING
    assert pool_use(world.state, "pool").used.gpu_milli == 1000
    world.tick(60_000)  # nobody answers: the start is stopped, and the budget is spent
    assert world.status("j") is JobState.FAILED
    assert not pool_use(world.state, "pool").used
    assert not world.state.workers
    world.hold = lambda command: False
    world.submit("next")
    assert world.status("next") is JobState.RUNNING


def test_ql07_a_lender_at_its_cap_reclaims_nothing() -> None:
    """The cap is nominal + borrow limit, so what is guaranteed is never above it: such a pool can't be written."""
    world = World({"n1": 8})
    capped = replace(pool_spec("p1", gpu=3), cohort="team", borrow_limit=(("gpu", 0),))
    world.pool(capped)
    world.pool(replace(pool_spec("p2", gpu=1), cohort="team"))
    world.pool(replace(pool_spec("p3", gpu=4), cohort="team"))
    for n in range(3):
        world.submit(f"own{n}", pool="p1", priority=9)
    for n in range(5):
        world.submit(f"borrower{n}", pool="p2", priority=1)
    world.submit("more", pool="p1", priority=9)
    assert world.status("more") is JobState.PENDING
    assert world.explain("more").reasons[0].code == "QUOTA_SHORT"
    assert world.preempted() == []


def test_ql10_two_asks_of_one_job_do_not_take_the_same_pot_twice() -> None:
    world = World({"n1": 8})
    for name, gpu in (("p1", 0), ("p2", 0), ("lender", 1)):
        world.pool(replace(pool_spec(name, gpu=gpu), cohort="team"))
    components = [component("x", gpu=1), replace(component("y", gpu=1), pool="p2")]
    refusal = world.refused(job_spec("both", pool="p1", components=components))
    assert {reason.code for reason in refusal.reasons} == {"QUOTA_SHORT"}
    world.submit("one", pool="p2")
    assert world.status("one") is JobState.RUNNING


def test_ql04_a_pool_that_is_over_takes_nothing_of_what_another_never_lends() -> None:
    world = World({"n1": 8})
    guest = replace(pool_spec("guest", gpu=2), cohort="team")
    world.pool(replace(pool_spec("owner", gpu=2), cohort="team", lend_limit=(("gpu", 0),)))
    world.pool(guest)
    for n in range(2):
        world.submit(f"guest{n}", pool="guest", preemptible=False)
    world.send(ev.PoolUpdated(now_ms=world.now_ms, spec=replace(guest, nominal=(("gpu", 0),))))
    assert pool_use(world.state, "guest").over.gpu_milli == 2000
    world.submit("mine", pool="owner", workers=2)
    assert world.status("mine") is JobState.RUNNING


# ---- placement groups ----


def test_pg04_a_cancel_during_a_creation_frees_its_room_at_once_and_a_late_answer_changes_nothing() -> None:
    world = World({"a": 1, "b": 1})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.CreateGroup) and command.group_id == "pg-1"
    world.submit("half", workers=2)
    world.cancel("half")
    assert world.status("half") is JobState.CANCELLED
    world.submit("next", workers=2)
    assert world.status("next") is JobState.RUNNING
    before = list(world.state.records())[1:]
    world.send(ev.GroupReady(now_ms=world.now_ms, group_id="pg-1", attempt=1, ray_id="late", ray_session="s"))
    assert list(world.state.records())[1:] == before


def test_pg05_a_removal_stays_owed_until_it_is_done_or_its_node_is_given_up() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.RemoveGroup)
    world.submit("j")
    world.complete("j")
    (group,) = world.state.groups.values()
    assert group.state is GroupState.REMOVING
    for _ in range(8):
        world.tick(600_000)
        owed = world.scheduler.owed_commands("n1")
        assert [command for command in owed if isinstance(command, cmd.RemoveGroup)]
        assert world.state.node_use("n1").free.gpu_milli == 0
    world.lose("n1")
    (command,) = [held for held in world.held if isinstance(held, cmd.RemoveGroup)]
    assert command.node_id == "n2", "another agent asks Ray for it"
    world.hold = lambda command: False
    world.answer()
    assert not world.state.groups


def test_pg11_a_head_without_resources_is_no_worker_and_each_node_that_is_left_out_is_named() -> None:
    world = World({"n0": {"cpu": 0}, "n1": 2, "n2": 2})
    world.pool()
    world.submit("each", workers=2, ask={"gpu": 1, "cpu": 1}, placement=Strategy.STRICT_SPREAD)
    assert sorted(worker.node_id for worker in world.workers("each")) == ["n1", "n2"]
    refusal = world.refused("eight", ask={"gpu": 8})
    named = {reason.subject for reason in refusal.reasons}
    assert {"nodes/n0", "nodes/n1", "nodes/n2"} <= named


def test_pg13_a_node_is_named_by_its_id_and_an_unknown_one_is_refused_with_those_that_are_known() -> None:
    world = World()
    world.join("n1", 1, hostname="192.168.0.2")
    world.pool()
    world.submit("pinned", node_selector=(("node", "n1"),))
    assert world.status("pinned") is JobState.RUNNING
    for address in ("192.168.0.2", "10.0.0.2"):
        refusal = world.refused("lost", node_selector=(("node", address),))
        assert refusal.code == "UNSCHEDULABLE"
        assert f"n1 lacks the label node={address}" in refusal.message


def test_pg14_a_helper_that_asks_nothing_is_kept_with_its_group() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.submit("first", node_selector=(("node", "n1"),))
    world.submit(job_spec("j", components=[component("actor", gpu=1), component("helper")]))
    assert [worker.node_id for worker in world.workers("j")] == ["n2", "n2"]
    assert len({worker.group_id for worker in world.workers("j")}) == 1


def test_pg16_uneven_nodes_give_each_worker_its_own_local_world_size() -> None:
    for sizes in ((4, 2), (2, 4)):
        world = World({"n1": sizes[0], "n2": sizes[1]})
        world.pool()
        starts: list[cmd.StartWorker] = []

        def note(command: cmd.Command, seen: list[cmd.StartWorker] = starts) -> bool:
            if isinstance(command, cmd.StartWorker) and command not in seen:
                seen.append(command)
            return False

        world.hold = note
        world.submit("j", workers=6)
        assert world.status("j") is JobState.RUNNING
        local = {(start.node_id, start.local_world_size) for start in starts}
        assert local == {("n1", sizes[0]), ("n2", sizes[1])}
        for start in starts:
            assert start.world_size == 6
            assert start.local_rank < start.local_world_size


def test_pg19_helpers_never_take_the_room_of_the_engines_they_start_with() -> None:
    world = World({"n1": {"cpu": 2, "gpu": 1}, "n2": {"cpu": 2, "gpu": 1}})
    world.pool()
    engines, helpers = component("engine", 2, gpu=1, cpu=1), component("helper", 2, cpu=1)
    world.submit(job_spec("j", components=[helpers, engines]))
    assert world.status("j") is JobState.RUNNING
    assert sorted(w.node_id for w in world.workers("j") if w.component == "engine") == ["n1", "n2"]
    world.cancel("j")
    # More helpers than there is room for: an explicit answer, and no engine that waits for ever.
    greedy = component("helper", 3, cpu=1)
    refusal = world.refused(job_spec("k", components=[greedy, engines]))
    assert refusal.code == "UNSCHEDULABLE"
    assert world.state.node_use("n2").free.gpu_milli == 1000


def test_pg20_the_room_of_a_much_larger_kept_group_is_not_wasted_on_a_small_job() -> None:
    world = World({"n1": 4})
    world.pool(pool_spec(pg_pool=PgPoolSpec()))
    world.submit("big", ask={"gpu": 3})
    world.complete("big")
    world.submit("small", ask={"gpu": 1})
    world.submit("medium", ask={"gpu": 2})
    assert world.status("small") is JobState.RUNNING
    assert world.status("medium") is JobState.RUNNING


# ---- nodes ----


def test_nj10_a_node_that_drains_while_a_job_starts_there_is_left_by_it() -> None:
    world = World({"n1": 1, "n2": 1})
    world.pool()
    world.hold = lambda command: isinstance(command, cmd.StartWorker) and command.node_id == "n1"
    world.submit("j")
    assert world.workers("j")[0].node_id == "n1"
    world.send(ev.NodeDrained(now_ms=world.now_ms, node_id="n1"))
    assert world.status("j") is JobState.RUNNING
    assert world.devices("j") == ["n2:0"]
    world.hold = lambda command: False
    world.answer()
    assert world.state.node_use("n1").used.gpu_milli == 0
    world.submit("k")
    assert world.status("k") is JobState.PENDING


def test_pc02_jobs_that_may_preempt_each_other_in_turn_do_not_go_round_for_ever() -> None:
    """Two label keys that disagree: a beats b by one, b beats a by the other."""
    world = World({"n1": 1})
    world.policy({"role": {"train": ["rollout"]}, "tier": {"gold": ["silver"]}})
    world.pool()
    world.submit("a", priority=5, labels={"role": "train", "tier": "silver"})
    world.submit("b", priority=9, labels={"role": "rollout", "tier": "gold"})
    for _ in range(20):
        world.tick(60_000)
    assert len(world.preempted()) <= 1


def test_what_an_entry_method_raised_is_the_reason_of_the_failure() -> None:
    world = World({"n1": 1})
    world.pool()
    told = 'Traceback:\n  File "a.py", line 1, in main\n    raise E\nErr: first line\nsecond line\n'
    for name, traceback, reason in (
        ("a", told, "the entry method of main/0 raised Err: first line"),
        ("b", "", "the entry method of main/0 raised"),
    ):
        world.submit(name, entry="main")
        (worker,) = world.workers(name)
        world.send(
            ev.WorkerFinished(
                now_ms=world.now_ms,
                node_id="n1",
                generation=worker.generation,
                succeeded=False,
                traceback=traceback,
            )
        )
        assert world.status(name) is JobState.FAILED
        assert world.job(name).reason == reason


def test_a_node_says_that_it_is_cordoned_and_no_more_once_it_is_not() -> None:
    world = World({"n1": 1})
    for cordoned, why in ((True, "cordoned: nothing new starts here"), (False, "uncordoned")) * 2:
        world.send(ev.NodeCordoned(now_ms=world.now_ms, node_id="n1", cordoned=cordoned))
        assert world.state.nodes["n1"].reason == why


def test_workers_with_places_are_bound_by_no_strategy_whatever_pools_they_are_charged_to() -> None:
    world = World({"n1": 2, "n2": 2})
    world.pool(pool_spec("p"))
    world.pool(pool_spec("q"))
    parts = [
        ComponentSpec(
            name=pool,
            actor="tests:Actor",
            min_workers=1,
            max_workers=1,
            resources=NOTHING,
            pool=pool,
            places=(WorkerPlace(node_id="n1", devices=((index, 1000),)),),
        )
        for index, pool in enumerate("pq")
    ]
    world.submit(job_spec("j", pool="p", components=parts, placement=Strategy.STRICT_SPREAD))
    assert world.status("j") is JobState.RUNNING
    assert sorted(world.devices("j")) == ["n1:0", "n1:1"]


def test_a_start_that_waits_for_an_environment_says_so_and_has_the_time_of_its_build_besides() -> None:
    world = World({"n1": 1})
    world.hold = lambda command: isinstance(command, cmd.StartWorker)
    world.pool()
    part = ComponentSpec(name="c", actor="m:C", environment="conda:rl", resources=Resources(cpu_milli=1000))
    world.submit("j", components=[part], start_timeout_ms=5_000)
    (worker,) = world.workers("j")

    def progress(message: str) -> None:
        world.send(
            ev.WorkerProgressed(
                now_ms=world.now_ms, node_id="n1", generation=worker.generation, message=f"builds {message}"
            )
        )

    for message in ("0 s: pip", "5 s: pip"):
        progress(message)
        reasons = [reason.message for reason in world.scheduler.explain(world.job("j").uid, world.now_ms).reasons]
        assert f"c/0 on n1 is STARTING: n1 builds {message}" in reasons
    world.tick(ENVIRONMENT_MS)
    assert world.status("j") is JobState.STARTING
    world.hold = lambda command: False
    world.answer()
    progress("late")
    assert world.workers("j")[0].reason == "constructed and answering"
