"""A cluster of this machine that belongs to one program: it starts with a client and ends with it.

The cluster is a `callboard up` in a process of its own, which ends when its standard input does: when the client is
closed, and also when the program exits or is killed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections import deque

from callboard.client.errors import ClusterFailed

_KEPT_LINES = 40
"""Of what the cluster says on stderr: its last lines tell why it ended."""


class LocalCluster:
    """A running cluster.

    Attributes:
        name: its name, for `callboard` commands such as `down`.
        controller: address of its controller, "host:port".
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.controller = ""
        self._process = process
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, options: dict[str, object]) -> LocalCluster:
        """Starts a cluster and waits until it takes jobs.

        Args:
            options: of `callboard up`: ``{"agents": 2}`` is ``--agents 2``. None and "" leave an option out.

        Raises:
            ClusterFailed: it did not start; the error says why.
        """
        name = f"program-{secrets.token_hex(4)}"
        stated = [
            f"--{option.replace('_', '-')}={value}" for option, value in options.items() if value not in (None, "")
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "callboard.cli", "up", "--owned", "--name", name, "--port", "0", *stated),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the program; the cluster ends when the program lets go of it.
        )
        cluster = cls(name, process)
        try:
            assert process.stdout is not None, "it was asked for"
            ready = await process.stdout.readline()
        except BaseException:
            await cluster.stop()
            raise
        if not ready:
            await cluster.stop()
            raise ClusterFailed("\n".join(cluster._said) or f"callboard up ended with {process.returncode}")
        cluster.controller = json.loads(ready)["controller"]
        return cluster

    async def stop(self) -> None:
        """Ends everything of the cluster; returns when nothing of it is left."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        assert self._process.stderr is not None, "it was asked for"
        async for line in self._process.stderr:
            self._said.append(line.decode(errors="replace").rstrip())
