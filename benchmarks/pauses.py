"""How long is the loop held up by what takes long?

    python benchmarks/pauses.py [--nodes 10000]

A driver with a journal in memory, on a full cluster. Beside each question or request a task takes turns on the loop;
its longest wait is the pause. What sums tell and what a thread works out should not hold it up, whatever it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from scheduler import Cluster  # type: ignore[import-not-found]

from callboard.controller.journal.codec import Decision
from callboard.controller.journal.journal import Follower
from callboard.controller.loop.collector import spare_what_is_there, uncollected
from callboard.controller.loop.driver import Driver
from callboard.controller.loop.questions import SWITCH_S
from callboard.controller.searches.placements import placed
from callboard.controller.views.stats import demand_messages
from callboard.scheduler import Refusal, State
from callboard.scheduler.records.events import Event
from callboard.scheduler.records.job_records import Change, EventRecord, Record


class Memory:
    """A journal that keeps nothing."""

    wants_snapshot = False

    def __init__(self, state: State) -> None:
        self._state = state

    async def lead(self, follower: Follower) -> bool:  # noqa: ARG002
        """Nobody shares it."""
        return True

    def check(self) -> None:
        """Nobody can take it away."""

    async def open(self) -> State:
        """The state that there is."""
        return self._state

    async def commit(
        self, changes: Sequence[Change], events: Sequence[EventRecord], decisions: Sequence[Decision]
    ) -> None:
        """Nothing is kept."""

    async def snapshot(self, records: Sequence[Record]) -> None:
        """Nothing is kept."""

    async def newest_events(self, limit: int) -> list[EventRecord]:  # noqa: ARG002 - of none
        """None."""
        return []

    async def read_events(self, first_revision: int, limit: int) -> tuple[int, list[EventRecord]]:  # noqa: ARG002
        """None."""
        return 0, []

    async def close(self) -> None:
        """Nothing to close."""


async def measured(what: str, work: Callable[[], Awaitable[object]]) -> None:
    """Prints how long something took, and the longest wait of others meanwhile."""
    longest, last = 0.0, time.perf_counter()
    done = asyncio.ensure_future(work())
    while not done.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    with contextlib.suppress(Refusal):
        await done
    print(f"{what:44} {longest * 1000:8.1f} ms", flush=True)


async def run(nodes: int) -> None:
    """Everything in turn."""
    driver = Driver(Memory(State()), reconcile_grace_ms=0)
    await driver.start()
    cluster = Cluster(nodes, driver.scheduler)
    cluster.answer(cluster.handle(cluster.submission(workers=nodes * 6)))
    waits = cluster.submission(workers=nodes * 6)
    cluster.handle(waits)
    spare_what_is_there()
    running = asyncio.create_task(driver.run())

    def ask(event: Event) -> Callable[[], Awaitable[object]]:
        return lambda: driver.ask(
            lambda now_ms, cause: replace(event, now_ms=now_ms, cause=cause), lambda _: None, source="benchmark"
        )

    large, one = cluster.submission(workers=nodes * 10), cluster.submission(gpu=16)
    text = f"cluster: {{num_nodes: {nodes}, component_placement: {{main: 0-{nodes * 8 - 1}}}}}"
    records = tuple(driver.state.nodes.values())
    spec = replace(cluster.submission().spec, placement_config=text)
    await measured("nothing", lambda: asyncio.sleep(1))
    await measured("the first question: a copy is made", lambda: driver.question(lambda _: None))
    await measured("explain a gang that waits", lambda: driver.question(lambda s: s.explain(waits.uid, 0)))
    await measured("validate a gang", lambda: driver.question(lambda s: s.what_if(waits)))
    await measured("demand", lambda: driver.question(lambda s: demand_messages(s.state)))
    await measured(f"refuse {nodes * 10} workers, with the account", ask(large))
    await measured("refuse one that no node holds", ask(one))
    await measured("compile a placement text", lambda: asyncio.to_thread(uncollected, placed, spec, records))
    await measured("start one", ask(cluster.submission()))
    await measured(f"start a gang of {nodes}", ask(cluster.submission(workers=nodes)))
    driver.stop()
    await running


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=10_000)
    sys.setswitchinterval(SWITCH_S)
    options = parser.parse_args()
    print(f"longest pause of the loop, {options.nodes} nodes, load {os.getloadavg()[0]:.0f}")
    asyncio.run(run(options.nodes))


if __name__ == "__main__":
    main()
