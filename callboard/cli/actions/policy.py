"""What `callboard policy …` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callboard.cli import printing, screen
from callboard.cli.actions.jobs import read_file
from callboard.cli.changes import changed, is_file, read_changes
from callboard.cli.options import Output
from callboard.cli.policy_text import policy_mapping
from callboard.cli.session import with_client
from callboard.client.client import Client
from callboard.model.policy import PreemptionPolicy


def show(*, controller: str, output: Output) -> None:
    """Shows the policy."""

    async def action(client: Client) -> None:
        _print(await client.get_policy(), output)

    with_client(controller, action)


def change(changes: Sequence[str], *, validate: bool, controller: str, output: Output, quiet: bool) -> None:
    """Sets the policy from a file, or changes single fields of it."""

    async def action(client: Client) -> None:
        if is_file(changes):
            wanted: Mapping[str, Any] = read_file(Path(changes[0]))
        else:
            wanted = changed(policy_mapping(await client.get_policy()), read_changes(changes))
        policy = await client.set_policy(wanted, validate_only=validate)
        if validate:
            screen.stderr().print("The policy could be set.")
        elif not quiet:
            _print(policy, output)

    with_client(controller, action)


def _print(policy: PreemptionPolicy, output: Output) -> None:
    mapping = policy_mapping(policy)
    if output is Output.JSON:
        printing.print_json(mapping)
    elif output is Output.YAML:
        printing.print_yaml(mapping)
    else:
        screen.stdout().print(screen.facts((name, _words(value)) for name, value in mapping.items()))


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        rules = [
            f"{key}: {winner} beats {', '.join(losers)}"
            for key, winners in value.items()
            for winner, losers in winners.items()
        ]
        return "\n".join(rules) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)
