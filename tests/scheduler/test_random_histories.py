"""Whatever happens in whatever order, the invariants hold and nothing is left behind."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from callboard.model.policy import PolicyOverrides
from callboard.model.quantities import Resources
from callboard.model.specs import StopPolicy
from callboard.scheduler import Outcome, State
from callboard.scheduler.handlers import passes
from callboard.scheduler.plan.rooms import NodeFilter
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.states import GroupKind, GroupState
from callboard.scheduler.state.transaction import Transaction
from tests.scheduler.histories import History, cards, run, with_memory
from tests.scheduler.twin import Twin
from tests.scheduler.world import World

ROOT = Path(__file__).parent.parent.parent


def fresh() -> int:
    """A seed that no run had before, since what a set of fixed ones doesn't reach is never found by them."""
    return random.SystemRandom().randrange(1_000, 1_000_000_000)


@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_the_invariants_hold_and_nothing_is_left(block: int) -> None:
    for seed in (*range(block * 12, block * 12 + 12), fresh()):
        run(seed)


@pytest.mark.parametrize("block", range(2))
def test_they_hold_too_where_jobs_name_nodes_and_devices(block: int) -> None:
    for seed in (*range(block * 12, block * 12 + 12), fresh()):
        run(seed, placed=True)


def starts(python: str) -> bool:
    """Whether an interpreter runs at all: version managers leave names on the path that don't."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def digest_with(python: str, hash_seed: str) -> str:
    command = [python, "-m", "tests.scheduler.histories", "3", "7", "11", "19"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout


def test_the_same_history_gives_the_same_bytes_under_any_hash_seed_and_python() -> None:
    expected = digest_with(sys.executable, "0")
    minors = {11, 12, 13} - {sys.version_info.minor}
    others = [python for minor in minors if (python := shutil.which(f"python3.{minor}")) and starts(python)]
    assert {digest_with(python, seed) for python in [sys.executable, *others] for seed in ("1", "4711")} == {expected}


class Attentive(Twin):
    """Raises where something could have been done that is left undone, or is done beside what a setting allows."""

    def handle(self, event: ev.Event) -> Outcome:
        """Decides an event."""
        before = {name: dynamic_groups(self.state, name) for name in self.state.pools}
        outcome = super().handle(event)
        for name, pool in self.state.pools.items():
            now, most = dynamic_groups(self.state, name), pool.spec.pg_pool.max_dynamic
            assert now <= max(most, before.get(name, 0)), f"{name} has {now} groups and may have {most}"
            self._follows(name)
        meta = self.state.meta
        if not (meta.unsettled or meta.overlooked or meta.look_on or meta.reconcile_until_ms):
            wake_ms = self.next_wake_ms()
            for at_ms in (event.now_ms, 10**15 if wake_ms is None else wake_ms - 1):
                self._look(at_ms)
        return outcome

    def _follows(self, name: str) -> None:
        """No group is kept that its pool, as it is now, would not keep."""
        pool = self.state.pools[name].spec
        for group_id in self.state.group_index.of_pool.get(name, ()):
            group = self.state.groups[group_id]
            idle = group.state is GroupState.READY and not (self.state.workers_in(group_id) or group.nominee)
            if not idle or self.state.pools[name].deleting or self.state.meta.reconcile_until_ms:
                continue
            nodes = [self.state.nodes[bundle.node_id] for bundle in group.bundles]
            if group.group_kind is GroupKind.RESERVED:
                assert pool.pg_pool.enable, group
                assert all(NodeFilter(pool.node_selector).admits(node) for node in nodes), group
            else:
                assert pool.pg_pool.enable, group
                assert pool.pg_pool.reuse, group

    def _look(self, at_ms: int) -> None:
        """Looks at everything, as if something had been freed: at this time nobody may come to start or grow by that.
        (What may be promised to whom of what has only begun to leave is looked at once it has left.)"""
        tx = Transaction(self.state, at_ms, "")
        try:
            self.state.room_version += 1
            passes.run(tx)
            done = [entry for entry in tx.events if entry.type in DOINGS]
            assert not done, f"at {at_ms}, for no reason: {done}"
        finally:
            tx.undo()


DOINGS = ("job.starting", "group.creating", "worker.starting", "worker.assigned", "job.nomination_dropped")


def dynamic_groups(state: State, pool: str) -> int:
    """Groups that count, those that are only planned aside."""
    there = (state.groups[group_id] for group_id in state.group_index.of_pool.get(pool, ()))
    kept = (GroupState.CREATING, GroupState.READY)
    return sum(group.group_kind is GroupKind.DYNAMIC and group.state in kept for group in there)


class AttentiveWorld(World):
    """A world with such a scheduler."""

    make_scheduler = Attentive


class Restless(History):
    """One in which every setting of pools, policies and nodes changes under whatever was made under another."""

    world_type = AttentiveWorld

    def join(self, node_id: str, running: tuple[ev.RunningWorker, ...] = ()) -> None:
        """A node joins, with other labels than before."""
        labels = (("zone", self.random.choice("ab")),)
        self.world.join(node_id, with_memory(node_id), running=running, labels=labels, devices=cards(node_id))

    def change_pool(self) -> None:
        """Somebody changes anything about a pool."""
        choose, state = self.random.choice, self.world.state
        spec = state.pools[choose(list(state.pools))].spec
        shape = Resources.parse({"cpu": 1, "gpu": choose([0.5, 1])})
        pg_pool: dict[str, Any] = {
            "enable": choose([True, True, False]),
            "reserved": (shape,) * choose([0, 1, 2]),
            "dynamic": choose([True, True, False]),
            "max_dynamic": choose([0, 1, 2, 4]),
            "reuse": choose([True, False]),
            "reserved_min_priority_milli": choose([0, 3000, 8000]),
            "reserved_lendable": choose([True, False]),
            "reuse_slack_milli": choose([1000, 3000]),
            "idle_ttl_ms": choose([0, 100, 5000]),
            "charge_reserved": choose([True, False]),
            "retry_base_ms": choose([10, 100_000]),
            "creation_timeout_ms": choose([100, 60_000]),
        }
        outer: dict[str, Any] = {
            "nominal": choose([(), (("gpu", 1000),), (("cpu", 8000), ("gpu", 4000))]),
            "cohort": choose(["", "team"]),
            "node_selector": choose([(), (), (("zone", "a"),)]),
            "protected": choose([True, False]),
            "stop_policy": choose([*StopPolicy, StopPolicy.NONE, StopPolicy.NONE]),
            "preemption": choose(
                [
                    PolicyOverrides(),
                    PolicyOverrides(min_runtime_ms=choose([0, 700]), preemption_delay_ms=choose([0, 300])),
                ]
            ),
        }
        some = {key: pg_pool[key] for key in self.random.sample(sorted(pg_pool), k=choose([0, 1, 3]))}
        more = {key: outer[key] for key in self.random.sample(sorted(outer), k=choose([0, 1, 2]))}
        changed = replace(spec, pg_pool=replace(spec.pg_pool, **some), **more)
        self.send(ev.PoolUpdated(now_ms=self.world.now_ms, spec=changed))


@pytest.mark.parametrize("block", range(2))
def test_what_was_made_under_other_settings_follows_those_of_now_and_nothing_waits_for_a_chance_event(
    block: int,
) -> None:
    for seed in range(block * 10, block * 10 + 10):
        run(seed, placed=bool(seed % 2), kind=Restless)
    run(fresh(), kind=Restless)
