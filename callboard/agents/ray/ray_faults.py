"""Why Ray could not be started or joined: the kind of the fault, and its cause out of what Ray printed.

Ray prints dozens of lines, a traceback among them, and the cause is seldom the last one. What kind it is decides
whether another try can help (docs/agents.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from callboard.model.ray_fault import MAX_TEXT, RayFault, RayFaultCode


class RayNodeError(Exception):
    """The node could not be started, or not used; the text is one sentence."""

    def __init__(self, why: str, code: RayFaultCode = RayFaultCode.START_FAILED, *, permanent: bool = False) -> None:
        super().__init__(why)
        self.fault = RayFault(code, why[:MAX_TEXT], permanent)


class PortTaken(RayNodeError):
    """A port that was asked for is in use (NJ-04)."""

    def __init__(self, why: str) -> None:
        super().__init__(why, RayFaultCode.PORT_TAKEN, permanent=True)


_FILES = (
    r"AF_UNIX path|Permission ?(Error|denied)|NotADirectory|Not a directory|Read-only file system|FileExistsError"
    r"|FileNotFoundError|No such file or directory|IsADirectory"
)
_SILENCE = (
    r"connect to GCS|GCS to become available|cluster ID from GCS|Connection refused|Could not connect"
    r"|Unable to connect|No route to host|Name or service not known|Failed to get node info"
)
_KINDS: tuple[tuple[str, RayFaultCode, bool], ...] = (
    (r"version mismatch", RayFaultCode.VERSION_MISMATCH, True),
    (r"no module named '?ray|cannot import name .* from '?ray", RayFaultCode.NOT_INSTALLED, True),
    (r"AuthenticationError|Unauthenticated|InvalidAuth|RAY_AUTH_", RayFaultCode.NOT_AUTHENTICATED, True),
    (_FILES, RayFaultCode.FILES, True),
    (r"No such option|Invalid value|extra argument|requires an argument|Usage:", RayFaultCode.BAD_OPTION, True),
    (r"already (in use|occupied|running)|port conflict", RayFaultCode.PORT_TAKEN, False),
    (_SILENCE, RayFaultCode.UNREACHABLE, False),
    (r"ValueError", RayFaultCode.BAD_OPTION, True),
)
"""Pattern, kind, and whether the same would happen at the next try. The first that matches counts."""

_TRANSIENT_FILES = re.compile(r"No space left|Too many open files|temporarily unavailable")

_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Failure)\b:?.*|Error: .*")
"""The line of a traceback that names the error, or what the command line says of an option."""

_LOG_PREFIX = re.compile(r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d,\d+[^]\n]*?(?:-- |\] )")

_LAST = 6
"""Lines that are shown where none of them is a cause."""


def fault_of(error: Exception) -> RayFault:
    """What kept the node out of Ray."""
    return error.fault if isinstance(error, RayNodeError) else _classified(str(error), str(error))


def start_error(what: str, said: Sequence[str]) -> RayNodeError:
    """The error of a `ray start` that failed.

    Args:
        what: what happened, "ray start ended with exit code 1".
        said: the lines that it printed, oldest first.
    """
    cause = _cause([_LOG_PREFIX.sub("", line) for line in said if line])
    fault = _classified(f"{what}: {cause or 'it printed nothing'}", cause or " ".join(said))
    if fault.code is RayFaultCode.START_FAILED:
        fault = _classified(fault.message, "\n".join(said))
    return RayNodeError(fault.message, fault.code, permanent=fault.permanent)


def os_error(what: str, error: OSError) -> RayNodeError:
    """The error of something that the system refused before Ray ran."""
    known = _classified("", f"{type(error).__name__}: {error}")
    code = known.code if known.code is RayFaultCode.FILES else RayFaultCode.START_FAILED
    return RayNodeError(f"{what}: {error.strerror or error}", code, permanent=known.permanent)


def _classified(message: str, text: str) -> RayFault:
    for pattern, code, permanent in _KINDS:
        if re.search(pattern, text, re.IGNORECASE):
            passing = code is RayFaultCode.FILES and _TRANSIENT_FILES.search(text)
            return RayFault(code, message[:MAX_TEXT], permanent and not passing)
    return RayFault(RayFaultCode.START_FAILED, message[:MAX_TEXT])


def _cause(lines: Sequence[str]) -> str:
    """The last error that is named with what follows of it, else the last lines."""
    at = next((index for index in range(len(lines) - 1, -1, -1) if _ERROR.match(lines[index])), None)
    chosen = lines[-_LAST:] if at is None else lines[at : at + _LAST + 2]
    return " ".join(" ".join(chosen).split())[: MAX_TEXT - 100]
