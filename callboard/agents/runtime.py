"""The runtime of a node: how it hosts workers and books placement groups.

`Runtime` is the question; `ProcessRuntime` answers it with plain child processes, `RayRuntime` with detached
Ray actors. Everything above (start deadlines, the stop ladder, proof of death) is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from callboard.agents.host.framing import Json
from callboard.security.processes import ProcessId


class HostError(Exception):
    """The node could not host what was asked; nothing of it is left, or it is owed to be removed."""


@dataclass(frozen=True)
class Launch:
    """What a runtime needs to bring up one empty worker host."""

    name: str
    """`{job}/{component}/{rank}/g{generation}`: unique on the node, safe in file and actor names."""
    interpreter: str
    """Absolute path of the Python that runs the worker."""
    variables: Mapping[str, str]
    """Environment of a worker that is started with one; a Ray actor gets it at its assignment."""
    early: Mapping[str, str] = field(default_factory=dict)
    """Those of them that must be there before the interpreter starts: `LD_*` and `PYTHON*` of the job."""
    placement_group_id: str = ""
    """Ray's id (hex) of the placement group whose bundle hosts the actor; empty: beside the bundles."""
    bundle_index: int = 0
    within: Sequence[str] = ()
    """What runs its host in a container, and takes the runtime's arguments for it; empty: it runs here."""
    output: str = ""
    """Folder for what its process writes before its assignment; empty: the node's logs."""
    again: bool = False
    """It may have been asked for before: a process that is left of that is found, also one that is being ended."""


class Hosted(Protocol):
    """A worker host that is up: its process is known."""

    @property
    def process(self) -> ProcessId:
        """The worker's process."""

    @property
    def actor_name(self) -> str:
        """Name of the Ray actor; empty for a plain process."""

    @property
    def address(self) -> str:
        """What `Runtime.attach` finds it by."""

    async def control(self, method: str, argument: Json = None) -> Json:
        """Ask a control method of the host. Has no time limit: the asker bounds it.

        Raises:
            HostError: the host can't answer any more.
        """

    @property
    def peak_bytes(self) -> int:
        """Most memory that the process held, known once `exit_message` was asked; 0: nobody was told."""

    def exit_message(self) -> str:
        """How the process ended, as one sentence; called once it is gone."""

    def release(self) -> None:
        """Let go of a worker whose process is gone."""


@dataclass(frozen=True)
class BundleBooking:
    """One bundle to book in Ray: what the ledger decided."""

    ray_node_id: str
    resources: Mapping[str, float]
    """Amounts in Ray's units: {"CPU": 1.5, "GPU": 1, "memory": 1073741824}."""
    devices: Sequence[tuple[int, int]] = ()
    """(index, thousandths) of its devices: whole ones, or a part of one; empty: whichever Ray gives."""


@dataclass(frozen=True)
class GroupBooking:
    """A placement group to book."""

    id: str
    """Our id."""
    attempt: int
    bundles: Sequence[BundleBooking]
    timeout_s: float
    certain: bool = False
    """The bundles must have these very devices; otherwise others will do."""


@dataclass(frozen=True)
class BookedGroup:
    """A placement group that is ready, and equal to what was asked."""

    ray_id: str = ""
    ray_session: str = ""
    devices: Sequence[Sequence[int]] = ()
    """Indexes of each bundle's devices, where they are others than were asked; empty: those."""


@dataclass(frozen=True)
class FoundGroup:
    """A placement group that is there, whoever made it."""

    id: str
    """Our id, by its name."""
    ray_id: str
    ray_session: str


class Runtime(Protocol):
    """Hosts workers and books placement groups on one node."""

    async def launch(self, launch: Launch) -> Hosted:
        """Bring up an empty worker host: no code of the user runs before its assignment.

        Raises:
            HostError: it can't; one sentence says why.
        """

    async def attach(self, address: str, process: ProcessId) -> Hosted:
        """The host that an earlier agent of this node launched.

        Raises:
            HostError: it can't be reached.
        """

    def abandon(self, launch: Launch) -> None:
        """Hurry a running `launch` to its end: it will return or raise soon."""

    async def book(self, group: GroupBooking) -> BookedGroup:
        """Make a placement group; the same attempt booked twice is the same group.

        Raises:
            HostError: it can't be made as asked; nothing of it is left.
        """

    async def found(self) -> list[FoundGroup]:
        """Placement groups of this cluster that are there, as far as this node is the one to tell of them.

        Raises:
            HostError: it can't be found out.
        """

    async def unbook(self, group_id: str, attempt: int, ray_id: str) -> None:
        """Remove a placement group; fine when it was never made. Retries until done."""

    async def listed(self) -> Json:
        """What the runtime's cluster lists, whoever made it: {"actors": […], "placement_groups": […]}, each as the
        fields of `RayActor` and `RayPlacementGroup`. Has no time limit: the asker bounds it.

        Raises:
            HostError: it can't be asked.
        """

    async def object_stores(self) -> Json:
        """How full the object stores of the runtime's cluster are: a list of the fields of `RayObjectStore`. Has no
        time limit: the asker bounds it.

        Raises:
            HostError: it can't be asked.
        """

    async def oom_of(self, hosted: Hosted) -> str:
        """What the runtime says of a worker that it ended itself for lack of memory; empty when it didn't, or can't
        tell. Has no time limit: the asker bounds it."""

    async def close(self) -> None:
        """End what the runtime itself started."""
