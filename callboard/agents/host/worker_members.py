"""The objects of the user in a worker process: one, or one for each member of a colocation group.

Each member is an object of its own with hooks of its own, on a lane of its own: a trainer that runs one step at a
time stays so beside a pool that serves a hundred callers. Standard library only: this runs in every worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from callboard.agents.host.worker_lanes import InFlight, Lane, MainThread, in_thread, lane_for
from callboard.agents.host.worker_process import StopNotice, failed, fitting, load_class, noticed, said_by

HOOKS = ("setup", "restore", "cancel", "checkpoint", "progress")
"""Methods the host calls by itself when a class has them; none of them decides how `run()` runs."""

Plan = Mapping[str, Any]
"""An assignment as plain JSON, made by `worker_plan`."""


class NoSuchMember(AttributeError):
    """A call names no member of the group."""


class Member:
    """One object of the user, and where its methods run."""

    def __init__(self, plan: Plan, *, name: str = "") -> None:
        """
        Args:
            plan: its actor, args, kwargs, entry and max_concurrency.
            name: of the member; empty for a worker that is no group.
        """
        self.name = name
        self.role: str = plan.get("role", "")
        self.in_flight = InFlight()
        self.limit: int = plan["max_concurrency"]
        self.entry: Callable[..., Any] | None = None
        self._plan = plan
        self.target: object = None
        """The object, once it is constructed."""
        self._lane: Lane | None = None
        self._hook_runs: dict[str, Future[Any]] = {}

    @property
    def lane(self) -> Lane:
        """Where its methods run, once it is built."""
        assert self._lane is not None, "asked for the lane of a member that isn't built"
        return self._lane

    async def build(
        self, first_hooks: Callable[[Member], Sequence[tuple[str, object]]], main: MainThread | None = None
    ) -> dict[str, Any] | None:
        """Import its class, construct it and run its first hooks on its lane.

        Args:
            first_hooks: (hook, argument) of those to run before it is ready, asked once it is constructed.
            main: the main thread of the process, if it is to be had.

        Returns:
            None, or the answer to the assignment that says what failed; it names the member.
        """
        try:
            # Modules of users set signal handlers, too; nothing else runs on the main thread before all is built.
            load = partial(load_class, self._plan["actor"])
            target = await asyncio.wrap_future(in_thread(load) if main is None else main.submit(load))
        except BaseException as error:  # noqa: BLE001 - SystemExit of a user's module is a failed import
            return self._failed("IMPORT", error)
        enters = bool(self._plan["entry"])
        lane = lane_for(target, hooks=HOOKS, limit=self.limit, enters=enters, main=main)
        try:
            await asyncio.wrap_future(lane.build(self._construct, target))
            for hook, offered in first_hooks(self):
                function = getattr(self.target, hook)
                await asyncio.wrap_future(lane.build(function, *fitting(function, (offered,))))
            if enters:
                self.entry = self._entry()
        except BaseException as error:  # noqa: BLE001 - likewise for a constructor
            return self._failed("CONSTRUCTOR", error)
        self._lane = lane
        return None

    def _entry(self) -> Callable[..., Any]:
        name, kind = self._plan["entry"], type(self.target)
        if not hasattr(self.target, name):
            has = [each for each in vars(kind) if not each.startswith("_") and callable(getattr(kind, each))]
            raise AttributeError(
                f"entry names the method {name}, which {kind.__name__} does not have; it has {', '.join(has) or 'none'}"
            )
        function: Callable[..., Any] = getattr(self.target, name)
        return function

    def method(self, name: str) -> Callable[..., Any]:
        """A public method of the object."""
        if name.startswith("_"):
            raise AttributeError(f"{name!r} is not a public method")
        function: Callable[..., Any] = getattr(self.target, name)
        return function

    def has(self, hook: str) -> bool:
        return callable(getattr(self.target, hook, None))

    def run_entry(self) -> Future[Any]:
        """Begin the entry method; counts as a call in flight until it ends."""
        assert self.entry is not None, "asked to run an entry that the plan doesn't have"
        self.in_flight.__enter__()
        run = self.lane.enter(self.entry)
        run.add_done_callback(lambda _: self.in_flight.__exit__(None, None, None))
        return run

    async def run_hook(
        self, hook: str, job: str, *, notice: StopNotice | None = None, again: bool = False
    ) -> tuple[Any, str]:
        """What the hook returned, and what it raised as one line ("" if nothing), of any length. Runs once unless told
        ``again``."""
        if not self.has(hook) or self._lane is None:
            return None, ""
        if again or hook not in self._hook_runs:
            function = getattr(self.target, hook)
            self._hook_runs[hook] = self._lane.hook(noticed(function, job, notice))
        run = asyncio.wrap_future(self._hook_runs[hook])
        await asyncio.wait([run])
        error = run.exception()
        if error is None:
            return run.result(), ""
        return None, self.named(f"{hook}() raised {said_by(error)}")

    def named(self, text: str) -> str:
        """The text, with whose it is."""
        return f"{self.name}: {text}" if self.name else text

    def load(self) -> dict[str, Any]:
        """Calls that run or wait, against the limit of those that may run."""
        return {"name": self.name, "in_flight": self.in_flight.count, "limit": self.limit}

    def _construct(self, target: Callable[..., object]) -> None:
        self.target = target(*self._plan["args"], **self._plan["kwargs"])

    def _failed(self, failure: str, error: BaseException) -> dict[str, Any]:
        answer = failed(failure, error)
        return answer | {"message": self.named(answer["message"])}


class Members:
    """The objects of one worker. Callers address those of a group by `member.method` or `role.method`."""

    def __init__(self, plan: Plan) -> None:
        stated: Sequence[Plan] = plan.get("members") or ()
        self.all = [Member(each, name=each["name"]) for each in stated] or [Member(plan)]
        self.grouped = bool(stated)
        # Whole words, so that `a` never answers for `a_b`; names before roles.
        self._by_word = {each.role: each for each in self.all if each.role} | {each.name: each for each in self.all}

    def called(self, method: str) -> tuple[Member, str]:
        """The member that a call means, and its method's own name.

        Raises:
            NoSuchMember: it names none.
        """
        if not self.grouped:
            return self.all[0], method
        # Names may hold dots, methods don't.
        word, _, own = method.rpartition(".")
        member = self._by_word.get(word)
        if member is None:
            known = ", ".join(each.name for each in self.all)
            raise NoSuchMember(f"{method!r} names no member of this group; call MEMBER.METHOD, members are {known}")
        return member, own

    def has(self, hook: str) -> bool:
        return any(each.has(hook) for each in self.all)

    @property
    def in_flight(self) -> int:
        """Calls of all members that run or wait."""
        return sum(each.in_flight.count for each in self.all)

    async def run_hook(
        self, hook: str, job: str, *, notice: StopNotice | None = None, again: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Run a hook of every member that has it, side by side: values by member, and what was raised as one line."""
        having = [each for each in self.all if each.has(hook)]
        runs = await asyncio.gather(*(each.run_hook(hook, job, notice=notice, again=again) for each in having))
        values = {each.name: value for each, (value, error) in zip(having, runs, strict=True) if not error}
        return values, "; ".join(error for _, error in runs if error)
