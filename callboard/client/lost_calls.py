"""What became of a worker in the middle of a call: Ray's error for that, with the words of the controller.

A call's reference is Ray's own, so the error is made inside `ray.get` and `await`, where Ray takes it out of its store.
There this module puts in an error of ours, which is Ray's ActorDiedError as well as WorkerGone, for calls that this
process made on handles; any other actor keeps Ray's. Why the worker ended is known a moment after Ray knows that it
did, so it is asked for beside everything else, and waited for only by whoever reads the text. Needs Ray; imported with
the first call.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from callboard.client.background import in_a_loop
from callboard.client.errors import WorkerGone
from callboard.client.workers import why_gone
from callboard.model.frozen import dataclass

_KNOWN = 4096
"""Actors that calls went to, the latest; as many as handles are cached."""

_WAIT_S = 5.0
"""For the controller to hear why: its agent proves the whole tree gone first, and a first failure is told from those
that follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A generation of a worker that was called."""

    label: str
    """"job/component/rank"."""
    uid: str
    controller: str
    actor_name: str


class CallLost(WorkerGone, ActorDiedError):
    """A worker ended in the middle of a call. Whether the call had an effect isn't known.

    Attributes:
        worker: which worker, "job/component/rank".
        reason: what became of it, as its controller says; reading it may wait for some seconds, except where an event
            loop runs: there it is what is known by now, and `await error.explained()` waits.
    """

    def __init__(self, called: Called, cause: Any = None, reason: str = "") -> None:
        ActorDiedError.__init__(self, cause)
        self.worker = called.label
        self._called = called
        self._reason = reason
        self._answer = None if reason else _answer(called)

    @property
    def reason(self) -> str:  # type: ignore[override]
        """What became of the worker."""
        if self._answer is None:
            return self._reason
        try:
            return self._answer.result(0.0 if in_a_loop() else _WAIT_S)
        except TimeoutError:
            return "its process ended; its controller has not said why yet"

    async def explained(self) -> str:
        """Wait for what became of the worker; the event loop goes on meanwhile."""
        if self._answer is not None:
            await asyncio.wait([asyncio.wrap_future(self._answer)], timeout=_WAIT_S)
        return self.reason

    def __str__(self) -> str:
        return f"worker {self.worker} ended in the middle of a call: {self.reason}"

    def __reduce__(self) -> Any:
        # In another process, which asks again only where this one doesn't know yet.
        return CallLost, (self._called, None, self.reason if self._answer is None or self._answer.done() else "")


class CallUnsure(ActorUnavailableError):
    """A worker could not be reached in the middle of a call. It may be alive, and the call may have had an effect."""

    def __init__(self, called: Called, message: str, actor_id: bytes | None) -> None:
        super().__init__(message, actor_id)
        self._given = (called, message, actor_id)

    def __str__(self) -> str:
        called, message, _ = self._given
        return f"worker {called.label} can't be reached; the call may have had an effect: {message}"

    def __reduce__(self) -> Any:
        return CallUnsure, self._given


@lru_cache(maxsize=_KNOWN)
def _answer(called: Called) -> Future[str]:
    """Why it ended; asked once for all calls that were cut off with it."""
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            why = why_gone(controller=called.controller, uid=called.uid, actor_name=called.actor_name, wait_s=_WAIT_S)
        except Exception as error:  # noqa: BLE001 - whoever reads the text gets it
            why = f"its process ended, and its controller could not be asked why: {error!r}"
        answer.set_result(why)

    threading.Thread(target=ask, name="callboard lost call", daemon=True).start()
    return answer


def watch(actor: Any, called: Called) -> None:
    """From now on calls of this process to this actor that are cut off say whose they were."""
    # The only name of an actor that Ray's error has whatever happened; a Ray without it keeps its own words.
    actor_id = getattr(actor, "_actor_id", None)
    if actor_id is None:
        return
    _install()
    known, key = _known(), actor_id.hex()
    known.pop(key, None)
    if len(known) >= _KNOWN:
        known.pop(next(iter(known)), None)
    known[key] = called


@lru_cache(maxsize=1)
def _known() -> dict[str, Called]:
    return {}


@lru_cache(maxsize=1)
def _install() -> None:
    values: Any = importlib.import_module("ray._private.serialization")
    made_by_ray, unavailable_by_ray = values.ActorDiedError, values.ActorUnavailableError

    def died(cause: Any = None) -> ActorDiedError:
        error: ActorDiedError = made_by_ray(cause)
        called = _known().get(error.actor_id or "")
        return error if called is None else CallLost(called, cause)

    def unavailable(message: str, actor_id: bytes | None) -> ActorUnavailableError:
        called = _known().get(actor_id.hex()) if actor_id else None
        error: ActorUnavailableError = unavailable_by_ray(message, actor_id)
        return error if called is None else CallUnsure(called, message, actor_id)

    values.ActorDiedError, values.ActorUnavailableError = died, unavailable
