"""`callboard autoplace` and `callboard profile`: which placement is fastest, and what the components cost."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import ConfigPathOption, ControllerOption, OverridesArgument, QuietOption, argument, option


class PlanOutput(StrEnum):
    """How a plan is shown."""

    TEXT = "text"
    YAML = "yaml"
    JSON = "json"


PlanOutputOption = Annotated[
    PlanOutput, option("--output", "-o", "Output format; yaml prints only the section to paste.", case_sensitive=False)
]


app = typer.Typer()


@app.command(
    "autoplace",
    epilog="Example: callboard autoplace train.yaml --nodes 8+8 --apply",
    short_help="Find the fastest placement of a workflow, with its proof.",
)
def autoplace(
    config: Annotated[
        str,
        argument(
            "CONFIG",
            "An RLinf config with profile_data, or a workflow in the general form: a file, or with "
            "--config-path the name of a Hydra config.",
        ),
    ],
    overrides: OverridesArgument = None,
    config_path: ConfigPathOption = None,
    nodes: Annotated[
        str,
        option(
            "--nodes",
            "NODES",
            "The cluster, e.g. 8+8 or 4x(8gpu:h100). Default: the cluster that the config describes.",
        ),
    ] = "",
    controller: Annotated[
        str, option("--controller", "-c", "HOST:PORT", "Plan for the nodes that this controller has now.")
    ] = "",
    time_limit: Annotated[float, option("--time-limit", "SECONDS", "Time limit of each search.", min=0.01)] = 10.0,
    mixed: Annotated[
        bool, option("--mixed", "Also propose layouts that RLinf's model-parallel placement refuses.")
    ] = False,
    apply: Annotated[
        bool, option("--apply", "Change the placement in the file itself; the old file is kept as .bak.")
    ] = False,
    write: Annotated[
        Path | None, option("--write", "FILE", "Write the config with the placement to a new file.")
    ] = None,
    plot: Annotated[Path | None, option("--plot", "FILE", "Draw the iteration into this .svg file.")] = None,
    output: PlanOutputOption = PlanOutput.TEXT,
    quiet: QuietOption = False,
) -> None:
    """Find who gets which GPUs so that an iteration takes the least time, and say how close to the best that is.

    Ctrl-C ends the search with the best plan so far. Exit code 3: there is no plan.
    """
    actions.autoplace.run(
        config,
        overrides=overrides or [],
        config_path=config_path,
        nodes=nodes,
        controller=controller,
        time_limit=time_limit,
        mixed=mixed,
        apply=apply,
        write=write,
        plot=plot,
        output=output,
        quiet=quiet,
    )


@app.command(
    "profile",
    epilog="Example: callboard profile runs.jsonl --warmup 2",
    short_help="Turn measured timings into profile_data.",
)
def profile(
    source: Annotated[
        str,
        argument(
            "JOB|FILE",
            "A job whose workers recorded `ctx.timed(…)` on this machine, or a JSONL file of timings; "
            "- reads the input.",
        ),
    ],
    warmup: Annotated[int, option("--warmup", "N", "Warm-up iterations to leave out of each run.", min=0)] = 1,
    workflow: Annotated[
        bool, option("--workflow", "Print cost tables of the general form instead of profile_data.")
    ] = False,
    _controller: ControllerOption = "",
    output: PlanOutputOption = PlanOutput.TEXT,
) -> None:
    """Average what components took per iteration, into the profile_data that `callboard autoplace` reads."""
    actions.profile.run(source, warmup=warmup, workflow=workflow, output=output)
