"""The failures of a cluster on this machine, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer

from callboard.cli.local.children import ChildEnded
from callboard.cli.local.cluster import NotReady, PortTaken
from callboard.cli.local.cluster_lock import ClusterGone, ClusterLocked
from callboard.cli.local.growth import NoPlaceLeft, NotGrowable
from callboard.cli.local.interrupts import Interrupts, run_interruptible
from callboard.cli.local.records import AlreadyUp
from callboard.cli.local.taking_down import Leftovers
from callboard.cli.show.exits import BAD_INPUT, INTERRUPTED, UNREACHABLE, CommandFailed
from callboard.cli.show.verb_guard import failing_in_words

Result = TypeVar("Result")

LocalError = (
    AlreadyUp | ChildEnded | ClusterGone | ClusterLocked | Leftovers | NoPlaceLeft | NotGrowable | NotReady | PortTaken
)
LOCAL_ERRORS = (
    *(AlreadyUp, ChildEnded, ClusterGone, ClusterLocked, Leftovers, NoPlaceLeft, NotGrowable, NotReady, PortTaken),
)


def run_locally(
    main: Callable[[Interrupts], Coroutine[Any, Any, Result]], interrupted: Callable[[], int] = lambda: INTERRUPTED
) -> Result:
    """Runs what works on a cluster of this machine, and tells in words what fails.

    Args:
        interrupted: called when a signal ended it; returns the exit code.
    """
    with failing_in_words():
        try:
            return run_interruptible(main)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None
        except LOCAL_ERRORS as error:
            raise in_words(error) from error


def in_words(error: LocalError) -> CommandFailed:
    """``error`` as one that says what, why and what to do."""
    match error:
        case ClusterGone() | ClusterLocked() | NoPlaceLeft() | NotGrowable():
            return _of_growth(error)
        case AlreadyUp():
            record = error.record
            return CommandFailed(
                f"Cluster {record.name} is up already.",
                f"Its controller is at {record.controller}."
                if record.is_running()
                else f"Its controller, at {record.controller}, has ended; the rest of it may still run.",
                f"End it with `callboard down {record.name}`, or start another with --name and --port.",
            )
        case PortTaken():
            return CommandFailed(
                f"Port {error.port} on {error.host} is in use.",
                f"It is the one for {error.needed_by}"
                + (f"; the controller of cluster {error.cluster} listens there." if error.cluster else "."),
                "Choose another (--port, --ray-port, --dashboard-port, --port-base), or end what listens there.",
            )
        case ChildEnded():
            return CommandFailed(
                f"The {error.role} {_how(error.exit_code)}.",
                "\n       ".join(("its last lines were:", *error.last_lines)),
                "Correct what it says and start again.",
                error.exit_code if error.exit_code in (BAD_INPUT, UNREACHABLE) else 1,
            )
        case NotReady():
            if error.timeout_s is None:
                why = f"{'; '.join(error.missing)}."
                return CommandFailed("The cluster can't get ready.", why, "Correct what it says and start again.")
            return CommandFailed(
                f"The cluster was not ready within {error.timeout_s:g} s.",
                f"{'; '.join(error.missing)}.",
                "Give it longer with --timeout; run `callboard controller` and `callboard agent` by hand to see more.",
            )
        case Leftovers():
            return CommandFailed(
                "Not everything of the cluster could be removed.", f"{error}.", "Look at what is left."
            )


def _how(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _of_growth(error: ClusterGone | ClusterLocked | NoPlaceLeft | NotGrowable) -> CommandFailed:
    match error:
        case ClusterGone():
            return CommandFailed(
                "The cluster does not run any more.",
                f"Nothing of it is left in {error.directory}.",
                "Start one with `callboard up` or scripts/start_ray_cluster.sh.",
                UNREACHABLE,
            )
        case NotGrowable():
            return CommandFailed(
                f"Cluster {error.record.name} can't be added to from here.",
                "It was not started by `callboard up`, so what another node of it should be is not known.",
                f"Start one with `callboard agent --controller {error.record.controller}`.",
            )
        case ClusterLocked():
            return CommandFailed(
                "Failed to get the lock of the cluster.",
                f"{error.path} is held by {error.holder}; {error.attempts} attempts were made.",
                "Try again once that is over.",
            )
        case NoPlaceLeft():
            taken = "; ".join(f"GPU {gpus} by {node}" if gpus else node for gpus, node in error.holders)
            there = f"This machine has {', '.join(error.gpus)}. " if error.gpus else ""
            return CommandFailed(
                "No GPU is left on this machine." if error.gpus else "No place is left on this machine.",
                f"{there}Taken: {taken}.",
                "Let a node go (`callboard node drain NODE`, then end its agent), or add nodes on other machines with "
                "`callboard agent`.",
            )
