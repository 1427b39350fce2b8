"""The worker host: what runs inside a worker process.

The generic worker host: it takes an assignment, sets the environment before any code of the user is imported, builds
the user's object (or one for each member of a colocation group) and calls it. With `worker_members`, `worker_lanes`,
`worker_process`, `worker_program`, `worker_secrets` and `worker_output` all that is ours in a worker, and it needs
nothing but the standard library. The same class is a detached Ray actor (`worker_actor`) and a plain process
(`worker_main`); there is one host per process and one assignment per host.

Guaranteed: the control methods (`assign, preload, ping, cancel, checkpoint, progress, report, secrets, execute`) never
wait behind a busy method of the user: those run in threads of their own. Not guaranteed: an answer while native code
holds the GIL, which is why liveness is the pid and not a ping (docs/agents.md).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from callboard.agents.host.worker_lanes import MainThread, in_thread
from callboard.agents.host.worker_limits import limit_gpu_memory, run_on
from callboard.agents.host.worker_members import HOOKS, Member, Members, Plan
from callboard.agents.host.worker_output import keep_bounded, keep_result, redirect, timed
from callboard.agents.host.worker_preload import preload
from callboard.agents.host.worker_process import (
    ProgramFailed,
    StopNotice,
    answer_for_ray,
    become_subreaper,
    checkpoint_answer,
    checkpoint_value,
    device_use,
    enter_environment,
    format_error,
    group_checkpoint_answer,
    import_from,
    member_checkpoint,
    plain,
    start_ticks,
    told_message,
    told_traceback,
)
from callboard.agents.host.worker_secrets import Hide, HidingStream, hiding


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
    colocation_group: str = ""
    """Group whose members share the process; `component` is the member then."""
    output: str = ""
    """Folder that its output and timings are written to; empty: nobody keeps them."""

    def timed(self, component: str = "", **facts: int) -> AbstractContextManager[None]:
        """Record the seconds of a block with the job, for `callboard profile`: `with ctx.timed("rollout"): …`.

        Args:
            component: what is measured; the worker's own component when nothing is said.
            facts: what it was measured at, besides the worker's devices: `envs_per_instance`, `iteration`, `gpus`.
        """
        fields = {
            "component": component or self.component,
            "rank": self.rank,
            "attempt": self.attempt,
            "devices": [f"{self.node_rank}/{device}" for device in self.devices],
            **facts,
        }
        return timed(self.output, fields)


CONTROL_METHODS = ("ping", "assign", "preload", "cancel", "checkpoint", "progress", "report", "secrets", "execute")
"""Methods of the host that its agent asks for."""


class WorkerHost:
    """Hosts one object of the user, or one for each member of a colocation group."""

    def __init__(self, main: MainThread | None = None) -> None:
        """
        Args:
            main: the main thread of the process, where it is free for code of the user.
        """
        self._main = main
        self._assignment: asyncio.Future[dict[str, Any]] | None = None
        self._members: Members | None = None
        self._building = ""
        self._job_name = ""
        self._label = "the worker"
        self._stopping = False
        self._entries: dict[str, Future[Any]] = {}
        self._results_kept = False
        self._output = ""
        self._hide: Hide = str
        self._masked = False
        self._signalled = False
        self._handlers: dict[str, Any] = {}
        """Handlers of signals that were there before any code of the user."""
        self._secrets: list[str] = []
        self._executed: set[str] = set()
        self._visibility_variable = ""

    # Default group: what the user's callers ask for.

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the user's object and return what it returns; of a group `member.method`."""
        member, function = self._callable(method)
        with member.in_flight:
            return await asyncio.wrap_future(member.lane.call(function, *args, **kwargs))

    async def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Call a method that yields, item by item."""
        member, function = self._callable(method)
        with member.in_flight:
            async for item in member.lane.stream(function, *args, **kwargs):
                yield item

    # Control group: never behind the default group.

    async def ping(self) -> dict[str, Any]:
        """Who this process is. Also what an agent asks a fresh host for its pid."""
        members = self._members
        return {
            "pid": os.getpid(),
            "start_ticks": start_ticks(),
            "in_flight": members.in_flight if members is not None else 0,
            "loads": [each.load() for each in members.all] if members is not None else [],
            "building": self._building if members is None else "",
            "visible_devices": os.environ.get(self._visibility_variable) if self._visibility_variable else None,
            **device_use(),
        }

    async def preload(self, modules: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
        """Import modules under these variables, before there is a job; see `worker_preload`."""
        self._handlers = own_handlers()
        self._mask_streams()  # loggers that modules make keep the streams of this moment
        enter_environment(variables)
        load = partial(preload, modules)
        return await asyncio.wrap_future(in_thread(load) if self._main is None else self._main.submit(load))

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

    async def cancel(self, notice: Mapping[str, Any] | None = None, signal_name: str = "") -> dict[str, Any]:
        """Refuse further calls and run every member's `cancel()`, once. Returns {"hook", "error"}.

        Args:
            notice: {"reason", "kind", "left_s"} of the stop.
            signal_name: signal for the user's handler of it in this process, once; without a handler none is sent.
        """
        self._stopping = True
        if signal_name and not self._signalled:
            self._signalled = True
            own = signal.getsignal(signal.Signals[signal_name])
            if own not in (self._handlers.get(signal_name), signal.SIG_DFL, signal.SIG_IGN):
                os.kill(os.getpid(), signal.Signals[signal_name])
        if self._members is None:
            return {"hook": False, "error": ""}
        _, error = await self._members.run_hook("cancel", self._job_name, notice=self._notice_of(notice))
        return {"hook": self._members.has("cancel"), "error": told_message(error, self._hide)}

    async def checkpoint(self, wait_s: float, take: bool, notice: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Wait up to `wait_s` seconds for the calls in flight, then `take` a checkpoint of every member, once.

        Returns:
            {"in_flight", "data" (base64) or "uri" or neither, "error"}.
        """
        self._stopping = True
        members = self._members
        if members is None:
            return {"in_flight": 0, "error": ""}
        waits = [asyncio.wrap_future(in_thread(each.in_flight.wait_idle, wait_s)) for each in members.all]
        await asyncio.wait(waits)
        answer: dict[str, Any] = {"in_flight": members.in_flight, "error": ""}
        if take:
            states, error = await members.run_hook("checkpoint", self._job_name, notice=self._notice_of(notice))
            if error:
                answer |= {"error": told_message(error, self._hide)}
            elif members.grouped:
                answer |= group_checkpoint_answer(states)
            else:
                answer |= checkpoint_answer(states.get(""))
        return answer

    async def secrets(self) -> list[str]:
        """Values that are masked in what this process tells: for an agent that took it over, and tells of it too."""
        return self._secrets

    async def progress(self) -> dict[str, Any]:
        """Calls in flight, and what `progress()` says; of a group by member."""
        members = self._members
        answer: dict[str, Any] = {"in_flight": 0, "progress": None, "error": ""}
        if members is None:
            return answer
        answer["in_flight"] = members.in_flight
        if members.has("progress"):
            values, error = await members.run_hook("progress", self._job_name, again=True)
            said = plain(values if members.grouped else values.get(""), self._hide)
            answer |= {"progress": said, "error": told_message(error, self._hide)}
        return answer

    async def execute(self, folder: str, name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run a program in the environment of this worker, or hand over the terminal of its command. What comes and
        goes takes the socket that an agent listens on; asked again, there is nothing more to do.

        Args:
            asked: {"command", "terminal", "rows", "columns", "terminal_type", "attach"}.

        Returns:
            {} or {"problem", "exit_code"}.
        """
        if name in self._executed:
            return {}
        from callboard.agents.host.worker_program import CANNOT_RUN, Program, execute  # noqa: PLC0415 - starts are short

        if self._members is None or self._stopping:
            return {"problem": f"{self._label} is not ready, or is being stopped", "exit_code": CANNOT_RUN}
        self._executed.add(name)
        target = self._members.all[0].target
        program = target if isinstance(target, Program) else None
        try:
            await asyncio.wrap_future(in_thread(execute, program, folder, name, asked))
        except ProgramFailed as error:
            return {"problem": str(error), "exit_code": error.exit_code}
        return {}

    async def report(self) -> dict[str, Any]:
        """Begin the entry methods, once, and wait for all of them, or for the first that fails.

        Returns {"succeeded", "traceback"}, of a command that failed its "exit_code" too. Not
        begun by `assign`: an entry that holds the GIL would keep its answer from leaving this process.
        """
        assert self._members is not None, "asked for the end of an entry before the worker was ready"
        having = [each for each in self._members.all if each.entry is not None]
        assert having, "asked for the end of an entry that the plan doesn't have"
        for member in having:
            if member.name not in self._entries:
                self._entries[member.name] = member.run_entry()
        runs = {asyncio.wrap_future(self._entries[each.name]): each for each in having}
        left: set[asyncio.Future[Any]] = set(runs)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for run in done:
                if traceback := _failure_of(run):
                    told = told_traceback(runs[run].named(traceback), self._hide)
                    code = getattr(None if run.cancelled() else run.exception(), "exit_code", 0)
                    return {"succeeded": False, "traceback": told} | ({"exit_code": code} if code else {})
        if not self._results_kept:
            self._results_kept = True  # asked again by the next agent, it keeps what it has
            for run, member in runs.items():
                keep_result(self._output, member.name, _returned(run), self._hide)
        return {"succeeded": True, "traceback": ""}

    # Inside.

    @staticmethod
    def _notice_of(told: Mapping[str, Any] | None) -> StopNotice:
        told = told or {"reason": "", "kind": "", "left_s": 0.0}
        return StopNotice(told["reason"], told["kind"], time.time() + told["left_s"])

    async def _assign(self, plan: Plan) -> dict[str, Any]:
        self._output = plan.get("output", "")
        self._write_to(self._output, plan.get("output_bytes", 0))
        self._handlers = self._handlers or own_handlers()
        enter_environment(plan["env"], contained=plan.get("contained", False))
        if folder := plan.get("working_dir"):
            os.chdir(folder)
        import_from([each for each in (folder, *plan.get("py_modules", ())) if each])
        become_subreaper()
        answer_for_ray(plan.get("gpus", ()))
        limit_gpu_memory(plan.get("gpu_memory_limit", 0))
        run_on(plan.get("cpus", ()))
        self._job_name = plan["context"]["job_name"]
        self._label = f"worker {self._job_name}/{plan['context']['component']}/{plan['context']['rank']}"
        self._visibility_variable = plan["visibility_variable"]
        self._hide_secrets([plan["env"][name] for name in plan.get("secrets", ()) if name in plan["env"]])
        members = Members(plan)
        for member in members.all:
            self._building = member.name
            problem = await member.build(lambda built: self._first_hooks(plan, built, members), self._main)
            if problem is not None:
                message = told_message(problem["message"], self._hide)
                return problem | {"message": message, "traceback": told_traceback(problem["traceback"], self._hide)}
        self._members = members
        return {
            "ok": True,
            "visible_devices": os.environ.get(plan["visibility_variable"]),
            "hooks": [hook for hook in HOOKS if members.has(hook)],
        }

    def _write_to(self, folder: str, limit_bytes: int) -> None:
        """Before any code of the user runs: what it prints is the job's, and nothing else is."""
        if not folder:
            return
        try:
            redirect(folder)
        except OSError as error:
            sys.stderr.write(f"callboard: output of the worker can't be kept in {folder}: {error}\n")
            return
        keep_bounded(limit_bytes)

    def _hide_secrets(self, values: list[str]) -> None:
        """From now on, in what this host answers and in what the user's code prints."""
        self._secrets = values
        if any(values):
            self._hide = hiding(values)
            self._mask_streams()

    def _hidden(self, text: str) -> str:
        return self._hide(text)

    def _mask_streams(self) -> None:
        if not self._masked:
            self._masked = True
            streams: Any = sys
            streams.stdout, streams.stderr = (HidingStream(each, self._hidden) for each in (sys.stdout, sys.stderr))

    def _first_hooks(self, plan: Plan, member: Member, members: Members) -> list[tuple[str, object]]:
        told = plan["context"]
        lists = {"devices": tuple(told["devices"]), "hardware": tuple(told.get("hardware", ()))}
        own = {"component": member.name, "colocation_group": told["component"]} if members.grouped else {}
        context = WorkerContext(**{**told, **lists, **own}, output=plan.get("output", ""))
        hooks: list[tuple[str, object]] = [("setup", context)] if member.has("setup") else []
        checkpoint = plan["checkpoint"]
        if checkpoint is not None and members.grouped:
            checkpoint = member_checkpoint(checkpoint, member.name)
        if checkpoint is not None and member.has("restore"):
            hooks.append(("restore", checkpoint_value(checkpoint)))
        return hooks

    def _callable(self, method: str) -> tuple[Member, Callable[..., Any]]:
        if self._members is None:
            raise NotAssigned(f"{self._label} is not ready yet")
        if self._stopping:
            raise WorkerStopping(f"{self._label} is being stopped and takes no more calls")
        member, own = self._members.called(method)
        return member, member.method(own)


def own_handlers() -> dict[str, Any]:
    """The handlers of signals, by the signal's name."""
    return {each.name: signal.getsignal(each) for each in signal.Signals}


def _returned(entry: asyncio.Future[Any]) -> Any:
    """What an entry method that ended well returned; it may have ended by SystemExit."""
    return None if entry.exception() is not None else entry.result()


def _failure_of(entry: asyncio.Future[Any]) -> str:
    """The traceback of an entry method that ended; empty when it ended well."""
    if entry.cancelled():
        return "the entry method was cancelled"
    error = entry.exception()
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return format_error(error)
