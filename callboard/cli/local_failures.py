"""What do failures of a cluster on this machine say to a person?"""

from __future__ import annotations

from callboard.cli.failures import BAD_INPUT, UNREACHABLE, CommandFailed, Failure
from callboard.cli.local.children import ChildEnded
from callboard.cli.local.cluster import NotReady, PortTaken
from callboard.cli.local.records import AlreadyUp
from callboard.cli.local.taking_down import Leftovers

LOCAL_ERRORS = (AlreadyUp, ChildEnded, Leftovers, NotReady, PortTaken)


def in_words(error: AlreadyUp | ChildEnded | Leftovers | NotReady | PortTaken) -> CommandFailed:
    """``error`` as one that says what, why and what to do."""
    return CommandFailed(_failure(error))


def _failure(error: AlreadyUp | ChildEnded | Leftovers | NotReady | PortTaken) -> Failure:
    match error:
        case AlreadyUp():
            record = error.record
            return Failure(
                f"Cluster {record.name} is up already.",
                f"Its controller is at {record.controller}.",
                f"End it with `callboard down {record.name}`, or start another with --name and --port.",
            )
        case PortTaken():
            return Failure(
                f"Port {error.port} on {error.host} is in use.",
                f"It is the one for {error.needed_by}.",
                "Choose another with --port, or end what listens there.",
            )
        case ChildEnded():
            return Failure(
                f"The {error.role} {_how(error.exit_code)}.",
                "\n       ".join(("its last lines were:", *error.last_lines)),
                "Correct what it says and start again.",
                error.exit_code if error.exit_code in (BAD_INPUT, UNREACHABLE) else 1,
            )
        case NotReady():
            return Failure(
                f"The cluster was not ready within {error.timeout_s:g} s.",
                f"{'; '.join(error.missing)}.",
                "Give it longer with --timeout; run `callboard controller` and `callboard agent` by hand to see more.",
            )
        case Leftovers():
            return Failure("Not everything of the cluster could be removed.", f"{error}.", "Look at what is left.")


def _how(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
