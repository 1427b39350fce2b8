"""Taking a cluster of this machine down: in order, by its record, with proof that nothing is left.

Agents go first, the one with Ray's head last of them, then the controller, then the files. What does not
end by itself is killed with all that descends from it; what left its tree still carries its agent's mark.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from callboard.cli.local.children import StillRunning, end_politely, kill_trees
from callboard.cli.local.cluster_lock import LOCK_NAME, ClusterGone, take_cluster_lock
from callboard.cli.local.plan import network_of
from callboard.cli.local.ports import is_taken, listeners, listening_in
from callboard.cli.local.records import UP_ROLE, remove_directory
from callboard.cli.show.exits import CommandFailed
from callboard.client.clusters import CONTROLLER_ROLE, ClusterRecord, read_record, recorded_clusters
from callboard.security.places import Held, take_lock
from callboard.security.processes import ProcessId, descendants, identify, marked, process_table

AGENT_GRACE_S = 25.0
"""How long agents may take to stop workers and Ray. Above the 20 s after which they give up
themselves, so that they end in order and prove it."""

CONTROLLER_GRACE_S = 8.0
"""How long the controller may take: its own grace is 3 s."""

WATCHER_GRACE_S = 60.0
"""How long an `up` that watches over its cluster may take to end it: longer than all the others together."""

TURN_S = 5.0
"""How long an addition may take to write down what it started. It does so in a blink; a stuck one is not waited for."""

PROOF_S = 5.0
"""How long the kernel may take to give back what the killed held, before we say that it did not."""

_LOOK_S = 0.1

AGENT_MARK = "CALLBOARD_AGENT"
"""Variable that everything an agent starts carries, with the agent's run directory as its value."""


class Leftovers(CommandFailed):
    """Something of the cluster is left after its end.

    Attributes:
        what: a sentence each.
    """

    def __init__(self, what: Sequence[str]) -> None:
        super().__init__(
            "Not everything of the cluster could be removed.", f"{'; '.join(what)}.", "Look at what is left."
        )
        self.what = tuple(what)


async def take_down(record: ClusterRecord, *, hurry: asyncio.Event) -> None:
    """Ends a cluster from outside: through the `up` that watches over it, if there is one.

    Raises:
        Leftovers: something is left.
    """
    watchers = [entry.process for entry in record.processes if entry.role == UP_ROLE]
    await end_politely([process for process in watchers if process.is_running()], grace_s=WATCHER_GRACE_S, hurry=hurry)
    await end_cluster(record, hurry=hurry)


async def end_cluster(record: ClusterRecord, *, hurry: asyncio.Event) -> None:
    """Ends exactly the programs of a record with all that descends from them, and removes its files.

    Args:
        record: which cluster; its "up" program is left alone.
        hurry: when set, nobody is waited for.

    Raises:
        Leftovers: something is left.
    """
    async with _last_lock(record.directory, hurry):
        # Others may have added nodes to it since.
        await _end_recorded(read_record(record.directory) or record, hurry=hurry)


async def _end_recorded(record: ClusterRecord, *, hurry: asyncio.Event) -> None:
    programs = [entry for entry in record.processes if entry.role != UP_ROLE]
    controllers = [entry.process for entry in programs if entry.role == CONTROLLER_ROLE]
    controllers += [process for process in _started_again(record.directory) if process not in controllers]
    agents = [entry.process for entry in programs if entry.role != CONTROLLER_ROLE]
    tree = set(descendants([*agents, *controllers], process_table()))
    # Ray's head is on the first node: the others' Ray would wait for it in vain if it went first.
    for group, grace_s in ((agents[1:], AGENT_GRACE_S), (agents[:1], AGENT_GRACE_S), (controllers, CONTROLLER_GRACE_S)):
        await _end_group(group, grace_s, hurry, tree)
    left = await _what_is_left(record, tree)
    remove_directory(record.directory)
    if left:
        raise Leftovers(left)


def _started_again(directory: Path) -> list[ProcessId]:
    """Who holds the state of the cluster: where the controller had ended, one that was started again by hand."""
    try:
        os.close(take_lock(directory / "controller" / LOCK_NAME, "`callboard down`"))
    except Held as error:
        process = identify(int(error.holder)) if error.holder.isdigit() else None
        return [process] if process is not None else []
    except OSError:  # There is no state of its own any more.
        pass
    return []


async def _what_is_left(record: ClusterRecord, tree: set[ProcessId]) -> list[str]:
    """Kills what is left of a cluster until there is nothing, a sentence for each thing that stays."""
    deadline = time.monotonic() + PROOF_S
    while True:
        # What left its tree still carries the mark of its agent. Looked for again each time: a process that was
        # being forked during one look is there in the next.
        strays = tree | marked(f"{AGENT_MARK}={record.directory}/", process_table(), prefix=True)
        strays = {process for process in strays if process.is_running() and process.pid != os.getpid()}
        try:
            await kill_trees(strays)
        except StillRunning as error:
            return [f"process {process.pid} still runs" for process in error.processes]
        ports = _open_ports(record)
        if not (strays or ports) or time.monotonic() > deadline:
            return [f"port {address} is still open ({_who(address)})" for address in ports]
        if not strays:
            await asyncio.sleep(_LOOK_S)  # The kernel tells nobody that a port is closed.


async def sweep(base: Path) -> None:
    """Removes what clusters left whose every program was killed.

    Raises:
        Leftovers: something of one is left all the same.
    """
    hurry = asyncio.Event()
    hurry.set()
    for record in recorded_clusters(base):
        if not any(entry.process.is_running() for entry in record.processes):
            await end_cluster(record, hurry=hurry)


@asynccontextmanager
async def _last_lock(directory: Path, hurry: asyncio.Event) -> AsyncIterator[None]:
    """Keeps others from adding nodes while the block runs; after it there is nothing to add to."""
    lock: int | None = None
    try:
        # Its files may be gone already; processes need not be.
        with suppress(ClusterGone):
            for _ in range(round(TURN_S / _LOOK_S)):
                with suppress(Held):
                    lock = take_cluster_lock(directory, "`callboard down`")
                if lock is not None or hurry.is_set():
                    break
                await asyncio.sleep(_LOOK_S)  # The kernel tells nobody that a lock is free again.
        yield
    finally:
        if lock is not None:
            os.close(lock)


async def _end_group(group: Sequence[ProcessId], grace_s: float, hurry: asyncio.Event, tree: set[ProcessId]) -> None:
    # Taken again here: what was started since the first look would lose its parent now.
    tree |= descendants(group, process_table())
    stubborn = await end_politely(group, grace_s=grace_s, hurry=hurry)
    if stubborn:
        await kill_trees(stubborn)


def _open_ports(record: ClusterRecord) -> list[str]:
    host, _, port = record.controller.rpartition(":")
    # Block 0 is everybody's: what has no nodes of its own, a controller alone, is recorded with it.
    of_nodes = listening_in(network_of(record.block)) if record.block else []
    return [record.controller, *of_nodes] if is_taken(host, int(port)) else of_nodes


def _who(address: str) -> str:
    pids = listeners(address)
    return f"process {', '.join(map(str, pids))}" if pids else "of a process that this user can't see"
