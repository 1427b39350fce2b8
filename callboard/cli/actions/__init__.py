"""What the verbs do. A module is imported when its verb runs (PEP 562), so that help costs nothing.

Two of them need an extra: the message about a missing one is made here, before anything else is.
"""

import gc
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from callboard.cli.actions import agent as agent
    from callboard.cli.actions import autoplace as autoplace
    from callboard.cli.actions import autoscaling as autoscaling
    from callboard.cli.actions import controller as controller
    from callboard.cli.actions import demos as demos
    from callboard.cli.actions import events as events
    from callboard.cli.actions import groups as groups
    from callboard.cli.actions import growing as growing
    from callboard.cli.actions import job_logs as job_logs
    from callboard.cli.actions import jobs as jobs
    from callboard.cli.actions import local as local
    from callboard.cli.actions import looking as looking
    from callboard.cli.actions import nodes as nodes
    from callboard.cli.actions import placement as placement
    from callboard.cli.actions import plan as plan
    from callboard.cli.actions import policy as policy
    from callboard.cli.actions import pool_changes as pool_changes
    from callboard.cli.actions import pools as pools
    from callboard.cli.actions import profile as profile
    from callboard.cli.actions import replaying as replaying
    from callboard.cli.actions import running as running
    from callboard.cli.actions import simulation as simulation
    from callboard.cli.actions import status as status
    from callboard.cli.actions import watching as watching
    from callboard.cli.actions import workers as workers

_EXTRA_OF = MappingProxyType(
    {
        "agent": "agent",
        "autoplace": "",
        "autoscaling": "",
        "controller": "controller",
        "demos": "",
        "events": "",
        "groups": "",
        "growing": "",
        "job_logs": "",
        "pool_changes": "",
        "watching": "",
        "workers": "",
        "jobs": "",
        "local": "",
        "looking": "",
        "nodes": "",
        "placement": "",
        "plan": "",
        "policy": "",
        "pools": "",
        "profile": "",
        "replaying": "controller",
        "running": "",
        "simulation": "",
        "status": "",
    }
)


def __getattr__(name: str) -> ModuleType:
    if name not in _EXTRA_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    collecting = gc.isenabled()
    gc.disable()  # What is imported stays: looking through it for garbage again and again is a twentieth of a start.
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF[name]
        if not extra or (error.name or "callboard").partition(".")[0] == "callboard":
            raise
        typer.echo(
            f"error: `callboard {name}` is not installed here.\n"
            f"  why: the package {error.name} is missing.\n"
            f"   do: pip install 'callboard[{extra}]'",
            err=True,
        )
        raise typer.Exit(1) from error
    finally:
        if collecting:
            gc.enable()
