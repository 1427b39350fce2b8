"""Ends of process trees, carried out without blocking the event loop.

Walking /proc and waiting for deaths happens on threads of their own, so that one tree in uninterruptible sleep delays
neither the loop nor the end of another tree.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from callboard.agents.process_tree import (
    ProcessEntry,
    ProcessId,
    Search,
    TreeEnd,
    companions,
    descendants,
    end_tree,
    identify,
    marked,
    process_table,
)

_THREADS = 64
"""Trees ended at once: more than a node has workers that hang."""

_SLACK_S = 1.0
"""After the deadline the thread itself needs time to answer; beyond this it hangs in the kernel."""


class TreeEnder:
    """Ends trees on threads."""

    def __init__(self, agent_marker: str) -> None:
        self._agent_marker = agent_marker
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="callboard-end")
        self._adopted: frozenset[ProcessId] = frozenset()

    async def end(
        self,
        leader: ProcessId,
        *,
        marker: str,
        also: Iterable[ProcessId] = (),
        budget_s: float,
        alone: bool = False,
    ) -> TreeEnd:
        """End a worker's tree and prove it gone.

        Args:
            leader: the worker's process.
            marker: "NAME=value" of what it started.
            also: the tree as last seen.
            budget_s: seconds until what is left counts as left.
            alone: the leader died unasked, so its tree has lost its root: take what this node started and
                nobody owns any more.
        """
        roots = frozenset((leader, *also))

        def search(table: Mapping[int, ProcessEntry]) -> Iterable[ProcessId]:
            found = companions(leader, table) | marked(marker, table)
            return found | self.orphans(table) if alone else found

        return await self._run(roots, search, budget_s)

    def adopt(self, roots: Iterable[ProcessId]) -> None:
        """These and what is below them are ours, although an earlier agent was their parent."""
        self._adopted |= frozenset(roots)

    async def end_roots(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots with what is below them."""
        return await self._run(frozenset(roots), None, budget_s)

    async def end_marked(self, roots: Iterable[ProcessId], *, budget_s: float) -> TreeEnd:
        """End the roots and everything that carries the node's marker but is no part of this agent."""
        return await self._run(frozenset(roots), self.orphans, budget_s)

    async def trees(self, roots: Iterable[ProcessId]) -> dict[ProcessId, frozenset[ProcessId]]:
        """The tree below each root, as it is now."""

        def look() -> dict[ProcessId, frozenset[ProcessId]]:
            table = process_table()
            return {root: descendants([root], table) for root in roots}

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)

    def orphans(self, table: Mapping[int, ProcessEntry]) -> frozenset[ProcessId]:
        """What carries the node's marker but has no ancestor in this agent or in what it adopted.

        Living workers are subreapers, so what was theirs stays below them: an orphan's worker is dead.
        """
        agent = identify(os.getpid())
        assert agent is not None
        return marked(self._agent_marker, table) - descendants([agent, *self._adopted], table)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def _run(self, roots: frozenset[ProcessId], search: Search | None, budget_s: float) -> TreeEnd:
        deadline = time.monotonic() + budget_s
        run = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: end_tree(roots, deadline=deadline, search=search)
        )
        await asyncio.wait([run], timeout=budget_s + _SLACK_S)
        if run.done():
            return run.result()
        return TreeEnd(left=tuple(sorted(roots)), killed=0)
