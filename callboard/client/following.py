"""The successor of a worker that is gone. The controller knows it; it is asked only when that happens."""

from __future__ import annotations

from callboard.client.errors import RequestTooLarge, WaitTimeout, WorkerGone
from callboard.v1.job_pb2 import Job, Worker, WorkerState
from callboard.wire.refusals import CallboardError, NotFound

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

    def gone(reason: str) -> WorkerGone:
        return WorkerGone(label, reason)

    try:
        async with Client(controller, timeout=max(wait_s, 1.0), retry=wait_s) as client:
            last = await (await client.get_job(uid)).until(
                lambda seen: _successor(seen, component, rank, after) is not None,
                f"a later generation of {component}/{rank}",
                wait_s,
            )
    except NotFound:
        raise gone("its job is no longer known to the controller") from None
    except WaitTimeout as error:
        raise gone(str(error)) from error
    except (CallboardError, RequestTooLarge) as error:
        raise gone(f"and its controller can't say what took its place: {error}") from error
    found = _successor(last, component, rank, after)
    if found is None:
        raise gone(f"its job has ended: {last.state_reason}" if last.state_reason else "its job has ended")
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
