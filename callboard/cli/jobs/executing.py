"""What `callboard exec`, `callboard attach` and `callboard run -it` do: a terminal here and a program there."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import threading
import tty as terminals
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress

import typer

from callboard.cli.local.interrupts import taking
from callboard.cli.show import consoles
from callboard.cli.show.exits import FAILED, INTERRUPTED
from callboard.cli.show.verb_guard import with_client
from callboard.client.calls.execs import PIECE_BYTES, ExecDone, ExecSession
from callboard.client.client import Client
from callboard.client.errors import WaitTimeout
from callboard.client.jobs import ENDED, JobHandle, exec_session
from callboard.wire.refusals import CallboardError, WrongState

_AGAIN_S = 1.0
"""Before a terminal is asked for again that could not be shown."""

LEAVE = b"\x10\x11"
"""Ctrl-P Ctrl-Q: leaves a terminal."""


def execute(job: str, command: Sequence[str], *, rank: int, worker: str, interactive: bool, tty: bool) -> None:
    """Runs a program beside a worker; ends as it does."""
    if tty and not sys.stdin.isatty():
        raise typer.BadParameter("needs a terminal as standard input; leave it out", param_hint="-t")
    component, _, number = worker.partition("/")
    if number and not number.isdecimal():
        raise typer.BadParameter(f"{worker!r} reads NAME or NAME/RANK", param_hint="--worker")

    async def action(client: Client) -> None:
        session = exec_session(
            await client.get_job(job),
            command,
            component=component,
            rank=int(number or rank),
            terminal=tty,
            size=_size() if tty else None,
            terminal_type=os.environ.get("TERM", "") if tty else "",
        )
        reads = tty or interactive or not sys.stdin.isatty()
        done = await relay(session, terminal=tty, reads=reads)
        if done is None:
            raise typer.Exit(0)
        if done.reason:
            tell(f"{job}: {done.reason}")
        raise typer.Exit(done.exit_code)

    with_client(action)


def attach(job: str) -> None:
    """Takes over the terminal of a command."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("standard input is not a terminal; `callboard job logs -f` follows a job")

    async def action(client: Client) -> None:
        raise typer.Exit(await interact(await client.get_job(job)))

    with_client(action)


async def interact(job: JobHandle) -> int:
    """Shows the terminal of a job's command, of one attempt after the other, to its end; its exit code."""
    shown = False
    while True:
        seen = await job.refresh()
        if job.state in ENDED:
            break
        if job.state == "RUNNING":
            session = exec_session(job, [], terminal=True, size=_size(), terminal_type="")
            try:
                done = await relay(session, terminal=True, reads=True)
            except WrongState:  # it is about to end, or to start
                done = ExecDone(0, " ")
            shown = shown or session.started
            if done is None:
                tell(f"{job.name} runs on; `callboard attach {job.name}` shows its terminal again")
                return 0
            if session.started and done.reason:
                tell(f"{job.name}: {done.reason}")
                return 0
            if not session.started and "without a terminal" in done.reason:
                tell(f"{job.name}: {done.reason}")
                return FAILED
        revision = seen.revision
        with suppress(WaitTimeout):  # a terminal that could not be shown is asked for again
            await job.until(
                lambda each, before=revision: each.revision > before,  # type: ignore[misc]
                "a change",
                _AGAIN_S if job.state == "RUNNING" else None,
            )
    if not shown:
        async with aclosing(job.logs(rank=0)) as lines:
            async for line in lines:
                typer.echo(line.text)
    if job.state == "SUCCEEDED":
        return 0
    tell(f"{job.name} is {job.state}: {job.job.state_reason}")
    return job.job.exit_code or (INTERRUPTED if job.state == "CANCELLED" else FAILED)


async def relay(session: ExecSession, *, terminal: bool, reads: bool) -> ExecDone | None:
    """Standard input, output and error of this process are the program's until it ends; None: somebody left it.

    Args:
        terminal: this process has a terminal, and the program another, of the same size.
        reads: standard input is passed on.
    """
    loop = asyncio.get_running_loop()
    left = loop.create_future()

    async def show() -> None:
        reader: threading.Thread | None = None
        async with aclosing(session.output()) as output:
            async for stream, data in output:
                if reader is None and session.started:
                    # A thread: of a terminal, a pipe or a file alike, and one that waits holds up no end.
                    reader = threading.Thread(target=_read, args=(session, loop, left, terminal, reads), daemon=True)
                    reader.start()
                if stream:
                    out = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
                    out.write(data)
                    out.flush()

    with _raw() if terminal else _signals_passed(session), _resizing(session) if terminal else nullcontext():
        showing = asyncio.ensure_future(show())
        try:
            await asyncio.wait({showing, left}, return_when=asyncio.FIRST_COMPLETED)
            if not showing.done():
                return None
            showing.result()
        finally:
            showing.cancel()
            await asyncio.wait({showing})
    return session.done


def _read(
    session: ExecSession,
    loop: asyncio.AbstractEventLoop,
    left: asyncio.Future[None],
    terminal: bool,
    reads: bool,
) -> None:
    """Pass standard input on until it ends, or until the keys that leave a terminal."""
    held = b""
    with suppress(RuntimeError, asyncio.CancelledError, CallboardError):  # the loop is closed, the program gone
        while data := held + (os.read(0, PIECE_BYTES) if reads else b""):
            held = b""
            if terminal and LEAVE in data:
                data = data.partition(LEAVE)[0]
                loop.call_soon_threadsafe(lambda: None if left.done() else left.set_result(None))
                return
            if terminal and data.endswith(LEAVE[:1]):
                data, held = data[:-1], LEAVE[:1]  # the next key decides
            asyncio.run_coroutine_threadsafe(session.send(data), loop).result()
        asyncio.run_coroutine_threadsafe(session.end_input(), loop).result()


@contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the program."""
    before = termios.tcgetattr(0)
    terminals.setraw(0, termios.TCSADRAIN)  # what was typed ahead is for the program, too
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _resizing(session: ExecSession) -> Iterator[None]:
    tasks: set[asyncio.Task[None]] = set()

    def resized(_: signal.Signals) -> None:
        task = asyncio.create_task(session.resize(*_size()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with taking([signal.SIGWINCH], resized):
        yield


@contextmanager
def _signals_passed(session: ExecSession) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the program, as in a shell; a second one ends this process, and the program with it."""
    waiting = asyncio.current_task()
    assert waiting is not None
    tasks: list[asyncio.Task[None]] = []

    def take(number: signal.Signals) -> None:
        if tasks:
            waiting.cancel()
        tasks.append(asyncio.create_task(session.signal(number)))

    try:
        with taking((signal.SIGINT, signal.SIGTERM), take):
            yield
    except asyncio.CancelledError:
        if len(tasks) > 1:
            raise typer.Exit(INTERRUPTED) from None
        raise


def _size() -> tuple[int, int]:
    """Rows and columns of the terminal here."""
    try:
        columns, rows = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return rows or 24, columns or 80


def tell(text: str) -> None:
    """Says something beside what the program prints."""
    consoles.stderr().print(f"callboard: {text}", soft_wrap=True)
