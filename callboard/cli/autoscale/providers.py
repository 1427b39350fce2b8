"""Providers of nodes: this machine, or two commands of the user's that start and end one."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from callboard.cli.autoscale.loop import ProviderFailed
from callboard.cli.autoscale.sizing import Room
from callboard.cli.local.growth import add_worker, end_worker, running_plan, running_workers
from callboard.cli.local.plan import ClusterPlan
from callboard.cli.show.exits import CommandFailed
from callboard.client.calls.cluster_calls import id_of
from callboard.client.client import Client
from callboard.model.frozen import dataclass
from callboard.model.quantities import Resources
from callboard.v1.node_pb2 import Node
from callboard.wire.amounts import resources_from_proto

JOIN_S = 120.0
COMMAND_S = 60.0
"""How long a command may take to hand in a node: `sbatch` and `kubectl` return at once."""

LAST_WORDS_BYTES = 1000

NODE_START_S = 900.0
"""How long a node that was handed in may take to join: queues of batch systems are long, so a node that comes
later than this still joins; it is only not counted on any more."""

PREFIX = "auto-"
"""Ids of nodes that commands started begin so."""


class EndedInError(ProviderFailed):
    """A command ended by itself with an exit code that says so."""


@dataclass(frozen=True, slots=True)
class LocalProvider:
    """Agents on this machine, as `add-worker` starts them."""

    directory: Path
    plan: ClusterPlan
    tell: Callable[[str], None]

    def check_running(self) -> None:
        """
        Raises:
            ClusterGone: the cluster was ended.
        """
        running_plan(self.directory)

    def new_room(self, nodes: Sequence[Node]) -> Room:
        """What the plan of the cluster gives every node; what its GPUs are, those say that are there."""
        plan = self.plan
        shape = plan.shape(plan.agents)
        amounts: dict[str, int | float | str] = {"cpu": shape.cpus, "memory": shape.memory, "gpu": shape.gpus}
        amounts |= dict(resource.split("=", 1) for resource in plan.resources)
        like = next((node for node in nodes if node.devices), None)
        return Room.whole(Resources.parse(amounts), {"node_group": shape.node_group} if shape.node_group else {}, like)

    def owns(self, node_id: str) -> bool:
        """The nodes of this cluster but the first."""
        return node_id != self.plan.node_id(0) and node_id in running_workers(self.directory)

    async def add(self) -> str:
        try:
            added = await add_worker(self.directory, self.tell, timeout_s=JOIN_S, lock_pause_s=1.0)
        except CommandFailed as error:
            raise ProviderFailed(f"{error.failure.what} {error.failure.why}") from error
        return id_of(added.node)

    async def remove(self, node_id: str) -> None:
        if not await end_worker(self.directory, node_id):
            raise ProviderFailed(f"no agent of {node_id} runs on this machine")


def _joined_ms(node: Node) -> int:
    return node.join_time.ToMilliseconds()


@dataclass(eq=False)
class CommandProvider:
    """Whatever two commands start and end: `sbatch` and `scancel`, `kubectl scale`, a cloud's own program.

    Both get CALLBOARD_NODE (the id that the node's agent must have) and CALLBOARD_CONTROLLER. `up` hands a node in and
    returns; the node counts as on its way until it joins.
    """

    client: Client
    up: str
    down: str
    stated: Resources | None
    _seen: Room | None = None

    def new_room(self, nodes: Sequence[Node]) -> Room | None:
        """What was stated, else what the newest node of this kind has, or the last of them had."""
        own = [node for node in nodes if self.owns(id_of(node))] or list(nodes)
        if self.stated is not None:
            like = max((node for node in own if node.devices), key=_joined_ms, default=None)
            return Room.whole(self.stated, {}, like)
        if own:
            newest = max(own, key=_joined_ms)
            group = {"node_group": newest.node_group} if newest.node_group else {}
            self._seen = Room.whole(resources_from_proto(newest.capacity), dict(newest.labels) | group, newest)
        return self._seen

    def owns(self, node_id: str) -> bool:
        """Nodes that such a command started."""
        return node_id.startswith(PREFIX)

    async def add(self) -> str:
        """Hands a node in and waits until it takes work. One that is not waited for any longer is taken back."""
        node_id = f"{PREFIX}{secrets.token_hex(4)}"
        revision = (await self.client.stats()).revision
        taken_back = True
        try:
            await self._run(self.up, node_id)
            async with asyncio.timeout(NODE_START_S):
                await self._ready(node_id, revision)
            taken_back = False
        except TimeoutError:
            raise ProviderFailed(f"{node_id} did not join within {NODE_START_S:g} s") from None
        except EndedInError:
            taken_back = False  # It said itself that it handed nothing in.
            raise
        finally:
            # Else a batch system would start it when its turn comes, and nobody would know of it.
            if taken_back:
                await self._run(self.down, node_id)
        return node_id

    async def _ready(self, node_id: str, revision: int) -> None:
        async for event in self.client.watch(start_revision=revision + 1, subject=f"nodes/{node_id}"):
            if event.state == "READY":
                return

    async def remove(self, node_id: str) -> None:
        await self._run(self.down, node_id)

    async def _run(self, command: str, node_id: str) -> None:
        variables = {"CALLBOARD_NODE": node_id, "CALLBOARD_CONTROLLER": self.client.address}
        # A file, not a pipe: what the command leaves behind, such as an agent, may go on writing to it.
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_shell(
                command,
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(COMMAND_S):
                    await process.wait()
            except TimeoutError:
                raise ProviderFailed(f"{command!r} did not end within {COMMAND_S:g} s") from None
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):  # It ended just now.
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            if process.returncode:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
                last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise EndedInError(f"{command!r} ended with {process.returncode}: {' '.join(last)}")
