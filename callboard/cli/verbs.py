"""The table of verbs: a module is imported when its verb is named, and all of them when they are listed.

Making a command of typer's out of a function takes about as long as importing its module; a command line names one.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_group, solve_typer_info_help

MODULE_OF = MappingProxyType(
    {
        "up": "cli.cluster.verbs",
        "down": "cli.cluster.verbs",
        "controller": "cli.cluster.controller_verbs",
        "agent": "cli.cluster.verbs",
        "add-worker": "cli.cluster.growing_verbs",
        "remove-worker": "cli.cluster.growing_verbs",
        "demand": "cli.cluster.growing_verbs",
        "autoscale": "cli.cluster.growing_verbs",
        "demo": "demo.verbs",
        "run": "cli.jobs.run_verb",
        "exec": "cli.jobs.verbs",
        "attach": "cli.jobs.verbs",
        "status": "cli.watch.verbs",
        "top": "cli.watch.verbs",
        "page": "cli.watch.verbs",
        "doctor": "cli.watch.verbs",
        "ray-env": "cli.watch.verbs",
        "version": "cli.watch.verbs",
        "job": "cli.jobs.verbs",
        "pool": "cli.pools.verbs",
        "pg": "cli.pools.verbs",
        "node": "cli.nodes.verbs",
        "worker": "cli.watch.verbs",
        "policy": "cli.pools.verbs",
        "placement": "cli.layouts.verbs",
        "plan": "cli.layouts.verbs",
        "events": "cli.watch.verbs",
        "audit": "cli.watch.verbs",
        "token": "cli.access.verbs",
        "certs": "cli.access.verbs",
        "login": "cli.access.verbs",
        "context": "cli.access.verbs",
        "autoplace": "cli.autoplace.verbs",
        "profile": "cli.autoplace.verbs",
        "simulate": "cli.offline.verbs",
        "replay": "cli.offline.verbs",
        "store": "cli.offline.verbs",
    }
)
"""Verb, or group of verbs → module below `callboard` whose ``app`` has it, in the order of the help."""


class Verbs(TyperGroup):
    """The program's commands, made when they are asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(dict.fromkeys(MODULE_OF))
        _refuse_empty(self.params)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer chooses the arguments
        """Every verb, in the order of the help."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of verbs. It shows what each is for, so no verb's options are made for it: that took two thirds of
        the time."""
        whole = self.commands
        self.commands = {name: _told(name) for name in MODULE_OF}
        try:
            super().format_commands(ctx, formatter)
        finally:
            self.commands = whole


class _Commands(UserDict[str, Any]):
    """Commands by name; one that nobody asked for has not been made."""

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is None:
            self.data[name] = _command(name)
        return self.data[name]


def _alone(name: str) -> typer.Typer:
    """A verb without its neighbours in the module, which are made when they are asked for themselves."""
    found = import_module(f"callboard.{MODULE_OF[name]}").app
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.registered_commands = [info for info in found.registered_commands if info.name == name]
    alone.registered_groups = [info for info in found.registered_groups if info.name == name]
    return alone


def _told(name: str) -> Any:
    """A verb that has its help alone."""
    alone = _alone(name)
    for info in alone.registered_commands:
        return TyperCommand(name, help=info.help or inspect.getdoc(info.callback), short_help=info.short_help)
    return TyperCommand(name, help=solve_typer_info_help(alone.registered_groups[0]))


def _command(name: str) -> Any:
    alone = _alone(name)
    command = get_group(alone).commands[name]
    _fit_for_people(command)
    return command


def _fit_for_people(command: Any) -> None:
    """Lets the help name an argument alone: typer adds its Python type, which says nothing to people. Lets no option be
    empty."""
    for below in getattr(command, "commands", {}).values():
        _fit_for_people(below)
    _refuse_empty(command.params)
    for each in command.params:
        if isinstance(each, TyperArgument):
            setattr(each, "display_type_rich", lambda ctx: "")  # noqa: ARG005, B010 - as typer calls it


_MAY_BE_EMPTY = frozenset({"reason"})
"""Options that are text for people."""


def _refuse_empty(parameters: Iterable[Any]) -> None:
    """An option with an empty value is most often a variable of a script that isn't set. Taken for one that nobody
    stated, it would mean no quota, no limit, or another controller."""
    for each in parameters:
        if isinstance(each, TyperOption) and each.name not in _MAY_BE_EMPTY:
            setattr(each, "consume_value", partial(_stated, each, each.consume_value))  # noqa: B010 - as typer calls it


def _stated(asked: Any, consume: Callable[..., Any], context: Any, options: Mapping[str, Any]) -> Any:
    value = options.get(asked.name)
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        raise typer.BadParameter("the value is empty; state one, or leave the option out", context, asked)
    return consume(context, options)
