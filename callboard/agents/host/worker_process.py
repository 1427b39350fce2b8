"""The process of a worker host: what the host does to it, and how the user's values become plain ones.

Standard library only: this runs in every worker.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import os
import signal
import stat
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from callboard.agents.host.worker_secrets import Hide, hidden

MAX_CHECKPOINT_BYTES = 1024 * 1024
"""What a journal can carry for every job; a larger state is written by the worker, which returns a URI."""

MAX_TRACEBACK_CHARACTERS = 16 * 1024
"""Stays below the 64 KiB of the contract in UTF-8, whatever the characters are."""

MAX_MESSAGE_CHARACTERS = 1_000
MAX_PROGRESS_CHARACTERS = 4_000

_IN_SHORT = "  In short:\n"
"""Above the line that says what was raised, where a traceback doesn't end with it."""

_OUR_FRAMES = ("callboard.agents.", "concurrent.futures.", "asyncio.", "importlib")
"""Modules between a user's code and the one who reads its traceback."""

_SHOWN_FOLDERS, _SHOWN_CHARACTERS = 6, 80
"""Of the places where a module was looked for; what to do about it must fit behind them."""

_MEMBERS = "callboard.members"
"""Key of a group's checkpoint: what each member left."""

_PR_SET_CHILD_SUBREAPER = 36


class ProgramFailed(Exception):
    """A command could not be started, or failed; the text says all, and where in our code says nothing."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def scratch_of(marker: str) -> Path:
    """Folder for what a worker needs besides its output, under a short path: Ray has sockets there. It goes with the
    worker, whose CALLBOARD_WORKER this is."""
    return Path("/tmp") / f"callboard-{hashlib.sha256(marker.encode()).hexdigest()[:20]}"  # noqa: S108 - made with 0700


def make_scratch(marker: str) -> Path:
    """Make that folder. It may be there already: an agent that was killed during the start had begun it.

    Raises:
        ProgramFailed: somebody else made one of that name.
    """
    folder = scratch_of(marker)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise ProgramFailed(f"{folder} belongs to another user; delete it on this node", 1)
    return folder


def signal_name(number: int) -> str:
    """ "SIGTERM"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def enter_environment(variables: Mapping[str, str], *, contained: bool = False) -> None:
    """Make `variables` the whole environment of this process, besides Ray's own `RAY_*`.

    A Ray worker inherits everything of its raylet; what isn't on the worker's list is not its business.

    Args:
        variables: the environment.
        contained: what is there besides is that of its container's image, and stays.
    """
    for name in set(os.environ) - set(variables):
        if not (contained or name.startswith("RAY_")):
            del os.environ[name]
    os.environ.update(variables)
    # The interpreter read PYTHONPATH before us.
    for folder in reversed(variables.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    time.tzset()


def import_from(folders: Sequence[str]) -> None:
    """Have this process and those that it starts import from these folders first, in this order."""
    sys.path[:0] = folders
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join((*folders, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)


def become_subreaper() -> None:
    """Keep double-forked children below this process, so that ending the tree ends them too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def answer_for_ray(held: Sequence[Sequence[int]]) -> None:
    """Have Ray tell the code of this process which GPUs it holds, as it tells an actor that Ray gave them to.

    For Ray the host has none: its placement group has them, so that others in the group may ask for them.
    `ray.get_gpu_ids()` and `get_accelerator_ids()` look into one method of Ray's worker object, which is replaced;
    `get_assigned_resources()` gets the amount. A Ray without these (tests/agents/test_ray.py notices) is left alone
    and told of, for frameworks would believe that there is no GPU.

    Args:
        held: (position among the devices of the node's Ray, thousandths) of each; nothing is done without any.
    """
    ray: Any = sys.modules.get("ray")
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    worker = getattr(worker, "global_worker", None)
    context: Any = getattr(getattr(ray, "runtime_context", None), "RuntimeContext", None)
    if not held or not getattr(worker, "connected", False):
        return  # a plain process has no Ray to ask
    ask, assigned = "get_accelerator_ids_for_accelerator_resource", "get_assigned_resources"
    if not (
        hasattr(worker, ask) and hasattr(worker, "original_visible_accelerator_ids") and hasattr(context, assigned)
    ):
        version = getattr(ray, "__version__", "")
        text = (
            f"callboard doesn't know Ray {version}: ray.get_gpu_ids() finds no GPU; read CUDA_VISIBLE_DEVICES instead"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    rays_ids, rays_amounts = getattr(worker, ask), getattr(context, assigned)
    positions = [position for position, _ in held]

    def ids(resource_name: str, resource_regex: str) -> list[Any]:
        if resource_name != "GPU":
            found: list[Any] = rays_ids(resource_name, resource_regex)
            return found
        # Where the node's Ray was given a list of devices, it names them by that.
        listed = worker.original_visible_accelerator_ids.get("GPU")
        if listed is None or max(positions) >= len(listed):
            return list(positions)
        return [str(listed[position]) for position in positions]

    def amounts(self: object) -> dict[str, Any]:
        return {**rays_amounts(self), "GPU": sum(milli for _, milli in held) / 1000}

    setattr(worker, ask, ids)
    setattr(context, assigned, amounts)


def load_class(path: str) -> type:
    """The class at "pkg.module:Class"; the plain one of what `@ray.remote` made of it."""
    module, _, name = path.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            # The user's module was found, one that it imports was not.
            raise ModuleNotFoundError(f"{error}, which {module} imports; {_searched()}", name=error.name) from error
        raise ModuleNotFoundError(f"{error}; {_searched()}", name=error.name) from None
    found: Any = imported
    for part in name.split("."):
        if not hasattr(found, part):
            # Another module of that name may have come first.
            place = getattr(imported, "__file__", None) or "a directory without code"
            raise AttributeError(f"{module} has no {name}; it was imported from {place}")
        found = getattr(found, part)
    found = getattr(found, "__ray_actor_class__", found)
    if not isinstance(found, type):
        raise TypeError(f"{path} is not a class but {type(found).__name__}; name the class itself")
    return found


def _searched() -> str:
    """Where modules were looked for, and how a directory comes to be among those places."""
    standard = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    standard += [folder / "lib-dynload" for folder in standard]
    # Anything may stand in the path; this form never raises.
    there = [each for each in dict.fromkeys(sys.path) if os.path.isdir(each or ".")]  # noqa: PTH112
    folders = [folder for each in there if (folder := Path(each)) not in standard]
    more = f" and {len(folders) - _SHOWN_FOLDERS} more" if len(folders) > _SHOWN_FOLDERS else ""
    named = [str(folder) for folder in folders[:_SHOWN_FOLDERS]]
    listed = ", ".join(each if len(each) <= _SHOWN_CHARACTERS else f"…{each[-_SHOWN_CHARACTERS:]}" for each in named)
    return (
        f"the worker looked in {listed}{more}. Send the directory with the component (working_dir: the/directory), "
        "name one that is on every node (env: {PYTHONPATH: /the/directory}), or install the package "
        f"for {sys.executable}"
    )


@dataclass(frozen=True)
class StopNotice:
    """What `cancel(notice)` and `checkpoint(notice)` are told of the stop they are called for."""

    reason: str
    """Why, for people: "preempted by train-00", or what somebody gave as reason."""
    kind: str
    """"preempt", "drain", "cancel", "complete", "failure", "scale" or "agent" (the node leaves)."""
    deadline: float
    """When the worker is killed at the latest, as `time.time()` counts."""

    @property
    def seconds_left(self) -> float:
        """Seconds until then."""
        return max(0.0, self.deadline - time.time())


def noticed(function: Callable[..., Any], job: str, notice: StopNotice | None) -> Callable[[], Any]:
    """A stop hook, ready to call: `cancel()`, `cancel(job)`, `cancel(notice)` or `cancel(job, notice)`.

    The notice goes to a parameter that is called `notice` or annotated as one, and to a second one without a default.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # Some builtins have none.
        parameters = []
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    values: list[object] = []
    job_given = False
    for each in positional:
        if _takes_notice(each) or (job_given and each.default is each.empty):
            values.append(notice)
        elif not job_given:
            values.append(job)
            job_given = True
        else:
            break
    if not positional and any(each.kind is each.VAR_POSITIONAL for each in parameters):
        values = [job]
    named = {
        each.name: notice
        for each in parameters
        if _takes_notice(each)
        and (each.kind is each.KEYWORD_ONLY or (each in positional and positional.index(each) >= len(values)))
    }
    return functools.partial(function, *values, **named)


def _takes_notice(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    said = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return parameter.name == "notice" or StopNotice.__name__ in said


def fitting(function: Callable[..., object], offered: tuple[object, ...]) -> tuple[object, ...]:
    """As many of the offered arguments as the signature takes: `cancel()` or `cancel(job)`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # Some builtins have none.
        return offered
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return offered
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return offered[: len(positional)]


def format_error(error: BaseException) -> str:
    """The traceback as text, without our own frames. Of any length: cut it once it is masked."""
    if isinstance(error, ProgramFailed):
        return str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(_OUR_FRAMES):
        frame = frame.tb_next
    # None when the error is the host's own: then all of it is wanted.
    text = "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))
    only = "".join(traceback.format_exception_only(error)).splitlines()
    said = next(line for line in only if not line[:1].isspace())
    lines = text.splitlines()
    frames = [place for place, line in enumerate(lines) if line[:1].isspace()]
    # Who wants to know what was raised reads the line after the last indented one. Groups of errors have none there,
    # messages with indented lines another, and of a long one it would be cut off.
    found = lines[frames[-1] + 1 :] if frames else lines
    plain = found[:1] == [said] and len(text) <= MAX_TRACEBACK_CHARACTERS
    return text if plain else f"{text.rstrip()}\n{_IN_SHORT}{said}\n"


def said_by(error: BaseException) -> str:
    """The kind of an error and its text, also of one whose text can't be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - it is the user's code that makes the text
        return f"{type(error).__name__}, whose text can't be had: its __str__ raises"


def told_traceback(text: str, hide: Hide) -> str:
    """A traceback as it may be told; of a very long one the end, which says most."""
    text, mark, said = _sendable(hide(text)).rpartition(_IN_SHORT)
    said = said[: MAX_MESSAGE_CHARACTERS if mark else None]
    return text[-MAX_TRACEBACK_CHARACTERS:] + mark + said


def told_message(text: str, hide: Hide) -> str:
    """A message as it may be told."""
    return _sendable(hide(text))[:MAX_MESSAGE_CHARACTERS]


def _sendable(text: str) -> str:
    """The text without what no message carries: halves of characters, as in names of files that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def device_use() -> dict[str, Any]:
    """Which framework is loaded that can say whether it uses a device, and whether it does.

    Only what the user's code has imported is asked: nothing is imported here.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    begun = getattr(cuda, "is_initialized", None)
    if not callable(begun):
        return {"framework": "", "uses_device": False}
    return {"framework": "torch", "uses_device": bool(begun())}


def start_ticks() -> int:
    """Start time of this process in clock ticks after boot: with the pid its identity (proc(5), field 22)."""
    told = Path("/proc/self/stat").read_bytes()
    return int(told[told.rindex(b")") + 2 :].split()[19])


def failed(failure: str, error: BaseException) -> dict[str, Any]:
    """The answer to an assignment that raised. Its texts are of any length: cut them once they are masked."""
    return {
        "ok": False,
        "failure": failure,
        "message": str(error) if isinstance(error, ProgramFailed) else said_by(error),
        "traceback": format_error(error),
    }


def checkpoint_answer(state: object) -> dict[str, Any]:
    """What `checkpoint()` returned, as plain values."""
    if state is None:
        return {}
    if not isinstance(state, bytes | bytearray | str):
        return {"error": f"checkpoint() returned {type(state).__name__}, not bytes or a URI"}
    try:
        data = state.encode() if isinstance(state, str) else bytes(state)
    except UnicodeEncodeError:
        return {"error": "checkpoint() returned a text with half of a surrogate pair, which is no URI"}
    if len(data) > MAX_CHECKPOINT_BYTES:
        instead = "" if isinstance(state, str) else ", else return a URI"
        return {"error": f"checkpoint() returned {len(data)} bytes; at most {MAX_CHECKPOINT_BYTES}{instead}"}
    return {"uri": state} if isinstance(state, str) else {"data": base64.b64encode(data).decode()}


def group_checkpoint_answer(states: Mapping[str, object]) -> dict[str, Any]:
    """What the `checkpoint()` of the members returned, as one checkpoint of their group."""
    answers = {name: checkpoint_answer(state) for name, state in states.items()}
    wrong = [f"{name}: {answer['error']}" for name, answer in answers.items() if "error" in answer]
    if wrong:
        return {"error": "; ".join(wrong)}
    parts = {name: answer for name, answer in answers.items() if answer}
    if not parts:
        return {}
    data = json.dumps({_MEMBERS: parts}).encode()
    if len(data) > MAX_CHECKPOINT_BYTES:
        sizes = ", ".join(f"{name} {len(part.get('data', part.get('uri', '')))}" for name, part in parts.items())
        most = f"at most {MAX_CHECKPOINT_BYTES} for the members together, else return URIs"
        return {"error": f"the checkpoint of the group is {len(data)} bytes ({sizes}); {most}"}
    return {"data": base64.b64encode(data).decode()}


def member_checkpoint(checkpoint: Mapping[str, str], member: str) -> Mapping[str, str] | None:
    """The part of a group's checkpoint that is a member's; None when it left none."""
    if "uri" in checkpoint:
        return None
    parts: dict[str, Any] = json.loads(base64.b64decode(checkpoint["data"]))[_MEMBERS]
    return parts.get(member)


def checkpoint_value(checkpoint: Mapping[str, str]) -> bytes | str:
    """A checkpoint as `restore()` takes it."""
    if "uri" in checkpoint:
        return checkpoint["uri"]
    return base64.b64decode(checkpoint["data"])


def plain(value: object, hide: Hide) -> object:
    """The value, masked, if JSON can carry it; else how it prints. Of a long one the beginning and a fingerprint, so
    that two can still be told apart."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        value = text = repr(value)
    if len(text) <= MAX_PROGRESS_CHARACTERS:
        return hidden(value, hide)
    mark = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{hide(text)[:MAX_MESSAGE_CHARACTERS]} … ({len(text)} characters, {mark})"
