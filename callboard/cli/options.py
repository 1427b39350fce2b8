"""Options that many verbs share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_origin

import typer

from callboard.cli import completing
from callboard.model.options import Declared, declared
from callboard.model.quantities import QuantityError
from callboard.security.places import TLS_VARIABLES


class Output(StrEnum):
    """How a read is shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class Wishes:
    """What this command line asks for by the options that many verbs share, known as soon as they are read. Whoever
    connects or shows something goes by it, wherever that is.

    Attributes:
        controller: address of the controller; empty: find it.
        output: how results and errors are shown.
        quiet: people see results and errors only.
        watch: show a read again whenever something changes.
    """

    controller = ""
    output = Output.TABLE
    quiet = False
    watch = False

    @property
    def for_program(self) -> bool:
        """Whether a program reads the result."""
        return self.output in (Output.JSON, Output.YAML)

    @property
    def wide(self) -> bool:
        """Whether people want internal ids, too."""
        return self.output is Output.WIDE

    def reset(self) -> None:
        vars(self).clear()


wishes = Wishes()


def _kept(name: str) -> Callable[[Any], Any]:
    """A callback that keeps an option's value."""

    def keep(value: Any) -> Any:
        setattr(wishes, name, value)
        return value

    return keep


def option(*said: str, **more: Any) -> Any:
    """An option of a verb.

    Args:
        said: its flags, then what its value is called (may be left out), then its help.
    """
    *words, text = said
    names = [word for word in words if not word.startswith("-")]
    flags = [word for word in words if word.startswith("-")]
    return typer.Option(*flags, metavar=names[0] if names else None, help=text, **more)


def argument(*said: str, **more: Any) -> Any:
    """An argument of a verb: what it is called (may be left out), then its help; ``more`` as typer has it."""
    *words, text = said
    return typer.Argument(metavar=words[0] if words else None, help=text, **more)


OutputOption = Annotated[
    Output,
    option(
        "--output",
        "-o",
        "How to show the result, and errors; wide adds internal ids.",
        case_sensitive=False,
        callback=_kept("output"),
    ),
]

WatchOption = Annotated[
    bool,
    option(
        "--watch",
        "Show it again whenever something changes, until Ctrl-C; with -o json one line each time.",
        callback=_kept("watch"),
    ),
]

StateDirOption = Annotated[
    Path | None,
    option(
        "--state-dir",
        "DIR",
        "State directory of the controller. Default: that of the only cluster on this machine, "
        "else $CALLBOARD_STATE_DIR.",
    ),
]

TlsCaOption = Annotated[
    Path | None,
    option("--tls-ca", "FILE", "Certificate authorities (PEM) that may have issued the other side's certificate."),
]
TlsCertOption = Annotated[
    Path | None, option("--tls-cert", "FILE", "Your own certificate (PEM), which the other side gets to see.")
]
TlsKeyOption = Annotated[Path | None, option("--tls-key", "FILE", "Key of --tls-cert (PEM, mode 0600).")]

ControllerOption = Annotated[
    str,
    option(
        "--controller",
        "--address",
        "-c",
        "HOST:PORT[,…]",
        "Controller to talk to; of several of which one leads, all, with commas between them. "
        "Default: $CALLBOARD_CONTROLLER, else the one running on this machine.",
        callback=_kept("controller"),
    ),
]

ConfigPathOption = Annotated[Path | None, option("--config-path", "FOLDER", "Folder of Hydra configs.")]

OverridesArgument = Annotated[
    list[str] | None,
    argument("[KEY=VALUE]...", "Overrides of the config, as for Hydra: cluster.component_placement.env=0-1."),
]

QuietOption = Annotated[bool, option("--quiet", "-q", "Print results and errors only.", callback=_kept("quiet"))]

PoolOption = Annotated[
    str,
    option("--pool", "POOL", "Only what belongs to this pool.", autocompletion=completing.pools),
]

JobOption = Annotated[str, option("--job", "JOB", "Only what belongs to this job.", autocompletion=completing.jobs)]

TimeoutOption = Annotated[float, option("--timeout", "SECONDS", "Give up waiting after this long.", min=0.0)]

MachineGpusOption = Annotated[
    str,
    option(
        "--machine-gpus",
        "auto|N",
        "Deal out this machine's GPUs, each to one node: auto, the real ones (8 simulated where "
        "there are none), or N simulated ones. Without --agents or --gpus-per-node they are "
        "shared equally, by at most 3 nodes. Default: every node has simulated GPUs of its own.",
    ),
]

_SHARED = MappingProxyType(
    {
        "controller": (ControllerOption, ""),
        "output": (OutputOption, Output.TABLE),
        "quiet": (QuietOption, False),
        "watch": (WatchOption, False),
    }
)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds shared options behind a verb's own. Their values are in :data:`wishes`; the verb doesn't see them.

    Args:
        names: names of :class:`Wishes`, in the order of the help.
    """

    def add(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def run(**given: Any) -> None:
            verb(**{name: value for name, value in given.items() if name not in names})

        own = inspect.signature(verb, eval_str=True)
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=_SHARED[name][0], default=_SHARED[name][1]
            )
            for name in names
        ]
        shown: Any = run
        shown.__signature__ = own.replace(parameters=[*own.parameters.values(), *shared])
        shown.__annotations__ = {each.name: each.annotation for each in shown.__signature__.parameters.values()}
        return run

    return add


Stated = dict[str, Any]
"""What a command line states of the options that a dataclass declares, by field."""


def stating(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Puts the options that a dataclass declares in place of a verb's parameter ``stated``, which is told their values
    by field. An option that the verb has itself is not put there.

    Args:
        kind: the dataclass (:mod:`callboard.model.options`).
    """

    def add(verb: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(verb, eval_str=True).parameters
        offered = {name: each for name, each in declared(kind).items() if each.option.help and name not in own}

        @functools.wraps(verb)
        def run(**given: Any) -> None:
            verb(stated={name: given.pop(name) for name in offered}, **given)

        shown: Any = run
        shown.__signature__ = inspect.Signature(
            [
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                for name, each in own.items()
                for parameter in ([_parameter(each) for each in offered.values()] if name == "stated" else [each])
            ]
        )
        shown.__annotations__ = {each.name: each.annotation for each in shown.__signature__.parameters.values()}
        return run

    return add


def _parameter(each: Declared) -> inspect.Parameter:
    """An option of typer's, for the field that it sets."""
    says = each.option
    kind, default, unit = each.kind, each.default, each.unit
    if says.written is not None:
        kind, default = str, says.written
    elif unit is not None and get_origin(kind) is not Mapping:
        kind, default = str, unit.write(default) if default else ""
    elif get_origin(kind) in (tuple, Mapping):
        kind, default = list[str] | None, None
    shape = typer.Option(
        *each.flags,
        help=says.help,
        metavar=says.metavar or (unit.metavar if unit else None),
        min=says.bounds[0],
        max=says.bounds[1],
        show_default=says.shown,
        hidden=says.hidden,
    )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, shape], default=default
    )


def read_stated(kind: type, stated: Stated) -> Stated:
    """The values of the fields, read by their units; those that nobody states are left out, and so are those that the
    caller has to read: written texts and mappings.

    Raises:
        typer.BadParameter: an amount can't be read.
    """
    found: Stated = {}
    for each in declared(kind).values():
        value = stated.get(each.name)
        if value is None or value == "" or each.option.written is not None or get_origin(each.kind) is Mapping:
            continue
        if isinstance(value, list):
            value = tuple(value)
        elif each.unit is not None:
            with reading(each.flags[0]):
                value = each.unit.read(value)
        found[each.name] = value
    return found


def counted_by(context: typer.Context) -> list[str]:
    """Which of the number of nodes and the number of GPUs of each somebody stated."""
    sources = {
        "agents": context.get_parameter_source("agents"),
        "gpus_per_node": context.get_parameter_source("gpus"),
    }
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


@contextmanager
def reading(option: str) -> Iterator[None]:
    """Tells of an option that its amount can't be read."""
    try:
        yield
    except QuantityError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


reads = takes("controller", "output", "watch")
writes = takes("controller", "quiet", "output")


def keep_tls(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Says to all of this program what to connect with; what the environment says besides is not used."""
    stated = {"ca": ca, "cert": cert, "key": key}
    if any(stated.values()):
        for part, path in stated.items():
            os.environ[TLS_VARIABLES[part]] = str(path.absolute()) if path is not None else ""
