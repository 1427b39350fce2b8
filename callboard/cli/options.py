"""Options that many verbs share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Output(StrEnum):
    """How a read is shown."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="How to show it; wide adds internal ids.", case_sensitive=False),
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

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.", show_default=False)]

PoolOption = Annotated[
    str, typer.Option("--pool", metavar="POOL", help="Only what belongs to this pool.", show_default=False)
]

TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Give up waiting after this long.", min=0.0)
]
