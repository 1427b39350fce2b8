"""What do signals do to a program that cleans up? Cancel it once, and never its cleaning."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from callboard.cli.local.interrupts import Interrupts, run_interruptible


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def taken() -> None:
    """Lets the loop take the signals that arrived."""
    handled = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, handled.set)
    await handled.wait()


def test_the_first_signal_cancels_and_the_cleaning_ends() -> None:
    cleaned = []

    async def main(interrupts: Interrupts) -> None:
        try:
            interrupt()
            await asyncio.Event().wait()
        finally:
            with interrupts.cleaning():
                await taken()
                cleaned.append(interrupts.hurry.is_set())

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main)
    assert cleaned == [False]


def test_a_signal_that_comes_while_it_cleans_does_not_stop_the_cleaning() -> None:
    """Seen: Ctrl-C between the last act and the end of its cluster left all of it running."""
    cleaned = []

    async def main(interrupts: Interrupts) -> str:
        with interrupts.cleaning():
            interrupt()
            await taken()
            cleaned.append(interrupts.hurry.is_set())
        return "done"

    assert run_interruptible(main) == "done"
    assert cleaned == [False]


def test_a_second_signal_hurries_the_cleaning() -> None:
    async def main(interrupts: Interrupts) -> None:
        try:
            interrupt()
            await asyncio.Event().wait()
        finally:
            with interrupts.cleaning():
                interrupt()
                await interrupts.hurry.wait()

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main)


def test_where_cleaning_is_all_there_is_the_first_signal_hurries() -> None:
    async def main(interrupts: Interrupts) -> str:
        with interrupts.cleaning(hurry_at_once=True):
            interrupt()
            await interrupts.hurry.wait()
        return "done"

    assert run_interruptible(main) == "done"
