"""Errors of the client's side. What a controller refuses is in :mod:`callboard.wire.refusals`.

Each text says what happened, why, and which method or option of the SDK helps.
"""

from __future__ import annotations

from typing import Any

from callboard._version import __version__
from callboard.wire.refusals import CallboardError, Unavailable


class NoController(Exception):
    """No address is stated and no controller runs on this machine.

    Attributes:
        run_directory: where running clusters were looked for.
        ended: (name, address, directory) of clusters that are recorded there and whose controller runs no more.
    """

    def __init__(self, *, run_directory: str, ended: tuple[tuple[str, str, str], ...] = ()) -> None:
        which = f"; that of cluster {ended[0][0]} has ended" if ended else ""
        super().__init__(
            f"found no controller: no address was given, CALLBOARD_CONTROLLER is not set, and {run_directory} records "
            f"no running cluster{which}. Give the client an address, or start a cluster with `callboard up` or local()"
        )
        self.run_directory = run_directory
        self.ended = ended


class SeveralControllers(Exception):
    """No address is stated and several controllers run on this machine.

    Attributes:
        found: (cluster name, address) of each.
    """

    def __init__(self, found: tuple[tuple[str, str], ...]) -> None:
        listed = ", ".join(f"{name} at {address}" for name, address in found)
        super().__init__(
            f"{len(found)} controllers run on this machine: {listed}. Give the client the address of one, or set "
            "CALLBOARD_CONTROLLER"
        )
        self.found = found


class Unreachable(Unavailable):
    """Nobody answered. A controller that answers that it can't raises :class:`Unavailable` itself.

    Attributes:
        address: its address.
        detail: what the connection said.
    """

    def __init__(self, *, address: str, detail: str) -> None:
        super().__init__(f"no controller answers at {address}: {detail}")
        self.address = address
        self.detail = detail


class OlderController(CallboardError):
    """The controller does not know a call that this client has. Nothing was done.

    Attributes:
        address: its address.
        call: the call, "SchedulerService/GetDemand".
    """

    code = "UNIMPLEMENTED"

    def __init__(self, *, address: str, call: str) -> None:
        super().__init__(
            f"the controller at {address} does not know the call {call}: it is older than this client. Bring it to "
            f"version {__version__}, which this client has, or a later one"
        )
        self.address = address
        self.call = call


class ClusterFailed(Exception):
    """The cluster that ``local()`` should start did not start. The text is what `callboard up` said."""


class JobEnded(Exception):
    """A job ended before it reached what was waited for.

    Attributes:
        job: name of the job.
        state: SUCCEEDED, FAILED or CANCELLED.
        reason: why, one sentence.
        traceback: of the worker that failed it; empty: none.
        stderr_tail: end of what that worker wrote to stderr; empty: nothing.
    """

    def __init__(self, *, job: str, state: str, reason: str, traceback: str = "", stderr_tail: str = "") -> None:
        super().__init__(f"job {job} ended as {state}: {reason}; logs() returns what its workers printed")
        self.job = job
        self.state = state
        self.reason = reason
        self.traceback = traceback
        self.stderr_tail = stderr_tail


class NoRay(Exception):
    """The cluster has no Ray: its nodes host workers as plain processes."""

    def __init__(self) -> None:
        super().__init__(
            "the nodes host workers as plain processes, so there is no Ray to connect to; start the cluster with "
            "`callboard up --runtime ray`, or local(runtime='ray'), to call workers"
        )


class NoResult(Exception):
    """A job succeeded, and the results of its entry methods are not all there.

    Attributes:
        job: name of the job.
        missing: for each worker without one, "component/rank: why".
        remedy: what helps.
    """

    def __init__(self, *, job: str, missing: tuple[str, ...], unfit: bool = False) -> None:
        """
        Args:
            unfit: whether one of them returned what can't be kept.
        """
        self.remedy = f"`callboard job get {job}` shows what it has been through."
        if unfit:
            self.remedy = "Return JSON of at most 64 KiB from `entry`, and write larger results to a file."
        super().__init__(f"job {job} has no result of {'; '.join(missing)}. {self.remedy}")
        self.job = job
        self.missing = missing


class WaitTimeout(TimeoutError):
    """What was waited for did not happen in time.

    Attributes:
        job: name of the job.
        waited_for: what was waited for.
        timeout_s: how long.
        state: state the job is in.
        reasons: what it waits for, a sentence each.
    """

    def __init__(self, *, job: str, waited_for: str, timeout_s: float, state: str, reasons: tuple[str, ...]) -> None:
        why = "; ".join(reasons)
        super().__init__(
            f"job {job} did not reach {waited_for} within {timeout_s:g} s: it is {state}"
            + (f" ({why})" if why else "")
            + "; explain() says what would help"
        )
        self.job = job
        self.waited_for = waited_for
        self.timeout_s = timeout_s
        self.state = state
        self.reasons = reasons


class RequestTooLarge(Exception):
    """A request is larger than a message may be; nothing was sent.

    Attributes:
        what: the call, "JobService/SubmitJob".
        size: of the request in bytes.
        limit: most bytes of a message.
    """

    def __init__(self, *, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"the request of {what} has {size} bytes; a message has at most {limit}. Keep large data in a file or an "
            "object store, and pass its path"
        )
        self.what = what
        self.size = size
        self.limit = limit


class WorkerGone(Exception):
    """The worker a handle stands for is gone, and no later generation takes its place (yet).

    Attributes:
        worker: which worker, "job/component/rank".
        reason: what became of it or of its job, one sentence.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker} is gone: {reason}")
        self.worker = worker
        self.reason = reason

    @property
    def job(self) -> str:
        """Name of its job."""
        return self.worker.split("/")[0]

    @property
    def component(self) -> str:
        """Its component."""
        return self.worker.split("/")[1]

    @property
    def rank(self) -> int:
        """Its rank there."""
        return int(self.worker.split("/")[2])

    def __reduce__(self) -> Any:
        return WorkerGone, (self.worker, self.reason)
