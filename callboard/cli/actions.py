"""What the verbs do. A module is imported when its verb runs (PEP 562), so that help costs nothing.

Two of them need an extra: the message about a missing one is made here, before anything else is.
"""

import gc
from importlib import import_module
from types import MappingProxyType, ModuleType

import typer

_PLACES = MappingProxyType(
    {
        "agent": ("cli.cluster.agent", "agent"),
        "autoplace": ("cli.autoplace.actions", ""),
        "autoscaling": ("cli.autoscale.actions", ""),
        "certs": ("cli.access.certs", "certs"),
        "contexts": ("cli.access.contexts", ""),
        "controller": ("cli.cluster.controller", "controller"),
        "demos": ("demo.actions", ""),
        "doctor": ("cli.watch.doctor", ""),
        "events": ("cli.watch.events", ""),
        "executing": ("cli.jobs.executing", ""),
        "growing": ("cli.cluster.growing", ""),
        "job_logs": ("cli.jobs.logs", ""),
        "jobs": ("cli.jobs.actions", ""),
        "local": ("cli.cluster.local", ""),
        "nodes": ("cli.nodes.actions", ""),
        "page": ("cli.watch.page", ""),
        "placement": ("cli.layouts.placement", ""),
        "plan": ("cli.layouts.plan", ""),
        "policy": ("cli.pools.policy", ""),
        "pools": ("cli.pools.actions", ""),
        "profile": ("cli.autoplace.profile", ""),
        "replaying": ("cli.offline.replaying", "controller"),
        "running": ("cli.jobs.running", ""),
        "simulation": ("cli.offline.simulation", ""),
        "status": ("cli.watch.status", ""),
        "storing": ("cli.offline.storing", "controller"),
        "tokens": ("cli.cluster.tokens", "controller"),
        "workers": ("cli.watch.workers", ""),
    }
)
"""Name → the module below `callboard`, and the extra that it needs."""


def __getattr__(name: str) -> ModuleType:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    place, extra = _PLACES[name]
    collecting = gc.isenabled()
    gc.disable()  # What is imported stays: looking through it for garbage again and again is a twentieth of a start.
    try:
        return import_module(f"callboard.{place}")
    except ModuleNotFoundError as error:
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
