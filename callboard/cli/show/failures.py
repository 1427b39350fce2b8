"""The failures that a person can do something about: the words of each kind, and which exit code it has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from callboard._version import __version__
from callboard.cli.show.exits import BAD_INPUT, NO_PLAN, UNREACHABLE, CommandFailed, Failure, of_faults
from callboard.client.errors import (
    JobEnded,
    NoController,
    NoRay,
    NoResult,
    OlderController,
    RequestTooLarge,
    SeveralControllers,
    Unreachable,
    WaitTimeout,
)
from callboard.model.faults import InvalidInput
from callboard.security.contexts import BadContext, current_context
from callboard.security.places import UnsafeRunDirectory
from callboard.security.tokens import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, BadToken
from callboard.wire.refusals import (
    AlreadyExists,
    CallboardError,
    DeadlineExceeded,
    ErrorReason,
    EtagMismatch,
    InternalError,
    InvalidRequest,
    InventoryChanged,
    LimitReached,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    PoolInUse,
    QuotaExceeded,
    Unavailable,
    Unschedulable,
)


def failure_of(error: Exception) -> Failure:
    """``error`` in words. The sentences name no controller: :func:`~callboard.cli.show.exits.lines` adds it."""
    for kind, describe in _DESCRIPTIONS:
        if isinstance(error, kind):
            return describe(error)
    return Failure(str(error), "the call was refused.", "Look at `callboard events`.")


def _invalid_request(error: CallboardError) -> Failure:
    listed = "\n       ".join(str(fault) for fault in error.faults) or str(error)
    return Failure(
        "The controller refused the input; nothing was done.", listed, "Correct it and try again.", BAD_INPUT
    )


def _no_controller(error: NoController) -> Failure:
    if error.ended:
        name, address, directory = error.ended[0]
        return Failure(
            f"The controller of cluster {name}, at {address}, has ended.",
            "The rest of the cluster may still run: what the record of it names was not taken down.",
            f"Start it again with `callboard controller --listen {address} --state-dir {directory}/controller`, and it "
            f"finds what runs; or end the rest with `callboard down {name}`.",
            UNREACHABLE,
        )
    return Failure(
        "There is no controller to talk to.",
        f"None is stated, and none is recorded in {error.run_directory}.",
        "Start a cluster with `callboard up`, or name a controller with --controller or CALLBOARD_CONTROLLER.",
        UNREACHABLE,
    )


def _several(error: SeveralControllers) -> Failure:
    listed = ", ".join(f"{address} (cluster {name})" for name, address in error.found)
    return Failure(
        "It is not clear which controller is meant.",
        f"{len(error.found)} run on this machine: {listed}.",
        f"Name one, for example with --controller {error.found[0][1]}.",
        BAD_INPUT,
    )


def _too_large(error: RequestTooLarge) -> Failure:
    return Failure(
        "The input is too large; nothing was sent.",
        f"It has {error.size} bytes as a message; the limit is {error.limit} bytes.",
        "Keep large data in a file or a bucket and pass its path.",
        BAD_INPUT,
    )


def _inventory_changed(error: CallboardError) -> Failure:
    return Failure(
        "The placement was planned for a cluster that has changed since; nothing was started.",
        f"{error}.",
        "Plan again with `callboard autoplace`, and submit what it answers.",
    )


def _changed_meanwhile(error: CallboardError) -> Failure:
    return Failure(
        "It changed since it was read; nothing was done.", f"{error}.", "Look at what it is now, then try again."
    )


def _pool_in_use(error: CallboardError) -> Failure:
    return Failure(
        "The pool is in use; nothing was done.",
        _sentence(str(error)),
        "End its jobs first, or cancel them with --force.",
    )


def _unreachable(error: Unreachable) -> Failure:
    return Failure(
        f"No controller answers at {error.address}.",
        error.detail or "The connection was refused.",
        "Check that it runs (`callboard up` starts one here), or name another with --controller. If it listens with "
        "TLS, name its authority with --tls-ca, and a certificate of your own or a token.",
        UNREACHABLE,
    )


def _older(error: OlderController) -> Failure:
    return Failure(
        "The controller is older than this command line and can't do this.",
        f"It does not know the call {error.call}; version {__version__}, which the command line has, does.",
        f"Install version {__version__} where the controller runs, and start it again on its state directory: what "
        "runs goes on. `callboard version --check` shows the version of each program.",
    )


def _unavailable(error: CallboardError) -> Failure:
    reason = error.error.reason
    if reason is ErrorReason.STORE_FAILED:
        remedy = "Look at the log of the controller and at the disk of its state directory."
    elif reason is ErrorReason.STOPPING:
        remedy = "It is being stopped; try again once it runs again."
    else:
        remedy = "Try again in a moment; `callboard node list` shows which agents are there."
    return Failure("The controller answered that it can't do this now.", _sentence(str(error)), remedy, UNREACHABLE)


def _deadline(error: CallboardError) -> Failure:
    return Failure(
        "The call was not finished in time.",
        _sentence(str(error)) if str(error) else "Its deadline passed.",
        "Look at `callboard status`; the call may have had its effect. If that hangs, too, look at the controller's "
        "log.",
        UNREACHABLE,
    )


def _quota(error: CallboardError) -> Failure:
    listed = "\n       ".join(
        short.description
        if short.subject.partition("/")[2] in short.description
        else f"{short.subject}: {short.description}"
        for short in error.error.quota
    )
    return Failure(
        "The quota can never hold the request.",
        listed or str(error),
        "Ask for less, or raise the quota of the pool." + _would_help(error),
        NO_PLAN,
    )


def _unschedulable(error: CallboardError) -> Failure:
    return Failure(
        "No node could ever hold the request.",
        str(error),
        "Ask for less per worker, add a node (`callboard node list` shows what there is), or set wait_for_nodes."
        + _would_help(error),
        NO_PLAN,
    )


def _would_help(error: CallboardError) -> str:
    """The smallest changes by which the request would be taken, as the controller tells them."""
    told = error.error.metadata
    # A map of protobuf has no order; their names have numbers.
    names = sorted((name for name in told if name.startswith("unblock.")), key=lambda name: (len(name), name))
    changes = [told[name] for name in names]
    which = "change that would help" if len(changes) == 1 else "changes that would help, all together"
    return f" The smallest {which}: {'; '.join(changes)}." if changes else ""


_THERE_IS: Mapping[str, str] = MappingProxyType(
    {
        "jobs": "`callboard job list --all` shows the jobs there are.",
        "pools": "`callboard pool create {name}` makes it; `callboard pool list` shows the pools there are.",
        "nodes": "`callboard node list --all` shows the nodes there are.",
        "workers": "`callboard job get {name}` shows its workers.",
        "placementGroups": "`callboard pg list` shows the placement groups there are.",
    }
)
"""What helps where something of a kind is not there."""


def _not_found(error: CallboardError) -> Failure:
    kind, _, name = error.error.metadata.get("subject", "").partition("/")
    remedy = _THERE_IS.get(kind, "List what there is with the `list` verb.").format(name=name.partition("/")[0])
    return Failure(_sentence(str(error)), "The controller knows nothing of that name.", remedy)


def _exists(error: CallboardError) -> Failure:
    return Failure("The name is taken by something else.", str(error), "Choose another name, or change what there is.")


def _limit(error: CallboardError) -> Failure:
    return Failure("A limit of the controller is reached.", str(error), "Wait until it has less to do, then try again.")


def _internal(error: CallboardError) -> Failure:
    return Failure(
        "Internal error in the controller.",
        str(error),
        "This is a bug in callboard: look at the controller's log and report it.",
    )


def _bad_context(error: BadContext) -> Failure:
    return Failure(
        "The context can't be used; nothing was sent.",
        _sentence(str(error)),
        "Choose one with `callboard context use` or --context, or name the controller with --controller.",
        BAD_INPUT,
    )


def _not_authenticated(error: CallboardError) -> Failure:
    why, _, remedy = str(error).rpartition(". ")
    used = next((name for name in (TOKEN_FILE_VARIABLE, TOKEN_VARIABLE) if os.environ.get(name)), "")
    if used:
        remedy = f"The token of {used} was sent; unset it where the controller is your own. {remedy}"
    elif (context := current_context()) is not None:
        remedy = f"Context {context.name} is in use: log in again with `callboard login`, or leave it with "
        remedy += "`callboard --context none`"
    return Failure("The controller does not know who is calling; nothing was done.", _sentence(why), _sentence(remedy))


def _not_allowed(error: CallboardError) -> Failure:
    why, _, remedy = str(error).rpartition(". ")
    return Failure("You are not allowed to do this; nothing was done.", _sentence(why), _sentence(remedy))


def _bad_token(error: BadToken) -> Failure:
    return Failure(
        "The token or certificate can't be used; nothing was sent.",
        str(error),
        "Correct it, or leave it out to use the token of a controller that this account runs on this machine.",
        BAD_INPUT,
    )


_WHAT_THEN: Mapping[ErrorReason, str] = MappingProxyType(
    {
        ErrorReason.WRONG_STATE: "Its state forbids this: look at what it is now (`callboard job list`, `node list`).",
        ErrorReason.PREEMPTION_REFUSED: "Name another job, or raise the priority; `callboard policy get` shows rules.",
        ErrorReason.VERSION_MISMATCH: "Install the version of callboard, Ray and Python that the others have.",
        ErrorReason.REVISION_COMPACTED: "Read what is there now, and follow from then on.",
    }
)
"""What helps after the refusals that have no words of their own."""


def _refused(error: CallboardError) -> Failure:
    remedy = _WHAT_THEN.get(error.error.reason, "Look at `callboard status` and at the controller's log.")
    return Failure("The controller refused the call.", _sentence(str(error)), remedy)


def _job_ended(error: JobEnded) -> Failure:
    trace = f"\n{error.traceback.rstrip()}" if error.traceback else ""
    stderr = f"\nIts stderr ends with:\n{error.stderr_tail.rstrip()}" if error.stderr_tail else ""
    return Failure(
        f"Job {error.job} ended as {error.state}.",
        f"{error.reason}{trace}{stderr}",
        f"`callboard job get {error.job}` shows what it has been through.",
    )


def _no_result(error: NoResult) -> Failure:
    return Failure(
        f"Job {error.job} succeeded, and results are missing.",
        "\n       ".join(error.missing),
        error.remedy,
    )


def _no_ray(_: NoRay) -> Failure:
    return Failure(
        "This cluster has no Ray.",
        "Its nodes host workers as plain processes.",
        "Start one with `callboard up --runtime ray`.",
    )


def _wait_timeout(error: WaitTimeout) -> Failure:
    return Failure(
        f"Job {error.job} did not reach {error.waited_for} within {error.timeout_s:g} s; it goes on.",
        "; ".join(error.reasons) or f"It is {error.state}.",
        f"`callboard job explain {error.job}` says what would unblock it.",
    )


def _unsafe(error: UnsafeRunDirectory) -> Failure:
    return Failure(
        f"The run directory {error.path} can't be trusted.",
        f"It {error.why}.",
        "Remove it, or name another with CALLBOARD_RUN_DIR.",
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def _own_words(error: CommandFailed) -> Failure:
    return error.failure


# The first that matches counts: subclasses stand before their bases.
_DESCRIPTIONS: tuple[tuple[type[Exception], Callable[..., Failure]], ...] = (
    (CommandFailed, _own_words),
    (BadToken, _bad_token),
    (BadContext, _bad_context),
    (InvalidInput, of_faults),
    (NoController, _no_controller),
    (SeveralControllers, _several),
    (RequestTooLarge, _too_large),
    (Unreachable, _unreachable),
    (OlderController, _older),
    (Unavailable, _unavailable),
    (InvalidRequest, _invalid_request),
    (DeadlineExceeded, _deadline),
    (QuotaExceeded, _quota),
    (Unschedulable, _unschedulable),
    (NotFound, _not_found),
    (AlreadyExists, _exists),
    (EtagMismatch, _changed_meanwhile),
    (InventoryChanged, _inventory_changed),
    (PoolInUse, _pool_in_use),
    (LimitReached, _limit),
    (InternalError, _internal),
    (NotAuthenticated, _not_authenticated),
    (NotAllowed, _not_allowed),
    (CallboardError, _refused),
    (JobEnded, _job_ended),
    (NoRay, _no_ray),
    (NoResult, _no_result),
    (WaitTimeout, _wait_timeout),
    (UnsafeRunDirectory, _unsafe),
)

EXPECTED: tuple[type[Exception], ...] = tuple(kind for kind, _ in _DESCRIPTIONS)
"""Errors that a person can do something about. Anything else is a defect and shows its traceback."""
