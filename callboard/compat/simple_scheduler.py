"""``SimpleScheduler``: pools, tasks of one actor each, priorities and preemption under the names of another scheduler.

Every call becomes calls of callboard's API. A task is a job of one worker. What differs is what that scheduler left
open: a task that can't start now is refused with the reason instead of waiting, as there; ``complete`` and
``delete_agent`` return when the worker is proved gone; ``submit_with_pg_preemption`` preempts, and succeeds where it
once returned False.

Units: CPUs and GPUs as numbers, memory in MiB, times in seconds. Answers are dictionaries with ``success``, and
``error`` where that is False.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from callboard.client import JobEnded, NoController, SyncClient, SyncJobHandle, WaitTimeout, WorkerHandle
from callboard.model import ComponentSpec, InvalidInput, JobSpec
from callboard.v1.job_pb2 import Explanation
from callboard.v1.pool_pb2 import Pool
from callboard.wire.refusals import CallboardError, NotFound

Answer = dict[str, Any]

COMPONENT = "task"
"""The one component of a task's job."""

_LEASE = "30s"
"""Tasks are cancelled this long after the program that submitted them was killed."""

_STARTS = frozenset({"START", "PREEMPT", "TRIM", "NONE"})
"""Verdicts of an explanation for a job that starts, or is on its way."""

_POLICY = {
    "enable_label_preemption": "enable_label_preemption",
    "label_preemption_rules": "label_rules",
    "preemption_aggressiveness": "aggressiveness",
    "enable_cross_pool_preemption": "enable_cross_pool",
    "cross_pool_priority_threshold": "cross_pool_threshold",
    "protected_pools": "protected_pools",
    "cancel_timeout": "cancel_timeout",
    "kill_timeout": "kill_timeout",
}

_PG_POOL = {
    "enable": "enable",
    "enable_dynamic_pgs": "dynamic",
    "max_dynamic_pgs": "max_dynamic",
    "enable_pg_reuse": "reuse",
    "high_priority_threshold": "reserved_min_priority",
}


class PreemptionAggressiveness(StrEnum):
    """How large a priority gap a preemption needs: LOW asks for the largest."""

    LOW = "LOW"
    MEDIUM = "MEDIUM"
    HIGH = "HIGH"


@dataclass(frozen=True, slots=True)
class SimpleTaskSpec:
    """A task: one actor.

    Attributes:
        task_id: its name, unique among tasks that have not ended.
        pool: pool that is charged.
        actor_class: the class, plain or of ``@ray.remote``; also one that is defined in the running script.
        resources: of its worker: ``{"cpu": 2.0, "memory": 2048.0, "gpu": 1.0}``, memory in MiB.
        priority: −1000 … 1000.
        labels: for preemption rules.
        estimated_duration: seconds that it will take, for people; decides nothing.
        ray_options: ``name``, ``memory`` or ``max_concurrency`` of the actor.
        actor_args, actor_kwargs: what the class is constructed with, JSON values.
    """

    task_id: str
    pool: str
    actor_class: type | Any
    resources: Mapping[str, float]
    priority: float = 5.0
    labels: Mapping[str, str] = field(default_factory=dict)
    estimated_duration: float | None = None
    ray_options: Mapping[str, Any] = field(default_factory=dict)
    actor_args: Sequence[Any] = ()
    actor_kwargs: Mapping[str, Any] = field(default_factory=dict)


class SimpleScheduler:
    """A scheduler of tasks, in the cluster that runs, or in one of its own.

    ::

        with SimpleScheduler() as scheduler:
            scheduler.ensure_pool(name="rlhf", resources={"cpu": 6.0, "memory": 8192.0})
            scheduler.submit(task_id="train-00", pool="rlhf", actor_class=Trainer, resources={"cpu": 2.0})
            scheduler.complete("train-00")
    """

    def __init__(self, address: str | None = None, *, start_timeout: float = 120.0, **cluster: Any) -> None:
        """Finds the controller, or starts a cluster for this program where none runs on this machine.

        Args:
            address: "host:port" of a controller; None: CALLBOARD_CONTROLLER, else the only one running here, else a
                cluster of its own.
            start_timeout: seconds within which a task that may start must run.
            **cluster: of a cluster of its own, as :meth:`callboard.SyncClient.local` takes them.

        Raises:
            SeveralControllers: several run on this machine and no address says which.
            ClusterFailed: a cluster of its own did not start.
        """
        self._start_timeout_s = start_timeout
        try:
            self._client = SyncClient(address)
        except NoController:
            self._client = SyncClient.local(**cluster)
        self._tasks: dict[str, SyncJobHandle] = {}
        self._pools: set[str] = set()
        """The pools that this scheduler made."""
        self._policy: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def client(self) -> SyncClient:
        """The client below, for everything that this class has no name for."""
        return self._client

    # ---- pools and policy ----

    def configure_preemption(self, **settings: Any) -> Answer:
        """Says who yields to whom in the pools of this scheduler; other pools of the cluster keep their policy.

        Args:
            **settings: ``enable_label_preemption``, ``label_preemption_rules``, ``preemption_aggressiveness``,
                ``enable_cross_pool_preemption``, ``cross_pool_priority_threshold``, ``protected_pools``,
                ``cancel_timeout`` and ``kill_timeout`` (seconds).

        Raises:
            TypeError: a setting is not known.
        """
        self._policy |= {_POLICY[_known(name, _POLICY)]: value for name, value in settings.items()}
        with _honest() as answer:
            for name in sorted(self._pools):
                self._client.update_pool({"name": name, "preemption": self._policy}, fields=["preemption"])
        return answer

    def ensure_pool(
        self,
        name: str,
        resources: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
        pg_pool_config: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Makes a pool unless it exists with the same settings.

        Args:
            name: its name.
            resources: its quota: ``{"cpu": 6.0, "memory": 8192.0}``, memory in MiB.
            labels: labels of the pool.
            pg_pool_config: ``enable``, ``high_priority_pg_specs`` (shapes of reserved groups, memory in MiB),
                ``high_priority_threshold`` (priority from which tasks use these, 8), ``enable_dynamic_pgs``,
                ``max_dynamic_pgs`` and ``enable_pg_reuse``.

        Raises:
            TypeError: a setting is not known.
        """
        spec: dict[str, Any] = {"name": name, "nominal": _amounts(resources)}
        if labels:
            spec["labels"] = dict(labels)
        if self._policy:
            spec["preemption"] = self._policy
        if pg_pool_config is not None:
            groups = dict(pg_pool_config)
            shapes = groups.pop("high_priority_pg_specs", ())
            spec["pg_pool"] = {_PG_POOL[_known(key, _PG_POOL)]: value for key, value in groups.items()}
            spec["pg_pool"]["reserved"] = [_amounts(shape) for shape in shapes]
        with _honest({"pool": name}) as answer:
            existed = _exists(self._client, name)
            self._client.create_pool(spec)
            if not existed:
                self._pools.add(name)
        return answer

    # ---- tasks ----

    def submit(self, **task: Any) -> Answer:
        """Starts a task, whose fields are those of :class:`SimpleTaskSpec`; see :meth:`submit_spec`."""
        return self.submit_spec(SimpleTaskSpec(**task))

    def submit_with_pg_preemption(self, **task: Any) -> Answer:
        """The same as :meth:`submit`: a placement group is used again, made, or freed by preemption, whatever helps."""
        return self.submit(**task)

    def submit_spec(self, spec: SimpleTaskSpec) -> Answer:
        """Starts a task, and preempts for it where the policy allows that. Returns when its worker runs.

        Returns:
            ``{"success": True, "task_id": …, "preempted": [names of the tasks that yielded]}``, or
            ``{"success": False, "task_id": …, "error": why, "unblock": [what would help]}``; then nothing is left of
            the task.
        """
        with _honest({"task_id": spec.task_id}) as answer:
            job = _job(spec)
            expected = self._client.validate(job)
            if not _on_its_way(expected):
                return _refused(spec.task_id, expected)
            self._tasks[spec.task_id] = task = self._client.submit(job)
            try:
                task.running(timeout=self._start_timeout_s)
            except WaitTimeout:
                why = task.explain()
                self._end(spec.task_id, destroy=False)
                return _refused(spec.task_id, why)
            except JobEnded as error:
                del self._tasks[spec.task_id]
                return {"success": False, "task_id": spec.task_id, "error": str(error), "unblock": []}
            answer["preempted"] = [victim.victim.removeprefix("jobs/") for victim in expected.victims]
        return answer

    def worker(self, task_id: str) -> WorkerHandle:
        """The worker of a task; ``scheduler.worker("train-00").run.remote()`` is a plain Ray call.

        Raises:
            KeyError: this scheduler started no such task.
        """
        return self._tasks[task_id].workers(COMPONENT)[0]

    def complete(self, task_id: str) -> Answer:
        """Ends a task as succeeded; its room is free when this returns."""
        with _honest({"task_id": task_id}) as answer:
            task = self._task(task_id)
            task.complete()
            task.finished()
            del self._tasks[task_id]
        return answer

    def delete_agent(self, task_id: str, *, destroy_pg: bool = False) -> Answer:
        """Ends a task as cancelled; its room is free when this returns.

        Args:
            task_id: the task.
            destroy_pg: remove its placement group too, also a reserved one.
        """
        with _honest({"task_id": task_id}) as answer:
            self._task(task_id)
            self._end(task_id, destroy=destroy_pg)
        return answer

    # ---- figures ----

    def stats(self) -> Answer:
        """Figures of the cluster: ``total_preemptions``, ``total_submitted``, tasks and workers by state."""
        stats = self._client.stats()
        return {
            "total_preemptions": stats.total_preemptions,
            "total_submitted": stats.total_submitted,
            "preemption_outcomes": dict(stats.preemption_outcomes),
            "tasks": dict(stats.jobs),
            "workers": dict(stats.workers),
            "nodes": dict(stats.nodes),
        }

    def pg_pool_stats(self, pool: str | None = None) -> Answer:
        """Figures of the placement groups of one pool, or of every pool of this scheduler by name.

        Raises:
            NotFound: there is no such pool.
        """
        if pool is not None:
            return _groups(self._client.get_pool(pool))
        return {name: _groups(self._client.get_pool(name)) for name in sorted(self._pools)}

    def shutdown(self) -> None:
        """Ends the tasks and pools that this scheduler made, and the cluster if it started one."""
        try:
            for task_id in list(self._tasks):
                self._end(task_id, destroy=True)
            for name in sorted(self._pools):
                with contextlib.suppress(NotFound):
                    self._client.delete_pool(name, force=True)
            self._pools.clear()
        finally:
            self._client.close()

    def _task(self, task_id: str) -> SyncJobHandle:
        if task_id not in self._tasks:
            raise NotFound(f"this scheduler runs no task {task_id!r}")
        return self._tasks[task_id]

    def _end(self, task_id: str, *, destroy: bool) -> None:
        task = self._tasks.pop(task_id)
        with contextlib.suppress(NotFound):
            task.cancel(reason="ended by its scheduler", destroy_placement_groups=destroy)
            task.finished()


@contextlib.contextmanager
def _honest(known: Mapping[str, Any] | None = None) -> Iterator[Answer]:
    """An answer that becomes a failure when what is done for it is refused."""
    answer: Answer = {"success": True} | dict(known or {})
    try:
        yield answer
    except (CallboardError, InvalidInput) as error:
        answer |= {"success": False, "error": str(error)}


def _known(name: str, table: Mapping[str, str]) -> str:
    if name not in table:
        raise TypeError(f"{name} is not a setting; the settings are {', '.join(sorted(table))}")
    return name


def _amounts(resources: Mapping[str, float]) -> dict[str, Any]:
    """Amounts in callboard's units: memory in MiB becomes a text with its unit."""
    return {name: f"{value}MiB" if name == "memory" else value for name, value in resources.items()}


def _job(spec: SimpleTaskSpec) -> JobSpec:
    plain = getattr(spec.actor_class, "__ray_actor_class__", spec.actor_class)
    actor: Any = plain
    env: dict[str, str] = {}
    args, kwargs = list(spec.actor_args), dict(spec.actor_kwargs)
    if isinstance(plain, type) and plain.__module__ == "__main__":
        actor = "callboard.compat.script_class:ScriptClass"
        kwargs = {"source": _script(), "name": plain.__qualname__, "args": args, "kwargs": kwargs}
        args = []
    elif root := _code_root(plain):
        env["PYTHONPATH"] = root
    component = ComponentSpec(
        COMPONENT,
        actor,
        workers=1,
        resources=_amounts(spec.resources),
        args=args,
        kwargs=kwargs,
        env=env,
        ray_options=dict(spec.ray_options) or None,
    )
    return JobSpec(
        name=spec.task_id,
        pool=spec.pool,
        priority=spec.priority,
        labels=dict(spec.labels),
        owner={"session": {"lease": _LEASE}},
        components=[component],
    )


def _script() -> str:
    """The text of the program that runs."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return Path(file).read_text() if file else inspect.getsource(main)


def _code_root(actor: Any) -> str:
    """The directory that a class's package lies in, where that isn't installed: workers need it in their path."""
    file = getattr(sys.modules.get(getattr(actor, "__module__", "")), "__file__", None)
    if file is None:
        return ""
    root = Path(file).resolve().parents[actor.__module__.count(".") + (Path(file).name == "__init__.py")]
    return "" if root.name in {"site-packages", "dist-packages"} else str(root)


def _exists(client: SyncClient, pool: str) -> bool:
    try:
        client.get_pool(pool)
    except NotFound:
        return False
    return True


def _on_its_way(found: Explanation) -> bool:
    """Whether a job starts by itself: now, or in the room that is being made for it."""
    return found.verdict in _STARTS or bool(found.workers)


def _refused(task_id: str, found: Explanation) -> Answer:
    return {"success": False, "task_id": task_id, "error": found.summary, "unblock": list(found.unblock)}


def _groups(pool: Pool) -> Answer:
    groups = pool.pg_stats
    return {
        "total_pgs": groups.total,
        "high_priority_pgs": groups.reserved,
        "idle_high_priority_pgs": groups.reserved_idle,
        "dynamic_pgs": groups.dynamic,
        "idle_dynamic_pgs": groups.dynamic_idle,
        "creations": groups.creations,
        "reuses": groups.reuses,
        "removals": dict(groups.removals),
    }
