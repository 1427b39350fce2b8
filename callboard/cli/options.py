"""Options that many verbs share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from callboard.cli import completing
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
        """A new command line begins."""
        vars(self).clear()


wishes = Wishes()


def _kept(name: str) -> Callable[[Any], Any]:
    """A callback that keeps an option's value."""

    def keep(value: Any) -> Any:
        setattr(wishes, name, value)
        return value

    return keep


OutputOption = Annotated[
    Output,
    typer.Option(
        "--output",
        "-o",
        help="How to show the result, and errors; wide adds internal ids.",
        case_sensitive=False,
        callback=_kept("output"),
    ),
]

WatchOption = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Show it again whenever something changes, until Ctrl-C; with -o json one line each time.",
        show_default=False,
        callback=_kept("watch"),
    ),
]

StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="State directory of the controller. Default: that of the only cluster on this machine, else "
        "$CALLBOARD_STATE_DIR.",
    ),
]

TlsCaOption = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="Authorities (PEM) that the other end's certificate must be from."),
]
TlsCertOption = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Own certificate (PEM) to show to the other end.")
]
TlsKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of --tls-cert (PEM, mode 0600).")
]

ControllerOption = Annotated[
    str,
    typer.Option(
        "--controller",
        "-c",
        metavar="HOST:PORT",
        help="Controller to talk to. Default: $CALLBOARD_CONTROLLER, else the one running on this machine.",
        show_default=False,
        callback=_kept("controller"),
    ),
]

ConfigPathOption = Annotated[
    Path | None, typer.Option("--config-path", metavar="FOLDER", help="Folder of Hydra configs.", show_default=False)
]

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides of the config, as for Hydra: cluster.component_placement.env=0-1."
    ),
]

QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print results and errors only.", show_default=False, callback=_kept("quiet")),
]

PoolOption = Annotated[
    str,
    typer.Option(
        "--pool",
        metavar="POOL",
        help="Only what belongs to this pool.",
        show_default=False,
        autocompletion=completing.pools,
    ),
]

JobOption = Annotated[
    str,
    typer.Option(
        "--job",
        metavar="JOB",
        help="Only what belongs to this job.",
        show_default=False,
        autocompletion=completing.jobs,
    ),
]

TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Give up waiting after this long.", min=0.0)
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


reads = takes("controller", "output", "watch")
writes = takes("controller", "quiet", "output")


def keep_tls(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Says to all of this program what to connect with; what the environment says besides is not used."""
    stated = {"ca": ca, "cert": cert, "key": key}
    if any(stated.values()):
        for part, path in stated.items():
            os.environ[TLS_VARIABLES[part]] = str(path.absolute()) if path is not None else ""
