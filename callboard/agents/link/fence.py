"""The fence: it ends strict workers when their lease is over and the agent can't.

`python -m callboard.agents.link.fence DIR PID` is one small process beside the agent, from the first strict worker on.
It reads when the controller was heard last (`lease_file`) and, when that is a lease ago, ends the trees of the strict
workers that the run directory names. So an old copy of a strict job stops itself before the new one starts (R5), also
while its agent is killed or stopped by SIGSTOP: the agent renews by writing, and what isn't written runs out.

Why not inside the worker: a thread there needs the GIL, which native code of the user may hold for longer than any
lease; a timer of the kernel needs none, but renewing it does, and would end healthy workers that hold the GIL. Why no
child of each worker: training code ends its own children by the dozen, and waits for them.

Guaranteed: it acts at most `SLACK_S` + `LOOK_S` after the lease, below the margin of two seconds that the controller
adds before it starts another copy; a machine that slept counts the sleep. Whether the user's code holds the GIL makes
no difference. Not guaranteed: anything while both the agent and its fence are stopped, or killed at once; an agent that
lives starts another fence at once, and so does the next agent.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from callboard.agents.files.lease_file import HeardLease, boot_s, read_lease
from callboard.agents.files.run_dir import Started, read_records
from callboard.agents.system.process_tree import end_tree
from callboard.security.processes import ProcessEntry, ProcessId, companions, identify, marked, opened

SLACK_S = 0.25
"""After the lease: an agent that lives ends its workers itself, and says so."""

LOOK_S = 0.25
"""Between looks at the clock: no timer runs while the machine sleeps."""

_END_S = 5.0
"""For one attempt at a tree; it is tried again for as long as it lives."""


class Watched(Protocol):
    """What a fence looks at: a machine, one agent on it, and what that wrote down."""

    def heard(self) -> HeardLease | None:
        """The lease as it was written last; None: none was."""

    def records(self) -> Iterable[Started]:
        """What the agent started."""

    def now_s(self) -> float:
        """The time, on the clock of the lease."""

    def agent_lives(self) -> bool:
        """Whether the agent does."""

    def is_living(self, process: ProcessId) -> bool:
        """Whether a process is there."""

    def end(self, worker: Started) -> None:
        """End what lives of a worker's tree, without hooks. What lives on is ended again at the next look."""


def look(watched: Watched) -> float | None:
    """End the strict workers whose lease is over.

    Returns:
        Seconds until a look can find more to end, unless the terms of the lease change; None when the agent and every
        strict worker of it are gone.
    """
    heard = watched.heard()
    # Before its process is known, a worker has run no code of the user.
    strict = [each for each in watched.records() if each.role == "worker" and each.facts.get("strict") and each.process]
    left_s = LOOK_S if heard is None else heard.until_s + SLACK_S - watched.now_s()
    if left_s <= 0:
        for worker in strict:
            watched.end(worker)
    if not watched.agent_lives() and not any(each.process and watched.is_living(each.process) for each in strict):
        return None
    return max(LOOK_S, left_s)


def looks(watched: Watched) -> Iterator[float]:
    """Look again and again, until the agent and every strict worker of it are gone; yields what `look` returns."""
    while (left_s := look(watched)) is not None:
        yield left_s


class _Here:
    """This machine, and one agent on it."""

    def __init__(self, run_dir: Path, agent: ProcessId) -> None:
        self._run_dir = run_dir
        self._agent = agent
        self.now_s = boot_s
        self.is_living = ProcessId.is_running

    def heard(self) -> HeardLease | None:
        return read_lease(self._run_dir)

    def records(self) -> Iterable[Started]:
        return read_records(self._run_dir)

    def agent_lives(self) -> bool:
        return self._agent.is_running()

    def end(self, worker: Started) -> None:
        process = worker.process
        assert process is not None, "only workers whose process is known are ended"
        marker: str = worker.facts["marker"]

        def search(table: Mapping[int, ProcessEntry]) -> Iterable[ProcessId]:
            return companions(process, table) | marked(marker, table)

        end_tree([process], deadline=time.monotonic() + _END_S, search=search)


def watch(run_dir: Path, agent: ProcessId) -> None:
    """Look after the leases of one agent; returns when the agent and every strict worker of it are gone."""
    here = _Here(run_dir, agent)
    with opened(agent) as descriptor:
        poller = select.poll()
        if descriptor is not None:
            poller.register(descriptor, select.POLLIN)
        for _ in looks(here):
            if here.agent_lives():
                # An agent that dies is looked at once, and again at every look.
                poller.poll(LOOK_S * 1000)
            else:
                time.sleep(LOOK_S)


def main() -> None:
    """Watch until there is nothing to watch."""
    run_dir, pid = Path(sys.argv[1]), int(sys.argv[2])
    # The terminal's Ctrl-C is the agent's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = identify(pid)
    sys.stdout.write("watching\n")
    sys.stdout.flush()
    if agent is not None:
        watch(run_dir, agent)


if __name__ == "__main__":
    main()
