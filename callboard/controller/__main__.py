"""``python -m callboard.controller``: the controller without the command line's other verbs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from callboard.controller.options import DEFAULT_LISTEN, BadOption, ControllerOptions
from callboard.controller.server import run_controller
from callboard.model.faults import InvalidInput
from callboard.model.inputs.roles import read_role_file


def main(arguments: list[str] | None = None) -> int:
    """Reads the options and runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m callboard.controller", description=__doc__)
    parser.add_argument("--listen", default=DEFAULT_LISTEN, help="address to listen on, host:port")
    parser.add_argument("--state-dir", type=Path, help="directory of the journal; default: the user's state directory")
    parser.add_argument("--run-dir", type=Path, help="directory of controller.json; default: the state directory")
    parser.add_argument("--metrics", help="address of the Prometheus figures, host:port; default: none")
    parser.add_argument("--roles", type=Path, metavar="FILE", help="YAML file with presets of further roles")
    parser.add_argument("--metrics-open", action="store_true", help="show the figures to callers without a token")
    parser.add_argument("--insecure", action="store_true", help="answer every caller, without a token, at any address")
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the parent process is gone")
    parser.add_argument("--loop", choices=["auto", "uvloop", "asyncio"], default="auto", help="event loop")
    parser.add_argument("--log-format", choices=["auto", "console", "json"], default="auto")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    for name, what in (
        ("lease", "how long an agent may act without hearing from the controller"),
        ("heartbeat", "time between heartbeats of an agent"),
        ("orphan-grace", "how long workers run on without a controller"),
        ("reconcile-grace", "how long to wait for known nodes after a restart"),
        ("stop-grace", "time for calls in flight when stopping"),
    ):
        parser.add_argument(f"--{name}-ms", type=int, metavar="MS", help=f"{what}, in milliseconds")
    read = vars(parser.parse_args(arguments))
    stated: dict[str, Any] = {key: value for key, value in read.items() if value is not None}
    try:
        if "roles" in stated:
            stated["roles"] = read_role_file(stated["roles"]).presets
        options = ControllerOptions(**stated)
    except (BadOption, InvalidInput) as error:
        parser.error(str(error))
    return run_controller(options)


if __name__ == "__main__":
    sys.exit(main())
