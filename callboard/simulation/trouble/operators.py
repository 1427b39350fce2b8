"""Operators, who change pools, the policy, idle groups, cordons and drains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from callboard.model.specs import StopPolicy
from callboard.scheduler import Outcome
from callboard.scheduler.records import events as ev
from callboard.simulation.checks.acknowledged import Acknowledged
from callboard.simulation.trouble import shapes
from callboard.simulation.trouble.calls import RETRY_MS, Calls


class Operators:
    """All operators."""

    def __init__(self, calls: Calls, acknowledged: Acknowledged, gpus: int) -> None:
        self._calls = calls
        self._controller = calls.controller
        self._timeline = calls.site.timeline
        self._chance = calls.chance
        self._acknowledged = acknowledged
        self._gpus = gpus
        self._recreated: dict[str, None] = {}

    def start(self, gap_ms: float) -> None:
        """Makes the pools, then changes things now and then; ``gap_ms`` is that between submissions."""
        self._change_policy()
        for name in dict.fromkeys(shapes.POOLS):
            self._create_pool(name)
        for act, every in (
            (self._change_pool, 40),
            (self._cordon, 60),
            (self._delete_group, 60),
            (self._recreate_pool, 200),
            (self._change_policy, 400),
        ):
            self._calls.repeat(act, gap_ms * every)

    def set_cordon(self, node_id: str, *, cordoned: bool) -> None:
        """Cordons a node, or takes that back, whatever it takes."""
        self._calls.call(
            partial(ev.NodeCordoned, node_id=node_id, cordoned=cordoned),
            again=lambda: self.set_cordon(node_id, cordoned=cordoned),
        )

    def delete_pools(self) -> None:
        for name in list(self._controller.scheduler.state.pools):
            self._delete_pool(name)

    def _delete_pool(self, name: str, then: Callable[[], object] = lambda: None) -> None:
        """Deletes a pool, whatever it takes.

        Args:
            then: done once that was answered; a repeated deletion may find that the first one did it.
        """

        def deleted(_: Outcome) -> None:
            self._acknowledged.pool_deleted(name)
            then()

        self._acknowledged.pool_goes(name)
        self._calls.call(
            partial(ev.PoolDeleted, name=name, force=True),
            deleted,
            again=lambda: self._delete_pool(name, then),
            refused=then,
        )

    def _create_pool(self, name: str) -> None:
        spec = shapes.pool_spec(name, self._gpus, self._chance)
        self._acknowledged.pool_comes(name)
        self._calls.call(
            partial(ev.PoolCreated, spec=spec),
            lambda _: self._acknowledged.pool_created(name),
            again=lambda: self._create_pool(name),
        )

    def _change_pool(self) -> None:
        pools = self._controller.scheduler.state.pools
        if not pools:
            return
        name = self._chance.choice(list(pools))
        old, fresh = pools[name].spec, shapes.pool_spec(name, self._gpus, self._chance)
        stop = self._chance.choice([*StopPolicy, StopPolicy.NONE, StopPolicy.NONE, StopPolicy.NONE])
        spec = replace(fresh if self._chance.random() < 0.5 else old, stop_policy=stop)

        def answered(_: Outcome) -> None:
            pool = self._controller.scheduler.state.pools.get(name)
            if pool is not None and pool.spec == spec:
                self._acknowledged.pool_changed(name, pool.spec_version)

        self._calls.call(partial(ev.PoolUpdated, spec=spec), answered)

    def _recreate_pool(self) -> None:
        """A pool is deleted with force, and made again when it is gone."""
        name = self._chance.choice(["batch", "team-b"])
        if name in self._recreated:
            return
        self._recreated[name] = None

        def wait() -> None:
            if not self._calls.open:
                return
            if name in self._controller.scheduler.state.pools:
                self._timeline.after(RETRY_MS, wait)
            else:
                del self._recreated[name]
                self._create_pool(name)

        # Whoever makes it again before the deletion was answered may delete the new one by asking once more.
        self._delete_pool(name, lambda: self._timeline.after(RETRY_MS, wait))

    def _change_policy(self) -> None:
        policy = shapes.policy(self._chance)
        self._calls.call(partial(ev.PolicySet, policy=policy))

    def _delete_group(self) -> None:
        groups = list(self._controller.scheduler.state.groups)
        if groups:
            group_id = self._chance.choice(groups)
            self._calls.call(partial(ev.GroupDeleted, group_id=group_id))

    def _cordon(self) -> None:
        nodes = list(self._controller.scheduler.state.nodes)
        if not nodes:
            return
        node_id, within_ms = self._chance.choice(nodes), self._chance.choice([0, 3_000])
        if self._chance.random() < 0.4:
            self._calls.call(
                lambda now_ms, cause: ev.NodeDrained(
                    now_ms=now_ms, cause=cause, node_id=node_id, deadline_ms=now_ms + within_ms if within_ms else 0
                )
            )
        else:
            self.set_cordon(node_id, cordoned=True)
        wait_ms = self._chance.randint(5_000, 60_000)
        self._timeline.after(wait_ms, lambda: self.set_cordon(node_id, cordoned=False))
