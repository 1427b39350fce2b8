"""The demonstration as README.md tells it: a prologue and six acts, each with the figures that show whether it went as
it must.

The prologue sets policy and pool at the largest scale that fits, and proves that a worker without a GPU sees none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from callboard.cli.show import words
from callboard.cli.show.exits import NO_PLAN, CommandFailed
from callboard.client.client import Client
from callboard.demo.stage import (
    CANCEL_TIMEOUT_S,
    END_S,
    KILL_TIMEOUT_S,
    POLICY,
    POOL,
    START_S,
    Responsiveness,
    Setting,
    Stage,
    cpu_only,
    settings,
    waits_for,
    where,
)
from callboard.demo.story import Verdict
from callboard.model.frozen import dataclass
from callboard.v1.job_pb2 import Job, JobState, Preemption
from callboard.v1.placement_group_pb2 import PlacementGroupState
from callboard.wire.refusals import QuotaExceeded, Unschedulable

STATS_LIMIT_MS = 50.0
ORDER_SLACK_MS = 1_500
"""For the steps between: decision, journal, messages, and Ray's own bookkeeping on a busy machine."""


async def rollouts_start(stage: Stage) -> Verdict:
    verdict = Verdict("rollouts start on dynamic placement groups")
    before = await stage.pg_stats()
    jobs = []
    # One after the other, so that rollout-01 is the younger one for certain.
    for name in ("rollout-00", "rollout-01"):
        job = await stage.submit(name)
        jobs.append(job)
        await stage.running(job)
        stage.story.happened(f"{job.name} runs on {where(job)} in a {(await stage.group_kind(job)).lower()} group")
        verdict.check(f"{job.name} is in a dynamic group", await stage.group_kind(job) == "DYNAMIC")
        await stage.ask_worker(job, verdict)
        await stage.keep_busy(job)
    after, preemptions = await stage.pg_stats(), await stage.preemptions()
    stage.story.pool(before, after)
    booked = await _check_ray_books(stage, verdict)
    verdict.check(f"placement groups: {after.total}, expected 4", after.total == 4)
    verdict.check(f"reserved groups idle: {after.reserved_idle}, expected 2", after.reserved_idle == 2)
    verdict.check(f"preemptions: {preemptions}, expected 0", preemptions == 0)
    verdict.shown = f"groups {after.total}, reserved idle {after.reserved_idle}, preemptions {preemptions}"
    verdict.figures = {
        "placement_groups": after.total,
        "reserved_idle": after.reserved_idle,
        "preemptions": preemptions,
        "booked_in_ray": booked,
        "start_ms": [job.job.workers[0].start_ms for job in jobs],
    }
    return verdict


async def reward_starts(stage: Stage) -> Verdict:
    verdict = Verdict("a reward model starts on a reserved group")
    before = await stage.pg_stats()
    job = await stage.submit("reward-00")
    began = time.monotonic()
    await stage.running(job)
    took_ms = _since(began)
    kind = await stage.group_kind(job)
    stage.story.happened(f"reward-00 runs on {where(job)} in a {kind.lower()} group, {took_ms} ms after it was asked")
    await stage.ask_worker(job, verdict)
    after, preemptions = await stage.pg_stats(), await stage.preemptions()
    stage.story.pool(before, after)
    verdict.check(f"the group is {kind}, expected RESERVED", kind == "RESERVED")
    verdict.check(f"preemptions: {preemptions}, expected 0", preemptions == 0)
    verdict.check("no group was made", after.creations == before.creations)
    verdict.shown = f"{kind.lower()} group, preemptions {preemptions}, running after {took_ms} ms"
    verdict.figures = {"group": kind, "preemptions": preemptions, "submit_to_running_ms": took_ms}
    return verdict


async def train_preempts(stage: Stage) -> Verdict:
    """A trainer finds its group idle but the quota short: exactly one rollout yields."""
    verdict = Verdict("a trainer takes the quota of exactly one rollout")
    before = await stage.pg_stats()
    job = await stage.submit("train-00", foresee=True)
    began = time.monotonic()
    await stage.running(job)
    took_ms = _since(began)
    victim = _only_victim(stage, job.job, "rollout-01", verdict)
    kind = await stage.group_kind(job)
    stage.story.happened(f"train-00 runs on {where(job)} in a {kind.lower()} group, {took_ms} ms after it was asked")
    answer = await stage.ask_worker(job, verdict)
    waiting = await stage.waiting_again(stage.jobs[victim.victim if victim else "rollout-01"])
    why = waits_for(waiting)
    await stage.tell_why(stage.jobs[waiting.spec.name])
    after, preemptions = await stage.pg_stats(), await stage.preemptions()
    stage.story.pool(before, after)
    verdict.check(f"the group is {kind}, expected RESERVED", kind == "RESERVED")
    verdict.check("run() of train-00 answered", answer["steps_done"] > 0)
    verdict.check(f"preemptions: {preemptions}, expected 1", preemptions == 1)
    verdict.check("rollout-01 explains itself", bool(why))
    verdict.check("reward-00 runs on", (await stage.jobs["reward-00"].refresh()).state == JobState.JOB_STATE_RUNNING)
    verdict.shown = f"1 of 3 yielded (rollout-01, {_yield_text(victim)}), preemptions {preemptions}"
    verdict.figures = {
        "victims": [entry.victim for entry in job.job.victims],
        **_yielded(victim),
        "preemptions": preemptions,
        "group": kind,
        "submit_to_running_ms": took_ms,
        "victim_waits_for": why,
    }
    return verdict


async def extra_reuses(stage: Stage) -> Verdict:
    """A further rollout preempts a plain one and takes the group that the trainer's victim left."""
    verdict = Verdict("a more urgent rollout preempts a plain one and reuses a group")
    before = await stage.pg_stats()
    job = await stage.submit("rollout-extra", foresee=True)
    began = time.monotonic()
    await stage.running(job)
    took_ms = _since(began)
    victim = _only_victim(stage, job.job, "rollout-00", verdict)
    stage.story.happened(f"rollout-extra runs on {where(job)}, {took_ms} ms after it was asked")
    await stage.ask_worker(job, verdict)
    await stage.keep_busy(job)
    await stage.waiting_again(stage.jobs[victim.victim if victim else "rollout-00"])
    after, preemptions = await stage.pg_stats(), await stage.preemptions()
    stage.story.pool(before, after)
    reuses, creations = after.reuses - before.reuses, after.creations - before.creations
    verdict.check(f"groups used again: {reuses}, expected 1", reuses == 1)
    verdict.check(f"groups made: {creations}, expected 0", creations == 0)
    verdict.check(f"preemptions: {preemptions}, expected 2", preemptions == 2)
    verdict.shown = f"reuses +{reuses}, creations +{creations}, preemptions {preemptions} ({_yield_text(victim)})"
    verdict.figures = {
        "victims": [entry.victim for entry in job.job.victims],
        **_yielded(victim),
        "reuses": reuses,
        "creations": creations,
        "preemptions": preemptions,
        "submit_to_running_ms": took_ms,
    }
    return verdict


async def slow_cancel(stage: Stage) -> Verdict:
    """A worker whose cancel() hangs holds nobody up, and the controller answers meanwhile."""
    verdict = Verdict("a hanging cancel() delays nobody")
    await stage.end("rollout-00", "rollout-01", "rollout-extra", cancelled=True)
    slow = await stage.submit("rollout-slow")
    await stage.running(slow)
    stage.story.happened(f"rollout-slow runs on {where(slow)}")
    await stage.ask_worker(slow, verdict)
    await stage.keep_busy(slow)
    before = await stage.pg_stats()
    async with Responsiveness(stage.client.address) as responsiveness:
        urgent = await stage.submit("rollout-urgent", foresee=True)
        began = time.monotonic()
        await urgent.until(_made_room, "room", START_S)
        await responsiveness.stop()
    await stage.running(urgent)
    took_ms = _since(began)
    victim = _only_victim(stage, urgent.job, "rollout-slow", verdict)
    start_ms = urgent.job.workers[0].start_ms
    stage.story.happened(f"rollout-urgent runs on {where(urgent)}, {took_ms} ms after it was asked")
    await stage.ask_worker(urgent, verdict)
    p99 = responsiveness.p99_ms
    stage.story.measured(f"{responsiveness.count} GetStats calls during the wait: p99 {p99:.1f} ms")
    stage.story.pool(before, await stage.pg_stats())
    stop_limit_ms = round((CANCEL_TIMEOUT_S + KILL_TIMEOUT_S) * 1000)
    limit_ms = stop_limit_ms + start_ms + ORDER_SLACK_MS
    verdict.check(
        f"yielded by the limit of {stop_limit_ms} ms",
        victim is not None and victim.HasField("yield_ms") and victim.yield_ms <= stop_limit_ms,
    )
    verdict.check(f"running after {took_ms} ms, limit {limit_ms} ms", took_ms <= limit_ms)
    verdict.check(f"GetStats p99 {p99:.1f} ms, limit {STATS_LIMIT_MS:g} ms", p99 < STATS_LIMIT_MS)
    verdict.check(f"only {responsiveness.count} GetStats calls were made", responsiveness.count >= 10)
    verdict.shown = f"{_yield_text(victim)}, running after {took_ms} ms, GetStats p99 {p99:.1f} ms"
    verdict.figures = {
        **_yielded(victim),
        "submit_to_running_ms": took_ms,
        "limit_ms": limit_ms,
        "get_stats_p99_ms": round(p99, 2),
        "get_stats_calls": responsiveness.count,
        "cancel_hangs_ms": 8000,
    }
    return verdict


async def curtain(stage: Stage) -> Verdict:
    """Everything ends, and nothing is left in the controller, in Ray, or on the machine."""
    verdict = Verdict("nothing is left")
    await stage.end("rollout-slow", cancelled=True)
    await stage.end("reward-00", "train-00", "rollout-urgent", cancelled=False)
    await _delete_pool(stage)
    stats = await stage.client.stats()
    live = sum(count for state, count in stats.jobs.items() if state not in ("SUCCEEDED", "FAILED", "CANCELLED"))
    groups = await stage.client.list_placement_groups()
    held = [words.amounts(amount) for amount in (stats.used, stats.held, stats.quarantined)]
    in_ray = set(await stage.ray.groups()) - stage.foreign_groups
    actors = await stage.ray.actors_left(stage.foreign_actors)
    running = [process.pid for process in stage.processes if process.is_running()]
    ledger = "zero" if held == ["nothing"] * 3 else ", ".join(held)
    stage.story.measured(
        f"controller: {live} jobs, {len(groups)} groups, ledger {ledger}; "
        f"Ray: {len(in_ray)} groups, {len(actors)} actors; {len(running)} worker processes"
    )
    verdict.check(f"jobs left: {live}", live == 0)
    verdict.check(f"groups left: {len(groups)}", not groups)
    verdict.check(f"the ledger holds {ledger}", ledger == "zero")
    verdict.check(f"groups left in Ray: {sorted(in_ray)}", not in_ray)
    verdict.check(f"actors left in Ray: {actors}", not actors)
    verdict.check(f"worker processes left: {running}", not running)
    verdict.figures = {
        "jobs": live,
        "placement_groups": len(groups),
        "ledger": ledger,
        "ray_groups": len(in_ray),
        "ray_actors": len(actors),
        "worker_processes": len(running),
    }
    return verdict


async def _check_ray_books(stage: Stage, verdict: Verdict) -> dict[str, float]:
    """Ray itself must say that exactly the placement groups' amounts are taken."""
    expected = stage.setting.booked_in_ray()
    before = stage.foreign_booked
    taken = await stage.ray.booked({name: amount + before[name] for name, amount in expected.items()})
    booked = {name: round(amount - before[name], 3) for name, amount in taken.items()}
    for name, amount in expected.items():
        verdict.check(
            f"Ray says {booked[name]:g} {name} is taken, expected {amount:g}", abs(booked[name] - amount) < 1e-3
        )
    gib = booked["memory"] / (1 << 30)
    stage.story.measured(f"Ray's own books: {booked['CPU']:g} CPU, {booked['GPU']:g} GPU, {gib:g} GiB are taken")
    return booked


async def _delete_pool(stage: Stage) -> None:
    """Deletes the pool and waits until its placement groups are gone."""
    revision = (await stage.client.stats()).revision
    await stage.client.delete_pool(POOL)
    stage.story.happened(f"pool {POOL} is deleted")
    changes = stage.client.watch(start_revision=revision + 1)
    async with asyncio.timeout(START_S):
        while await stage.client.list_placement_groups():
            await anext(changes)


def _only_victim(stage: Stage, job: Job, name: str, verdict: Verdict) -> Preemption | None:
    names = [victim.victim for victim in job.victims]
    verdict.check(f"victims: {names or 'none'}, expected {name} alone", names == [name])
    if not job.victims:
        return None
    stage.story.happened(words.yielding(job.victims[0]))
    return job.victims[0]


def _yielded(victim: Preemption | None) -> dict[str, Any]:
    return {"yield_ms": victim.yield_ms if victim else None, "outcome": victim.outcome if victim else None}


def _made_room(job: Job) -> bool:
    return job.state in (JobState.JOB_STATE_STARTING, JobState.JOB_STATE_RUNNING)


def _yield_text(victim: Preemption | None) -> str:
    if victim is None or not victim.HasField("yield_ms"):
        return "did not yield"
    return f"yielded in {victim.yield_ms} ms, {victim.outcome.lower().replace('_', ' ')}"


def _since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


@dataclass(frozen=True, slots=True)
class Act:
    """One act.

    Attributes:
        scene: what the audience should know before.
    """

    title: str
    scene: str
    play: Callable[[Stage], Awaitable[Verdict]]


ACTS = (
    Act(
        "Rollouts fill the house",
        "Two rollouts of low priority want a GPU each. Reserved placement groups are not for them, "
        "so two dynamic ones are made.",
        rollouts_start,
    ),
    Act(
        "The reward model finds its reserved place",
        "A reward model of priority 8.5 arrives. A reserved placement group was made for such jobs in advance: "
        "nobody has to yield.",
        reward_starts,
    ),
    Act(
        "The trainer needs room",
        "A trainer of priority 9 arrives. The second reserved group is idle, but the pool has too few CPUs left of "
        "its quota. Somebody must yield: by the rules, train goes before reward and rollout.",
        train_preempts,
    ),
    Act(
        "A more urgent rollout",
        "A rollout of priority 4.5 arrives; plain ones have 3. No label rule ranks rollouts, but within a pool "
        "a gap of 1.5 is enough. The group that the trainer's victim left is idle and of the right size.",
        extra_reuses,
    ),
    Act(
        "Somebody does not want to go",
        "A rollout whose cancel() hangs for 8 seconds must yield to an urgent one. "
        f"It gets {CANCEL_TIMEOUT_S} s, then its process tree is killed. "
        "Meanwhile the controller has to answer others.",
        slow_cancel,
    ),
    Act(
        "Curtain",
        "Everything ends. Nothing may be left: not in the controller, not in Ray, not on this machine.",
        curtain,
    ),
)


_REHEARSAL = "rehearsal"


async def choose_scale(client: Client) -> tuple[Setting, list[tuple[str, str]]]:
    """The largest scale at which `validate_only` places everything at once.

    Returns:
        The setting, and (scale, why not) of those that were too large.

    Raises:
        CommandFailed: it fits at no scale.
    """
    await client.create_pool({"name": _REHEARSAL})
    too_large: list[tuple[str, str]] = []
    try:
        for setting in settings():
            why = await _why_not(client, setting)
            if not why:
                return setting, too_large
            too_large.append((setting.factor, why))
    finally:
        await client.delete_pool(_REHEARSAL)
    factor, why = too_large[-1]
    raise CommandFailed(
        "The demonstration fits this cluster at no scale.",
        f"At the smallest, {factor}: {why}.",
        "Give it more nodes (--agents) or larger ones (--cpus-per-node, --gpus-per-node).",
        NO_PLAN,
    )


async def open_house(stage: Stage, verdict: Verdict) -> None:
    """Sets the policy, lets a worker without a GPU look around, and makes the pool with its reserved groups."""
    await stage.client.set_policy(POLICY)
    await _cpu_worker_sees_nothing(stage, verdict)
    revision = (await stage.client.stats()).revision
    await stage.client.create_pool(stage.setting.pool())
    changes = stage.client.watch(start_revision=revision + 1)
    async with asyncio.timeout(START_S):
        while not await _reserved_ready(stage.client):
            await anext(changes)


async def _why_not(client: Client, setting: Setting) -> str:
    try:
        plan = await client.validate(setting.everything_at_once(_REHEARSAL))
    except (Unschedulable, QuotaExceeded) as error:
        return str(error)
    return "" if plan.verdict == "START" else plan.summary or plan.verdict


async def _cpu_worker_sees_nothing(stage: Stage, verdict: Verdict) -> None:
    await stage.client.create_pool({"name": _REHEARSAL})
    job = await stage.client.submit(cpu_only(_REHEARSAL))
    await stage.running(job)
    answer = await stage.ray.call(job.workers()[0], "run", 1)
    seen = answer["visible_devices"]
    verdict.check(f"a worker without a GPU sees {seen!r}, expected ''", seen == "")
    stage.story.measured(f"a worker that asked for no GPU sees CUDA_VISIBLE_DEVICES={seen!r}")
    await job.complete()
    await job.finished(END_S)
    await stage.client.delete_pool(_REHEARSAL)


async def _reserved_ready(client: Client) -> bool:
    groups = await client.list_placement_groups(pool=POOL)
    ready = [group for group in groups if group.state == PlacementGroupState.PLACEMENT_GROUP_STATE_READY]
    return len(ready) >= 2
