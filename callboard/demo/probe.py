"""The program that talks to Ray for the demonstration: `python -m callboard.demo.probe`.

A process of its own, because Ray ends a driver hard when its cluster goes (docs/agents.md); the demonstration
must outlive its cluster to prove that nothing is left of it. Requests and answers are lines of JSON on the
standard input and output: {"id", "op", …} → {"id", "value"} or {"id", "error"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import ray
import ray.util

from callboard.client.errors import WorkerGone
from callboard.client.workers import WorkerHandle, connect_ray

_BOOKS_S = 5.0
"""How long Ray may take to tell its own head what its nodes have left: it reports a few times a second."""


# Ray gives these two no types.
_cluster_resources: Callable[[], dict[str, float]] = ray.cluster_resources
_available_resources: Callable[[], dict[str, float]] = ray.available_resources


_SPARES_S = 10.0
"""How long agents may keep warm spares once no job is about."""


class Probe:
    """Answers requests; each public method is an operation."""

    def __init__(self) -> None:
        self._in_flight: list[Any] = []

    def connect(self, address: str, token_path: str, node_ip: str) -> None:
        connect_ray(address, token_path=token_path, node_ip=node_ip)

    def call(self, worker: Mapping[str, Any], method: str, args: list[Any], limit_s: float) -> Any:
        """Calls a method of a worker and waits for what it returns."""
        return ray.get(_handle(worker).method(method).remote(*args), timeout=limit_s)

    def start(self, worker: Mapping[str, Any], method: str, args: list[Any]) -> None:
        """Calls a method of a worker and leaves it running."""
        self._in_flight.append(_handle(worker).method(method).remote(*args))

    def step(self, workers: list[Mapping[str, Any]], method: str, args: list[Any], limit_s: float) -> list[Any]:
        """Calls a method of every worker at once: {"value", "seconds"} or {"error"} of each, in their order."""
        began = time.monotonic()
        answers: list[Any] = [{"error": f"no answer within {limit_s:g} s"} for _ in workers]
        running: dict[Any, int] = {}
        for place, worker in enumerate(workers):
            try:
                running[_handle(worker).options(follow=False).method(method).remote(*args)] = place
            except WorkerGone as error:
                answers[place] = {"error": str(error)}
        while running:
            left_s = limit_s - (time.monotonic() - began)
            done, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, left_s))
            if not done:
                break
            for ref in done:
                answers[running.pop(ref)] = _outcome(ref, time.monotonic() - began)
        return answers

    def booked(self, expected: Mapping[str, float]) -> dict[str, float]:
        """What Ray says is taken of its nodes: as ``expected`` as soon as it says so, else what it said last."""
        deadline = time.monotonic() + _BOOKS_S
        while True:
            whole = _cluster_resources()
            left = _available_resources()
            taken = {name: whole.get(name, 0.0) - left.get(name, 0.0) for name in expected}
            if all(abs(taken[name] - expected[name]) < 1e-3 for name in expected) or time.monotonic() > deadline:
                return taken
            time.sleep(0.05)  # Ray has no event for this.

    def groups(self) -> dict[str, list[dict[str, float]]]:
        """Ray's own table of placement groups: id → bundles, of those that are not removed."""
        table = ray.util.placement_group_table()
        return {
            group_id: list(entry["bundles"].values())
            for group_id, entry in table.items()
            if entry["state"] != "REMOVED"
        }

    def actors(self) -> list[str]:
        """Names of all actors alive, in every namespace."""
        found = ray.util.list_named_actors(all_namespaces=True)
        return sorted(entry["name"] if isinstance(entry, dict) else entry for entry in found)

    def actors_left(self, known: list[str]) -> list[str]:
        """Names of actors that are not ``known``: none as soon as they are gone, else those that stayed."""
        deadline = time.monotonic() + _SPARES_S
        while True:
            left = sorted(set(self.actors()) - set(known))
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)  # Ray has no event for this either.


def main() -> None:
    """Answers requests until the input ends."""
    # Ray and its C++ write to stdout as they like: what they get is stderr, the answers go to a copy.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    probe = Probe()
    operations: dict[str, Callable[..., Any]] = {
        name: getattr(probe, name)
        for name in ("connect", "call", "start", "step", "booked", "groups", "actors", "actors_left")
    }
    for line in sys.stdin:
        request = json.loads(line)
        number, operation = request.pop("id"), operations[request.pop("op")]
        _answer(answers, number, operation, request)


def _outcome(ref: Any, seconds: float) -> dict[str, Any]:
    try:
        value = ray.get(ref)
    except Exception as error:  # noqa: BLE001 - whatever the user's method or its end raised is the outcome.
        first = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {first[0] if first else ''}"}
    return {"value": _shown(value), "seconds": seconds}


def _shown(value: Any) -> Any:
    """What a user's method returned, as far as it can be shown: plain figures, or its text."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items() if isinstance(item, bool | int | float | str)}
    return repr(value)[:200]


def _answer(answers: TextIO, number: int, operation: Callable[..., Any], arguments: dict[str, Any]) -> None:
    try:
        answer = {"id": number, "value": operation(**arguments)}
    except Exception as error:  # noqa: BLE001 - whatever it is, the demonstration is told and decides.
        answer = {"id": number, "error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _handle(worker: Mapping[str, Any]) -> WorkerHandle:
    return WorkerHandle(**{**worker, "devices": tuple(worker["devices"])})


if __name__ == "__main__":
    main()
