"""What `callboard policy …` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from callboard.cli import screen
from callboard.cli.actions.jobs import read_file
from callboard.cli.failures import BAD_INPUT, CommandFailed, Failure
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
        if len(changes) == 1 and "=" not in changes[0]:
            wanted: Mapping[str, Any] = read_file(Path(changes[0]))
        else:
            wanted = policy_mapping(await client.get_policy()) | dict(_field(text) for text in changes)
        policy = await client.set_policy(wanted, validate_only=validate)
        if validate:
            screen.stderr().print("The policy could be set.")
        elif not quiet:
            _print(policy, output)

    with_client(controller, action)


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandFailed(
            Failure(
                f"{text!r} is neither a field nor the only file.",
                "A change reads KEY=VALUE.",
                "Write for example cancel_timeout=500ms.",
                BAD_INPUT,
            )
        )
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise CommandFailed(
            Failure(
                f"The value of {name} can't be read.", str(error), "Write it as YAML, for example [a, b].", BAD_INPUT
            )
        ) from error


def _print(policy: PreemptionPolicy, output: Output) -> None:
    mapping = policy_mapping(policy)
    if output is Output.JSON:
        screen.print_json(mapping)
    elif output is Output.YAML:
        screen.print_yaml(mapping)
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
