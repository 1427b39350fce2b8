"""``python -m callboard.controller``: the controller without the command line's other verbs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from callboard.controller.options import ControllerOptions
from callboard.controller.server import run_controller
from callboard.model.faults import InvalidInput
from callboard.model.inputs.role_file import read_role_file
from callboard.model.options import OptionError, declared

_WITHOUT_DEFAULT = {
    "metrics": "Address of the Prometheus figures; default: none.",
    "page": "Address of the web page; default: none.",
}
"""`callboard controller` serves both unless told otherwise, this program doesn't."""


def main(arguments: list[str] | None = None) -> int:
    """Reads the options and runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m callboard.controller", description=__doc__)
    parser.add_argument("--roles", type=Path, metavar="FILE", help="YAML file with presets of further roles.")
    parser.add_argument("--exit-with-parent", action="store_true", help="Stop when the parent process is gone.")
    for name, each in declared(ControllerOptions).items():
        says = _WITHOUT_DEFAULT.get(name, each.option.help)
        if not says:
            continue
        if each.unit is not None:
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="MS", help=f"{says} In milliseconds.")
        elif each.kind is bool:
            parser.add_argument(*each.flags, action="store_true", default=None, help=says)
        elif get_origin(each.kind) is tuple:
            parser.add_argument(*each.flags, dest=name, action="append", metavar=each.option.metavar, help=says)
        elif get_origin(each.kind) is Literal:
            parser.add_argument(*each.flags, choices=get_args(each.kind), help=says)
        else:
            kind = str if each.kind is str else Path
            parser.add_argument(*each.flags, type=kind, metavar=each.option.metavar, help=says)
    read = vars(parser.parse_args(arguments))
    stated: dict[str, Any] = {key: value for key, value in read.items() if value is not None}
    try:
        if "roles" in stated:
            stated["roles"] = read_role_file(stated["roles"]).presets
        stated["page_names"] = tuple(stated.get("page_names", ()))
        options = ControllerOptions(**stated)
    except (OptionError, InvalidInput) as error:
        parser.error(str(error))
    return run_controller(options)


if __name__ == "__main__":
    sys.exit(main())
