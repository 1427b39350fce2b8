"""Results for programs: JSON or YAML on stdout, without anything that only people need."""

from __future__ import annotations

import json
import sys
from typing import Any

from callboard.cli.options import wishes


def print_json(value: Any, *, compact: bool = False) -> None:
    """``value`` as JSON on stdout; compact, or shown again and again: on one line."""
    indent = None if compact or wishes.watch else 2
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_yaml(value: Any) -> None:
    """``value`` as YAML on stdout."""
    import yaml  # noqa: PLC0415 - JSON needs none

    if wishes.watch:
        sys.stdout.write("---\n")
    sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100))
    sys.stdout.flush()
