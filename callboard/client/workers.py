"""Calls of the workers of a job: as Ray actors, by their names; callboard is not in the way.

Ray is imported when the first call is made, in the caller's process. A handle holds only names, so it pickles, and it
works from any process that is connected to the job's Ray cluster, in whatever namespace.

Guaranteed: a call reaches the worker of the handle or, when that is known to be gone, a later generation of it; never
two. Not guaranteed: that a call in flight when its worker dies had no effect, so it is not repeated: its reference
raises WorkerGone, which is Ray's ActorDiedError too and says why it died, and the next call follows. The caller's event
loop never waits for a worker to come back.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import field, fields, replace
from functools import lru_cache
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from callboard.client.background import background_loop, in_a_loop
from callboard.client.errors import RequestTooLarge, WaitTimeout, WorkerGone
from callboard.model.faults import guess
from callboard.model.frozen import dataclass
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.wire.refusals import CallboardError, NotFound

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "callboard"
"""Ray namespace of every worker."""

DEFAULT_WAIT_S = 60.0
"""How long a call waits for the next generation of its worker: longer than a cold start."""


class NoActor(Exception):
    """The worker is no Ray actor: its node hosts workers as plain processes.

    Attributes:
        worker: which worker, "job/component/rank".
    """

    def __init__(self, worker: str) -> None:
        super().__init__(
            f"{worker} is a plain process, not a Ray actor, so it can't be called; give it an `entry` method, or start "
            "the cluster with `callboard up --runtime ray`"
        )
        self.worker = worker


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How calls are made.

    Attributes:
        stream: the method yields; a call returns Ray's generator of references, one per item.
        num_returns: references that a call returns, for a method that returns a tuple of as many.
        follow: when the worker is gone, call its next generation; False: raise WorkerGone at once.
        wait: seconds to wait for the next generation.
    """

    stream: bool = False
    num_returns: int = 1
    follow: bool = True
    wait: float = DEFAULT_WAIT_S


@dataclass(slots=True)
class Incarnation:
    """The newest generation of a worker that a handle has found so far; it only moves forward.

    Attributes:
        actor_name: name of its Ray actor.
        generation: its generation.
        search: the search for the next one that calls of an event loop share while it goes on, so that they reach the
            worker in their order; and its loop and the seconds it may take.
    """

    actor_name: str = ""
    generation: int = 0
    search: tuple[asyncio.Task[None], asyncio.AbstractEventLoop, float] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Incarnation, (self.actor_name, self.generation)  # a search stays where it is


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A method of the user's class in a worker."""

    handle: WorkerHandle
    method: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it and returns at once with Ray's reference to the result: ``ray.get`` waits for it, ``await`` too.

        With ``stream`` Ray's generator of references instead, with ``num_returns`` a list of references.

        A worker that is gone must be waited for. Code without an event loop blocks here until its next generation is
        there. Where an event loop runs, nothing blocks: what is returned is not a reference but a task (with
        ``num_returns`` a list of tasks, with ``stream`` an async iterator of references), which waits, calls, and has
        the result: ``await`` and ``async for`` work as on what Ray gives. ``await handle.ready()`` waits before.

        Raises:
            WorkerGone: the worker is gone, and no later generation came in time (or none was asked for). A task
                raises it when it is awaited.
            NoActor: it is a plain process.
        """
        actor = self.handle._living()  # noqa: SLF001 - of this module, and no name taken from the user
        if actor is not None:
            return self._call(actor, args, kwargs)
        if not in_a_loop():
            return self._call(self.handle.actor(), args, kwargs)
        self.handle._check_follows()  # noqa: SLF001
        return self._later(args, kwargs)

    def _call(self, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.handle.name_losses(actor)
        options = self.handle.call_options
        if options.stream:
            return actor.stream.options(num_returns="streaming").remote(self.method, *args, **kwargs)
        if options.num_returns != 1:
            return actor.call.options(num_returns=options.num_returns).remote(self.method, *args, **kwargs)
        return actor.call.remote(self.method, *args, **kwargs)

    def _later(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a worker that must be waited for, begun on the running event loop."""

        async def called() -> Any:
            return self._call(await self.handle._found(), args, kwargs)  # noqa: SLF001

        options = self.handle.call_options
        if options.stream:
            return _items(asyncio.create_task(called()))
        if options.num_returns == 1:
            return asyncio.create_task(_result(called()))
        call = asyncio.create_task(called())
        return [asyncio.create_task(_result(call, place)) for place in range(options.num_returns)]


async def _result(call: Awaitable[Any], place: int | None = None) -> Any:
    reference = await (asyncio.shield(call) if isinstance(call, asyncio.Task) else call)
    return await (reference if place is None else reference[place])


async def _items(call: Awaitable[Any]) -> AsyncIterator[Any]:
    async for reference in await call:
        yield reference


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHandle:
    """One worker of a job, and its later generations.

    ``handle.run.remote(x)`` calls ``run(x)`` of the user's object in the worker. A method whose name is
    taken by an attribute below is reached with ``handle.method("rank").remote()``.

    Attributes:
        job: name of the job.
        component: component of the job, or colocation group.
        rank: rank inside the component.
        generation: fencing token when the handle was made; a restarted worker has a greater one and another actor.
        node: node it ran on then.
        devices: ids of the devices it saw then, in order.
        actor_name: name of its Ray actor in namespace "callboard"; empty for plain processes.
        member: component of the colocation group whose methods are called; empty: the worker is no group, or methods
            are named "member.method".
        uid: id of the job; empty: calls can't follow.
        controller: address of the controller, as seen from where the handle was made.
        was_ready: whether it was ready then. If not, the first call waits until it is, or until another generation
            takes its place: a worker that is being started or stopped is never called (PC-14).
        call_options: how calls are made; see :meth:`options`.
        newest: the later generation that calls go to, once one was found.
    """

    job: str
    component: str
    rank: int
    generation: int
    node: str
    devices: tuple[str, ...]
    actor_name: str
    member: str = ""
    uid: str = ""
    controller: str = ""
    was_ready: bool = True
    call_options: CallOptions = CallOptions()
    newest: Incarnation = field(default_factory=Incarnation, compare=False, repr=False)

    def method(self, name: str) -> RemoteMethod:
        """The method ``name`` of the user's object."""
        return RemoteMethod(self, f"{self.member}.{name}" if self.member else name)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            # Pickle, copy and Ray look for their hooks here; none is a method of the user's.
            raise AttributeError(name)
        return self.method(name)

    def options(
        self,
        *,
        stream: bool | None = None,
        num_returns: int | None = None,
        follow: bool | None = None,
        wait: float | None = None,
    ) -> Self:
        """The handle with other options; what is None stays as it is.

        Retries are not among them: a worker's actor is never restarted by Ray, so Ray has nothing to retry on.

        Args:
            stream: the method yields; ``for ref in handle.options(stream=True).rollout.remote(8): ray.get(ref)``.
            num_returns: references that a call returns.
            follow: call the next generation when the worker is gone; False: raise WorkerGone at once.
            wait: seconds to wait for the next generation.
        """
        stated = {"stream": stream, "num_returns": num_returns, "follow": follow, "wait": wait}
        changed: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
        return replace(self, call_options=replace(self.call_options, **changed))

    async def ready(self) -> Self:
        """Waits until the worker, or its next generation, can be called, and returns the handle. Other tasks of the
        event loop go on meanwhile.

        Raises:
            WorkerGone: the worker is gone, and no later generation came in time (or none was asked for).
            NoActor: it is a plain process.
        """
        await self._found()
        return self

    def actor(self) -> Any:
        """The Ray actor of the worker, or of its newest generation.

        Blocks only when the actor is gone, or wasn't there yet, and must be waited for. Where an event loop runs, use
        :meth:`ready` before.

        Raises:
            WorkerGone: the worker is gone, and no later generation came in time (or none was asked for).
            NoActor: it is a plain process.
        """
        while (actor := self._living()) is None:
            self._check_follows()
            self._move_on(background_loop().run(self._successor()))
        return actor

    async def _found(self) -> Any:
        """What :meth:`actor` returns, waited for off the event loop."""
        while (actor := self._living()) is None:
            self._check_follows()
            loop, wait_s, search = asyncio.get_running_loop(), self.call_options.wait, self.newest.search
            if search is None or search[0].done() or search[1:] != (loop, wait_s):
                search = self.newest.search = (loop.create_task(self._search()), loop, wait_s)
            await asyncio.shield(search[0])
        return actor

    def _living(self) -> Any:
        """The actor of the newest generation known; None when it is known to be gone.

        Raises:
            NoActor: it is a plain process.
        """
        if self.was_ready and not self.actor_name:
            raise NoActor(self._label)
        return _living_actor(self._known_actor)

    def _check_follows(self) -> None:
        """
        Raises:
            WorkerGone: the worker is gone, and its successor is not asked for or can't be.
        """
        if not self.call_options.follow:
            gone = self._known_actor
            why = f"Ray has no living actor {gone}" if gone else "it was not ready when it was looked up"
            raise WorkerGone(self._label, f"{why}, and options(follow=False) says not to wait for its next generation")
        if not self.uid:
            raise WorkerGone(self._label, "the handle names no job of a controller, so no later generation is known")

    def name_losses(self, actor: Any) -> None:
        """See to it that a call to `actor` which is cut off says whose it was, and why."""
        if not self.uid:
            return
        from callboard.client.lost_calls import Called, watch  # noqa: PLC0415 - needs Ray.

        watch(actor, Called(label=self._label, uid=self.uid, controller=self.controller, actor_name=self._known_actor))

    @property
    def _known_actor(self) -> str:
        """Name of the actor of the newest generation that is known to have been ready; empty: of none."""
        return self.newest.actor_name or (self.actor_name if self.was_ready else "")

    @property
    def _label(self) -> str:
        return f"{self.job}/{self.component}/{self.rank}"

    async def _search(self) -> None:
        # On the loop of the background thread: that of the caller may be busy, and his threads are his (GC-07).
        self._move_on(await asyncio.wrap_future(background_loop().begin(self._successor())))

    def _successor(self) -> Coroutine[Any, Any, Worker]:
        """Finds the generation that took the place of the newest one known, which is gone."""
        return next_generation(
            controller=self.controller,
            uid=self.uid,
            label=self._label,
            component=self.component,
            rank=self.rank,
            # What wasn't ready may become so.
            after=max(self.newest.generation, self.generation if self.was_ready else self.generation - 1),
            wait_s=self.call_options.wait,
        )

    def _move_on(self, found: Worker) -> None:
        if not found.actor_name:
            raise NoActor(self._label)
        self.newest.actor_name, self.newest.generation = found.actor_name, found.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedWorkerHandle(WorkerHandle, Generic[T]):
    """A handle that knows the class of its worker; ``job.workers("train", type=Trainer)`` returns them.

    ``handle.call(Trainer.run, 3)`` is ``handle.run.remote(3)`` with its arguments and result known to type checkers.

    Attributes:
        worker_type: the class.
    """

    worker_type: type[T]

    @classmethod
    def of(cls, handle: WorkerHandle, known: type[T]) -> TypedWorkerHandle[T]:
        """``handle`` with the class of its worker, plain or of ``@ray.remote``."""
        plain: type[T] = getattr(known, "__ray_actor_class__", known)
        return cls(worker_type=plain, **{each.name: getattr(handle, each.name) for each in fields(WorkerHandle)})

    def method(self, name: str) -> RemoteMethod:
        """The method ``name`` of the user's object.

        Raises:
            AttributeError: its class has no such method.
        """
        if not callable(getattr(self.worker_type, name, None)):
            hint = guess(name, self._methods())
            missing = f"{self.worker_type.__name__} has no method {name}; {hint}"
            raise AttributeError(missing, name=name, obj=self)  # noqa: TRY004 - as Python says it
        return WorkerHandle.method(self, name)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """Calls a method of the class: what ``handle.run.remote(…)`` returns, a Ray reference to the result.

        Args:
            method: ``Trainer.run``.
            *args: its arguments.
            **kwargs: its keyword arguments.
        """
        called: Awaitable[R] = self.method(method.__name__).remote(*args, **kwargs)
        return called

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._methods()})

    def _methods(self) -> list[str]:
        return [name for name, _ in inspect.getmembers(self.worker_type, callable) if not name.startswith("_")]


def _living_actor(name: str) -> Any:
    """The actor of that name; None when it is known to be gone."""
    if not name:
        return None
    try:
        actor = _actor(name)
    except ValueError:  # Ray's way to say that there is none.
        return None
    # Known without a question to Ray, once a call was made; see `ActorHandle._get_local_state`.
    state = getattr(actor, "_get_local_state", lambda: None)()
    return None if state is not None and state == _dead() else actor


@lru_cache(maxsize=1)
def _dead() -> int:
    return int(importlib.import_module("ray.core.generated.gcs_pb2").ActorTableData.DEAD)


@lru_cache(maxsize=4096)
def _actor(name: str) -> Any:
    # The name holds the generation, so a cached handle never reaches a later worker.
    import ray  # noqa: PLC0415 - the SDK works without Ray until a worker is called.

    return ray.get_actor(name, namespace=NAMESPACE)


def connect_ray(address: str, *, token_path: str = "", node_ip: str = "") -> None:
    """Connects this process to the Ray cluster of the workers, as a driver in namespace "callboard".

    Args:
        address: GCS address "host:port", as ``Client.stats()`` gives it in ``ray_address``.
        token_path: file with the cluster's token; empty: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH of the
            environment, or none.
        node_ip: address of this machine's Ray node; empty: Ray finds it. Needed where several nodes run
            on one machine.

    Raises:
        ConnectionError: no Ray cluster answers there.
    """
    if token_path:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}
    imported_before = "ray" in sys.modules
    import ray  # noqa: PLC0415 - as above.

    if token_path and imported_before:
        # Ray reads the variables when it is imported, and without them waits 20 s to say that nobody answers.
        # This is how Ray itself reads them again.
        importlib.import_module("ray._raylet").Config.initialize("")
    options: dict[str, Any] = {"_node_ip_address": node_ip} if node_ip else {}
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        ignore_reinit_error=True,
        **options,
    )


_LIVES = (WorkerState.WORKER_STATE_ASSIGNED, WorkerState.WORKER_STATE_STARTING, WorkerState.WORKER_STATE_READY)
_WENT = ("PREEMPTING", "RECOVERING", "STOPPING", "FAILED", "CANCELLED")
"""States of a job whose reason says why workers of it ended."""


async def next_generation(
    *, controller: str, uid: str, label: str, component: str, rank: int, after: int, wait_s: float
) -> Worker:
    """Waits for a later generation of a worker and returns it.

    Args:
        controller: address to ask.
        uid: id of the job.
        label: the worker for people, "job/component/rank".
        component: component of the worker.
        rank: rank of the worker.
        after: the generation that is gone.
        wait_s: seconds to wait for it.

    Raises:
        WorkerGone: the job has ended or is forgotten, the controller does not answer, or time is over.
    """

    # Here, because it needs gRPC, which a process that only calls workers never loads.
    from callboard.client.client import Client  # noqa: PLC0415

    try:
        async with Client(controller, timeout=max(wait_s, 1.0), retry=wait_s) as client:
            last = await (await client.get_job(uid)).until(
                lambda seen: _successor(seen, component, rank, after) is not None,
                f"a later generation of {component}/{rank}",
                wait_s,
            )
    except NotFound:
        raise WorkerGone(label, "its job is no longer known to the controller") from None
    except WaitTimeout as error:
        raise WorkerGone(label, str(error)) from error
    except (CallboardError, RequestTooLarge) as error:
        raise WorkerGone(label, f"and its controller can't say what took its place: {error}") from error
    found = _successor(last, component, rank, after)
    if found is None:
        raise WorkerGone(label, f"its job has ended: {last.state_reason}" if last.state_reason else "its job has ended")
    return found


def why_gone(*, controller: str, uid: str, actor_name: str, wait_s: float) -> str:
    """What became of a worker whose actor is dead, one sentence. Blocks the calling thread; always returns.

    Args:
        controller: address to ask.
        uid: id of the job.
        actor_name: name of its actor.
        wait_s: seconds to wait for its controller to hear of it.
    """
    from callboard.client.sync import SyncClient  # noqa: PLC0415 - as above.

    def told(job: Job) -> str:
        for worker in job.workers:
            if worker.actor_name == actor_name:
                return "" if worker.state in _LIVES else worker.state_reason
        # The job goes on without it, or has ended: then its story says why.
        went = [change.reason for change in job.history if change.state in _WENT]
        return went[-1] if went else job.state_reason

    try:
        with SyncClient(controller, timeout=max(wait_s, 1.0), retry=wait_s) as client:
            return told(client.get_job(uid).until(lambda job: bool(told(job)), "what became of it", wait_s))
    except NotFound:
        return "its job is no longer known to the controller"
    except (CallboardError, RequestTooLarge, WaitTimeout) as error:
        return f"its process ended, and its controller can't say why: {error}"


def _successor(job: Job, component: str, rank: int, after: int) -> Worker | None:
    for worker in job.workers:
        same = worker.key.component == component and worker.key.rank == rank
        if same and worker.generation > after and worker.state == WorkerState.WORKER_STATE_READY:
            return worker
    return None
