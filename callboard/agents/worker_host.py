"""What runs inside a worker process?

The generic worker host: it takes an assignment, sets the environment before any code of the user is
imported, builds the user's object and calls it. With `worker_lanes` and `worker_process` all that is ours in a
worker, and it needs nothing but the standard library. The same class is a detached Ray actor (`driver`) and a
plain process (`worker_main`); there is one host per process and one assignment per host.

Guaranteed: the control methods (`assign, ping, cancel, checkpoint, progress, report`) never wait behind a
busy method of the user: those run in threads of their own. Not guaranteed: an answer while
native code holds the GIL, which is why liveness is the pid and not a ping (design 05).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from callboard.agents.worker_lanes import InFlight, Lane, in_thread, lane_for
from callboard.agents.worker_process import (
    become_subreaper,
    checkpoint_answer,
    checkpoint_value,
    enter_environment,
    failed,
    fitting,
    format_error,
    load_class,
    plain,
    start_ticks,
)

HOOKS = ("setup", "restore", "cancel", "checkpoint", "progress")
"""Methods the host calls by itself when a class has them; none of them decides how `run()` runs."""

Plan = Mapping[str, Any]
"""An assignment as plain JSON, made by `worker_plan`."""


class WorkerStopping(RuntimeError):
    """A call came after the worker was told to stop."""


class NotAssigned(RuntimeError):
    """A call came before the worker was ready."""


@dataclass(frozen=True)
class WorkerContext:
    """What `setup(ctx)` is told."""

    job_id: str
    job_name: str
    component: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    generation: int
    """Fencing token of this start."""
    attempt: int
    """Attempt of the job, from 1."""
    devices: tuple[str, ...]
    """Ids of the devices the worker sees, in the order of its visible list."""
    node_group: str = ""
    """Label of the node group its placement counts ranks in."""
    hardware: tuple[Mapping[str, Any], ...] = ()
    """Settings of the declared hardware it was given: robots, cameras."""


class WorkerHost:
    """Hosts one object of the user."""

    def __init__(self) -> None:
        self._assignment: asyncio.Future[dict[str, Any]] | None = None
        self._target: object = None
        self._lane: Lane | None = None
        self._job_name = ""
        self._in_flight = InFlight()
        self._stopping = False
        self._entry_method: Callable[..., Any] | None = None
        self._entry: Future[Any] | None = None
        self._hook_runs: dict[str, Future[Any]] = {}

    # Default group: what the user's callers ask for.

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's object and return what it returns."""
        function, lane = self._callable(method)
        with self._in_flight:
            return await asyncio.wrap_future(lane.call(function, *args, **kwargs))

    async def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Call a method that yields, item by item."""
        function, lane = self._callable(method)
        with self._in_flight:
            async for item in lane.stream(function, *args, **kwargs):
                yield item

    # Control group: never behind the default group.

    async def ping(self) -> dict[str, Any]:
        """Who this process is. Also what an agent asks a fresh host for its pid."""
        return {"pid": os.getpid(), "start_ticks": start_ticks(), "in_flight": self._in_flight.count}

    async def assign(self, plan: Plan) -> dict[str, Any]:
        """Become the worker of this plan; asked again, answer the same.

        Returns:
            {"ok": True, "visible_devices", "hooks"} or {"ok": False, "failure", "message", "traceback"}
            with failure IMPORT or CONSTRUCTOR: plain values, so that no exception of the user is unpickled
            outside the worker.
        """
        if self._assignment is None:
            self._assignment = asyncio.ensure_future(self._assign(plan))
        return await asyncio.shield(self._assignment)

    async def cancel(self) -> dict[str, Any]:
        """Refuse further calls and run the user's `cancel()`, once. Returns {"hook", "error"}."""
        self._stopping = True
        _, error = await self._run_hook("cancel", self._job_name)
        return {"hook": self._has("cancel"), "error": error}

    async def checkpoint(self, wait_s: float, take: bool) -> dict[str, Any]:
        """Wait up to `wait_s` seconds for the calls in flight, then `take` a checkpoint, once.

        Returns:
            {"in_flight", "data" (base64) or "uri" or neither, "error"}.
        """
        self._stopping = True
        await asyncio.wrap_future(in_thread(self._in_flight.wait_idle, wait_s))
        answer: dict[str, Any] = {"in_flight": self._in_flight.count, "error": ""}
        if take:
            state, error = await self._run_hook("checkpoint", self._job_name)
            answer |= {"error": error} if error else checkpoint_answer(state)
        return answer

    async def progress(self) -> dict[str, Any]:
        """Calls in flight, and what the user's `progress()` says."""
        answer: dict[str, Any] = {"in_flight": self._in_flight.count, "progress": None, "error": ""}
        if self._has("progress"):
            self._hook_runs.pop("progress", None)
            value, error = await self._run_hook("progress", self._job_name)
            answer |= {"progress": plain(value), "error": error}
        return answer

    async def report(self) -> dict[str, Any]:
        """Begin the entry method, once, and wait for its end. Returns {"succeeded", "traceback"}.

        Not begun by `assign`: an entry that holds the GIL would keep its answer from leaving this process.
        """
        if self._entry is None:
            assert self._entry_method is not None, "asked for the end of an entry that the plan doesn't have"
            assert self._lane is not None, "asked for the end of an entry before the worker was ready"
            self._entry = self._counted(self._lane.call(self._entry_method))
        entry = asyncio.wrap_future(self._entry)
        await asyncio.wait([entry])
        if entry.cancelled():
            return {"succeeded": False, "traceback": "the entry method was cancelled"}
        error = entry.exception()
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return {"succeeded": True, "traceback": ""}
        return {"succeeded": False, "traceback": format_error(error)}

    # Inside.

    async def _assign(self, plan: Plan) -> dict[str, Any]:
        enter_environment(plan["env"])
        become_subreaper()
        self._job_name = plan["context"]["job_name"]
        try:
            target = await asyncio.wrap_future(in_thread(load_class, plan["actor"]))
        except BaseException as error:  # noqa: BLE001 - SystemExit of a user's module is a failed import
            return failed("IMPORT", error)
        lane = lane_for(target, hooks=HOOKS, limit=plan["max_concurrency"])
        try:
            await asyncio.wrap_future(lane.call(self._build, target, plan))
            for hook, offered in self._first_hooks(plan):
                function = getattr(self._target, hook)
                await asyncio.wrap_future(lane.call(function, *fitting(function, (offered,))))
        except BaseException as error:  # noqa: BLE001 - likewise for a constructor
            return failed("CONSTRUCTOR", error)
        if plan["entry"]:
            try:
                self._entry_method = getattr(self._target, plan["entry"])
            except AttributeError as error:
                return failed("CONSTRUCTOR", error)
        self._lane = lane
        return {
            "ok": True,
            "visible_devices": os.environ.get(plan["visibility_variable"]),
            "hooks": [hook for hook in HOOKS if self._has(hook)],
        }

    def _build(self, target: Callable[..., object], plan: Plan) -> None:
        self._target = target(*plan["args"], **plan["kwargs"])

    def _first_hooks(self, plan: Plan) -> list[tuple[str, object]]:
        told = plan["context"]
        lists = {"devices": tuple(told["devices"]), "hardware": tuple(told.get("hardware", ()))}
        context = WorkerContext(**{**told, **lists})
        hooks: list[tuple[str, object]] = [("setup", context)] if self._has("setup") else []
        if plan["checkpoint"] is not None and self._has("restore"):
            hooks.append(("restore", checkpoint_value(plan["checkpoint"])))
        return hooks

    def _counted(self, run: Future[Any]) -> Future[Any]:
        self._in_flight.__enter__()
        run.add_done_callback(lambda _: self._in_flight.__exit__(None, None, None))
        return run

    def _callable(self, method: str) -> tuple[Callable[..., Any], Lane]:
        if self._lane is None:
            raise NotAssigned("the worker is not ready yet")
        if self._stopping:
            raise WorkerStopping("the worker is being stopped and takes no more calls")
        if method.startswith("_"):
            raise AttributeError(f"{method!r} is not a public method")
        return getattr(self._target, method), self._lane

    def _has(self, hook: str) -> bool:
        return callable(getattr(self._target, hook, None))

    async def _run_hook(self, hook: str, *offered: object) -> tuple[Any, str]:
        """What the hook returned, and what it raised as one line ("" if nothing)."""
        if not self._has(hook) or self._lane is None:
            return None, ""
        if hook not in self._hook_runs:
            function = getattr(self._target, hook)
            self._hook_runs[hook] = self._lane.hook(function, *fitting(function, offered))
        run = asyncio.wrap_future(self._hook_runs[hook])
        await asyncio.wait([run])
        error = run.exception()
        if error is None:
            return run.result(), ""
        return None, f"{hook}() raised {type(error).__name__}: {error}"[:1000]
