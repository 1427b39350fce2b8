"""The guard around a verb: it gives it a client, and turns every expected error into words and an exit code."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import typer

from callboard.cli.options import wishes
from callboard.cli.show import consoles, words
from callboard.cli.show.exits import BAD_INPUT, INTERRUPTED, CommandFailed, as_json, lines
from callboard.cli.show.failures import EXPECTED, failure_of
from callboard.client.client import Client
from callboard.client.errors import Unreachable
from callboard.wire.refusals import CallboardError

Given = ParamSpec("Given")
Result = TypeVar("Result")

CALL_TIMEOUT_S = 15.0
"""Deadline of a verb's call: a person waits."""

_REDRAW_S = 5.0
"""Longest time between two pictures of `--watch` on a terminal: ages and waiting times go on."""

_PAUSE_S = 0.3
"""Shortest time between two of them."""

RETRY_S = 3.0
"""How long a verb waits for a controller that is away: long enough for one that is being restarted (about two seconds),
so that a script does not notice, and short enough that a person learns soon that there is none."""


def connected(action: Callable[Concatenate[Client, Given], Awaitable[Result]]) -> Callable[Given, Result]:
    """What a verb does, without the client that its action needs; see :func:`with_client`."""

    @functools.wraps(action)
    def run_connected(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return with_client(lambda client: action(client, *args, **kwargs))

    return run_connected


def with_client(action: Callable[[Client], Awaitable[Result]], controller: str = "") -> Result:
    """Runs ``action`` with a client of the controller that is meant; ends the program if it fails.

    Args:
        controller: its address; empty: as the command line says, else find it.
    """

    async def connected() -> Result:
        try:
            client = Client(controller or wishes.controller or None, timeout=CALL_TIMEOUT_S, retry=RETRY_S)
        except EXPECTED as error:
            raise _exit(error, "") from error
        async with client:
            try:
                return await (_again_and_again(client, action) if wishes.watch else action(client))
            except EXPECTED as error:
                shown = "" if isinstance(error, Unreachable) else await _described(client)
                raise _exit(error, shown) from error

    return run(connected())


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``coroutine``; Ctrl-C ends the program with 130, an expected error with its words."""
    with failing_in_words():
        try:
            return asyncio.run(coroutine)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


@contextmanager
def failing_in_words() -> Iterator[None]:
    """Turns an expected error of the block into words and an exit code."""
    try:
        yield
    except EXPECTED as error:
        raise _exit(error, "") from error


@contextmanager
def unless_wrong(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """As :func:`failing_in_words`, also for errors of further kinds, after which ``what`` are as they were."""
    with failing_in_words():
        try:
            yield
        except kinds as error:
            why = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                why = f"{error.filename}: {error.strerror}"
            raise CommandFailed(
                f"The {what} were left as they are.", f"{why}.", "Correct it and try again.", BAD_INPUT
            ) from error


async def _again_and_again(client: Client, action: Callable[[Client], Awaitable[Result]]) -> Result:
    """Does ``action`` again whenever something has changed, and on a terminal also as time passes."""
    console = consoles.stdout()
    on_screen = console.is_terminal and not wishes.for_program
    while True:
        revision = (await client.stats()).revision
        if on_screen:
            console.clear()
        await action(client)
        changes = client.watch(start_revision=revision + 1)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REDRAW_S if on_screen else None):
                await anext(changes)
        await asyncio.sleep(_PAUSE_S)  # many changes come at once; a reader wants the picture after them


def _exit(error: Exception, controller: str) -> typer.Exit:
    failure = failure_of(error)
    if wishes.for_program:
        reason = error.error.reason.value if isinstance(error, CallboardError) else ""
        faults = getattr(error, "faults", ())
        typer.echo(as_json(failure, controller=controller, reason=reason, faults=faults), err=True)
        return typer.Exit(failure.exit_code)
    console = consoles.stderr()
    for number, line in enumerate(lines(failure, controller)):
        console.print(line, style="bold red" if number == 0 else None, soft_wrap=True)
    return typer.Exit(failure.exit_code)


async def _described(client: Client) -> str:
    """The controller with its nodes: an error reads differently when it is of the wrong cluster (MU-07)."""
    try:
        seen = await client.overview(nodes=8, jobs=1)
    except EXPECTED:
        return f"{client.address} ({client.target.source})"
    names = ", ".join(words.node_id(node) for node in seen.nodes) or "no node"
    more = f" and {seen.more_nodes} more" if seen.more_nodes else ""
    return f"{client.address} ({client.target.source}) with {names}{more}"


@asynccontextmanager
async def waiting(what: str) -> AsyncIterator[None]:
    """A spinner on a terminal, one line elsewhere, nothing when quiet: shows ``what`` as long as the block runs."""
    if wishes.quiet:
        yield
        return
    console = consoles.stderr()
    if not console.is_terminal:
        console.print(f"{what} …")
        yield
        return
    with console.status(f"{what} …"):
        yield
