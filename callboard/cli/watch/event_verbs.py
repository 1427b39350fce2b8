"""`callboard events` and `callboard audit`: what changed, and who changed it."""

from __future__ import annotations

from typing import Annotated

import typer

from callboard.cli import actions
from callboard.cli.options import JobOption, takes


def add_to(app: typer.Typer) -> None:
    """Adds the verbs to the program."""
    app.command("events", epilog="Example: callboard events --follow --type preemption.")(events)
    app.command("audit", epilog="Example: callboard audit --who alice")(audit)


@takes("controller", "output")
def events(
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", "--watch", help="Keep printing new events until Ctrl-C.", show_default=False),
    ] = False,
    last: Annotated[
        int, typer.Option("--last", "-n", metavar="N", help="Start with the last N events.", min=0, max=1000)
    ] = 20,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="Only events of this type; a trailing dot selects a family (job.). May be repeated.",
            show_default=False,
        ),
    ] = None,
    job: JobOption = "",
) -> None:
    """Show what changed in the cluster, oldest first."""
    actions.events.show(follow=follow, last=last, types=kind or [], job=job)


@takes("controller", "output")
def audit(
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", help="The last N.", min=1, max=1000)] = 20,
    who: Annotated[str, typer.Option("--who", metavar="NAME", help="Only what this client did.")] = "",
) -> None:
    """Show who changed what, when and from where."""
    actions.events.show_audit(last=last, who=who)
