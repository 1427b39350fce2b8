"""A trainer that looks its worker up all the time while its job is cancelled and submitted again:
`python -m tests.support.lookups ADDRESS TOKEN_PATH NODE_IP ROUNDS`.

One JSON line at the end: what came of every lookup.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import ray

from callboard.client.errors import WorkerGone
from callboard.client.sync import SyncClient
from callboard.client.workers import connect_ray
from callboard.wire.refusals import NotFound

JOB = {
    "name": "again",
    "pool": "rlhf",
    "components": [{"name": "w", "actor": "tests.support.actors:Plain", "resources": {"cpu": 1, "gpu": 1}}],
}

WAIT_S = 90.0


@dataclass(frozen=True)
class Lookup:
    """One lookup by the job's name, and one call of what was found."""

    asked_s: float
    took_s: float
    answered: tuple[str, int] | None
    """Job uid and generation of the worker that answered the call."""
    error: str
    """Type of what was raised instead."""
    dying: bool
    """Whether an actor was handed out although the cancel of its job had been acknowledged."""


def look_up(client: SyncClient, cancelled: Mapping[str, float]) -> Lookup:
    """Find the worker by the name of its job and call it.

    Args:
        client: asks the controller.
        cancelled: when the cancel of each job was acknowledged, on the monotonic clock.
    """
    began_s = time.monotonic()
    going = set(cancelled)
    answered, error, dying = None, "", False
    try:
        (handle,) = client.get_job("again").workers() or (None,)
        if handle is None:
            error = "NoWorkers"
        else:
            handle = handle.options(follow=False)
            handle.actor()
            dying = handle.uid in going
            seen = ray.get(handle.environment.remote(), timeout=WAIT_S)
            answered = (seen["CALLBOARD_JOB"], int(seen["CALLBOARD_GENERATION"]))
            assert answered == (handle.uid, handle.generation), "another worker than the one that was found answered"
    except (NotFound, WorkerGone, ray.exceptions.RayActorError) as raised:
        error = type(raised).__name__
    except ray.exceptions.RayTaskError as raised:
        error = type(raised.cause).__name__
    return Lookup(began_s, time.monotonic() - began_s, answered, error, dying)


def main() -> None:
    address, token_path, node_ip, rounds = sys.argv[1:]
    lookups: list[Lookup] = []
    cancelled: dict[str, float] = {}
    uids: list[str] = []
    enough = threading.Event()
    problem: list[BaseException] = []

    def look() -> None:
        try:
            with SyncClient(address) as client:
                while not enough.is_set():
                    lookups.append(look_up(client, cancelled))
        except BaseException as raised:  # noqa: BLE001 - it is told at the end
            problem.append(raised)

    with SyncClient(address) as client:
        connect_ray(client.stats().ray_address, token_path=token_path, node_ip=node_ip)
        looking = threading.Thread(target=look, daemon=True)
        job = client.submit(JOB)
        looking.start()
        try:
            for _ in range(int(rounds)):
                uids.append(job.job.uid)
                job.running(timeout=WAIT_S)
                seen = len(lookups)
                until_s = time.monotonic() + WAIT_S
                while len(lookups) < seen + 2 and not problem:
                    if time.monotonic() > until_s:
                        raise TimeoutError("a lookup hangs")
                    time.sleep(0.001)  # Another thread counts.
                job.cancel()
                cancelled[job.job.uid] = time.monotonic()
                job.finished(timeout=WAIT_S)
                job = client.submit(JOB)
            uids.append(job.job.uid)
            job.running(timeout=WAIT_S)
        finally:
            enough.set()
            looking.join(WAIT_S)
        job.cancel()
        job.finished(timeout=WAIT_S)
    if problem:
        raise problem[0]
    shown = {"uids": uids, "cancelled": cancelled, "lookups": [asdict(each) for each in lookups]}
    sys.stdout.write(json.dumps(shown) + "\n")


if __name__ == "__main__":
    main()
