"""Options that many verbs share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import completing


class Output(StrEnum):
    """How a read is shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


class Wishes:
    """What this command line asks of how things are shown, known as soon as its options are read. Errors and the
    results of writes go by it, wherever they are made.

    Attributes:
        output: how results and errors are shown.
        watch: show a read again whenever something changes.
    """

    output = Output.TABLE
    watch = False

    @property
    def for_program(self) -> bool:
        """Whether a program reads the result."""
        return self.output in (Output.JSON, Output.YAML)

    def reset(self) -> None:
        """A new command line begins."""
        self.output, self.watch = Output.TABLE, False


wishes = Wishes()


def _keep_output(value: Output) -> Output:
    wishes.output = value
    return value


def _keep_watch(value: bool) -> bool:
    wishes.watch = value
    return value


OutputOption = Annotated[
    Output,
    typer.Option(
        "--output",
        "-o",
        help="How to show the result, and errors; wide adds internal ids.",
        case_sensitive=False,
        callback=_keep_output,
    ),
]

WatchOption = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Show it again whenever something changes, until Ctrl-C; with -o json one line each time.",
        show_default=False,
        callback=_keep_watch,
    ),
]

ControllerOption = Annotated[
    str,
    typer.Option(
        "--controller",
        "-c",
        metavar="HOST:PORT",
        help="Controller to talk to. Default: $CALLBOARD_CONTROLLER, else the one running on this machine.",
        show_default=False,
    ),
]

ConfigPathOption = Annotated[
    Path | None,
    typer.Option("--config-path", metavar="FOLDER", help="Folder of Hydra configs.", show_default=False),
]

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides of the config, as for Hydra: cluster.component_placement.env=0-1."
    ),
]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.", show_default=False)]

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
