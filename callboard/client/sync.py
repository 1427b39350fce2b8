"""The SDK for scripts, threads and notebooks: the clients of asyncio, blocking.

Guaranteed: safe from any thread, several at once; usable where an event loop runs already (a notebook), which it
blocks as any blocking call would. All clients of a process share one event loop in one background thread.

Every method is made from the method of the same name, so arguments, results, errors and their descriptions are
written once. A method that is missing here fails a test.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from google.protobuf.message import Message

from callboard.client.background import BackgroundLoop, background_loop
from callboard.client.calls.connection import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S
from callboard.client.calls.methods import Method
from callboard.client.client import Client, ray_of
from callboard.client.clusters import Target
from callboard.client.jobs import JobHandle, SeenJob
from callboard.client.workers import connect_ray
from callboard.security.tls import TlsFiles
from callboard.v1.job_pb2 import Job

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Inner_co = TypeVar("Inner_co", covariant=True)
Item = TypeVar("Item")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])
Given = ParamSpec("Given")


class _Blocking(Generic[Inner_co]):
    """An object of asyncio behind the background loop."""

    def __init__(self, loop: BackgroundLoop, inner: Inner_co) -> None:
        self._loop = loop
        self._inner = inner


def _shown_as(method: Callable[..., Any], returns: Callable[[str], str]) -> Callable[[Function], Function]:
    """Gives a function the name, docstring and signature of a method of asyncio, as they are where calls block."""
    signature = inspect.signature(method)

    def dress(function: Function) -> Function:
        shown: Any = functools.update_wrapper(function, method)
        shown.__doc__ = re.sub(r"\b(?:async|await) ", "", method.__doc__ or "").replace(" Client.", " SyncClient.")
        shown.__signature__ = signature.replace(return_annotation=returns(signature.return_annotation))
        return function

    return dress


def _blocking(
    method: Callable[Concatenate[Inner_co, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[_Blocking[Inner_co], Given], Result]:
    """A method that waits for its result."""

    @_shown_as(method, str)
    def wait(self: _Blocking[Inner_co], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self._loop.run(method(self._inner, *args, **kwargs))

    return wait


def _finding(
    method: Callable[Concatenate[Client, Given], Coroutine[Any, Any, JobHandle]],
) -> Callable[Concatenate[_Blocking[Client], Given], SyncJobHandle]:
    """A method that waits for a job, and returns its blocking handle."""

    @_shown_as(method, lambda _: "SyncJobHandle")
    def find(self: _Blocking[Client], /, *args: Given.args, **kwargs: Given.kwargs) -> SyncJobHandle:
        loop = self._loop
        return SyncJobHandle(loop, loop.run(method(self._inner, *args, **kwargs)))

    return find


def _iterating(
    method: Callable[Concatenate[Inner_co, Given], AsyncIterator[Item]],
) -> Callable[Concatenate[_Blocking[Inner_co], Given], Iterator[Item]]:
    """A method that iterates, each item asked for when it is wanted."""

    @_shown_as(method, lambda items: f"Iterator[{items.partition('[')[2].partition(',')[0].rstrip(']')}]")
    def iterate(self: _Blocking[Inner_co], /, *args: Given.args, **kwargs: Given.kwargs) -> Iterator[Item]:
        return self._loop.iterate(method(self._inner, *args, **kwargs))

    return iterate


def _starting(
    start: Callable[Given, Coroutine[Any, Any, Client]],
) -> Callable[Concatenate[type[SyncClient], Given], SyncClient]:
    """A constructor that starts what its client talks to."""

    @_shown_as(start.__func__, lambda _: "SyncClient")  # type: ignore[attr-defined] # a classmethod has one
    def begin(cls: type[SyncClient], /, *args: Given.args, **kwargs: Given.kwargs) -> SyncClient:
        made, loop = cls.__new__(cls), background_loop()
        _Blocking.__init__(made, loop, loop.run(start(*args, **kwargs)))
        return made

    return begin


class SyncJobHandle(SeenJob, _Blocking[JobHandle]):
    """One job. It stays with the job it was made for, also when a later one takes the same name."""

    def __init__(self, loop: BackgroundLoop, inner: JobHandle) -> None:
        super().__init__(loop, inner)
        self._controller = inner._controller  # noqa: SLF001 - its own

    @property
    def job(self) -> Job:  # type: ignore[override] # the handle inside renews it
        """The job as it was last seen; every method that talks to the controller renews it."""
        return self._inner.job

    refresh = _blocking(JobHandle.refresh)
    running = _blocking(JobHandle.running)
    finished = _blocking(JobHandle.finished)
    result = _blocking(JobHandle.result)
    exec = _blocking(JobHandle.exec)
    until = _blocking(JobHandle.until)
    cancel = _blocking(JobHandle.cancel)
    complete = _blocking(JobHandle.complete)
    preempt = _blocking(JobHandle.preempt)
    scale = _blocking(JobHandle.scale)
    explain = _blocking(JobHandle.explain)
    report = _blocking(JobHandle.report)
    logs = _iterating(JobHandle.logs)
    timings = _iterating(JobHandle.timings)
    events = _iterating(JobHandle.events)


class SyncClient(_Blocking[Client]):
    """A client of one controller whose calls block.

    ::

        with SyncClient() as cb:
            cb.ensure_pool("rlhf", nominal={"cpu": 6, "memory": "8GiB"})
            job = cb.submit({"name": "train", "pool": "rlhf", "components": [...]})
            job.running(timeout=120)

    Its methods are those of :class:`callboard.client.Client`.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        retry: float = DEFAULT_RETRY_S,
        use_proxy: bool = False,
        tls: TlsFiles | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        """Finds the controller; connects with the first call. Arguments and errors as of ``Client``."""

        async def make() -> Client:
            return Client(address, timeout=timeout, retry=retry, use_proxy=use_proxy, tls=tls, token_file=token_file)

        loop = background_loop()
        super().__init__(loop, loop.run(make()))

    local = classmethod(_starting(Client.local))

    @property
    def target(self) -> Target:
        """The controller and how it was found."""
        return self._inner.target

    @property
    def address(self) -> str:
        """The controller's address, "host:port"."""
        return self._inner.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, method: Method[..., Request, Response], request: Request, *, timeout: float | None = None
    ) -> Response:
        """One call of the API as it is on the wire, for what has no method of its own; see :meth:`Client.call`."""
        return self._loop.run(self._inner.call(method, request, timeout=timeout))

    def connect_ray(self) -> None:
        """Connects this process to the Ray cluster of the workers. Call it in the main thread, as Ray wants."""
        address, token_path = ray_of(self.target, self.stats())
        connect_ray(address, token_path=token_path)

    submit = _finding(Client.submit)
    get_job = _finding(Client.get_job)
    close = _blocking(Client.close)
    reachable = _blocking(Client.reachable)
    send_code = _blocking(Client.send_code)
    validate = _blocking(Client.validate)
    report = _blocking(Client.report)
    list_workers = _blocking(Client.list_workers)
    lookup = _blocking(Client.lookup)
    list_jobs = _blocking(Client.list_jobs)
    create_pool = _blocking(Client.create_pool)
    ensure_pool = _blocking(Client.ensure_pool)
    update_pool = _blocking(Client.update_pool)
    get_pool = _blocking(Client.get_pool)
    list_pools = _blocking(Client.list_pools)
    delete_pool = _blocking(Client.delete_pool)
    list_placement_groups = _blocking(Client.list_placement_groups)
    get_placement_group = _blocking(Client.get_placement_group)
    delete_placement_group = _blocking(Client.delete_placement_group)
    get_node = _blocking(Client.get_node)
    list_nodes = _blocking(Client.list_nodes)
    inspect_node = _blocking(Client.inspect_node)
    cordon_node = _blocking(Client.cordon_node)
    drain_node = _blocking(Client.drain_node)
    uncordon_node = _blocking(Client.uncordon_node)
    remove_node = _blocking(Client.remove_node)
    object_stores = _blocking(Client.object_stores)
    cluster_resources = _blocking(Client.cluster_resources)
    available_resources = _blocking(Client.available_resources)
    get_policy = _blocking(Client.get_policy)
    set_policy = _blocking(Client.set_policy)
    stats = _blocking(Client.stats)
    overview = _blocking(Client.overview)
    everything = _blocking(Client.everything)
    demand = _blocking(Client.demand)
    audit = _blocking(Client.audit)
    list_events = _blocking(Client.list_events)
    watch = _iterating(Client.watch)
