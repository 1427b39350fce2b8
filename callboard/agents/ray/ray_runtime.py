"""Workers as detached Ray actors, placement groups as bookings in Ray.

Whatever the driver does for us may be cut off half-way; so what could be left behind is owed: names of actors to kill
are kept and retried with the next driver until Ray knows nothing of them.
"""

from __future__ import annotations

import asyncio
import shlex
import sys

from callboard.agents.host.framing import Json, RemoteError
from callboard.agents.ray.ray_driver_client import DriverClient, DriverLost
from callboard.agents.runtime import BookedGroup, FoundGroup, GroupBooking, Hosted, HostError, Launch
from callboard.agents.system.tasks import cancelled
from callboard.model.durations import Backoff
from callboard.model.log import structlog
from callboard.security.processes import ProcessId

_log = structlog.get_logger(__name__)

_QUICK_S = 15.0
"""For what Ray does in milliseconds; beyond it the cluster is in trouble and waiting longer doesn't help."""

_LAUNCH_S = 120.0
"""For a host to come up before it is given up. Above any cold start; the worker's own start deadline is what users
see."""

_BOOK_SLACK_S = 10.0
"""After a group's own timeout: for its removal and the driver's answer."""

_RETRY_FIRST_S, _RETRY_MAX_S = 0.5, 10.0
"""Between attempts at what is owed."""


def actor_name(name: str) -> str:
    """Ray's name for a worker: `cb/{job}/{component}/{rank}/g{generation}`."""
    return f"cb/{name}"


def group_name(cluster: str, group_id: str, attempt: int) -> str:
    """Ray's name for an attempt at a placement group: a retry never meets the ghost of an earlier one, and two clusters
    of ours in one Ray cluster never meet each other's."""
    return f"cb/{cluster}/{group_id}/{attempt}"


class RayRuntime:
    """Hosts workers in the Ray node beside the agent."""

    def __init__(self, driver: DriverClient, cluster: str) -> None:
        self._driver = driver
        self._cluster = cluster
        self._owed: dict[str, asyncio.Task[None]] = {}
        self._launching: set[str] = set()
        """Actors that are being made. A kill that reached a driver before the launch of the same name would end what
        an earlier driver made: unseen, and the launch would make it a second time."""

    async def launch(self, launch: Launch) -> RayHosted:
        """Make the actor and learn its process; a driver that was replaced meanwhile finds it again."""
        name = actor_name(launch.name)
        connection = self._driver.connection
        if connection is None:
            raise HostError("this node is in no Ray cluster yet")
        argument = {
            "actor_name": name,
            "node_id": connection.ray_node_id,
            # For a shell: Ray puts it before the path of its worker's program.
            "interpreter": shlex.join(launch.within or [launch.interpreter] * (launch.interpreter != sys.executable)),
            "early": dict(launch.early),
            "placement_group_id": launch.placement_group_id,
            "bundle_index": launch.bundle_index,
            "again": launch.again,
        }
        self._launching.add(name)
        giving_up = asyncio.get_running_loop().call_later(_LAUNCH_S, self.forget, name)
        try:
            answer = await self._launch(name, argument)
        except DriverLost as error:
            raise HostError(str(error)) from error
        except RemoteError as error:
            raise HostError(f"Ray could not host it: {_first_line(error)}") from error
        finally:
            giving_up.cancel()
            self._launching.discard(name)
        return RayHosted(self, self._driver, name, ProcessId(answer["pid"], answer["start_ticks"]))

    async def _launch(self, name: str, argument: Json) -> Json:
        """Ask for the actor, of one driver after the other, also when it was given up: only its process can prove that
        it is gone again."""
        while True:
            try:
                return await self._driver.ask("launch", argument, within_s=None)
            except DriverLost:
                if self._driver.connection is None:
                    raise  # Its Ray node is over.
                argument = {**argument, "again": True}
                _log.info("launch_repeated", actor=name)

    async def attach(self, address: str, process: ProcessId) -> RayHosted:
        """Nothing to do: the driver finds the actor by its name when it is asked something."""
        return RayHosted(self, self._driver, address, process)

    def abandon(self, launch: Launch) -> None:
        """Tell Ray to give the actor up, which ends a launch that waits for it."""
        self.forget(actor_name(launch.name))

    async def book(self, group: GroupBooking) -> BookedGroup:
        connection = self._driver.connection
        if connection is None:
            raise HostError("this node is in no Ray cluster")
        argument = {
            "name": group_name(self._cluster, group.id, group.attempt),
            "bundles": [
                {
                    "ray_node_id": each.ray_node_id,
                    "resources": dict(each.resources),
                    "devices": [list(share) for share in each.devices],
                }
                for each in group.bundles
            ],
            "timeout_s": group.timeout_s,
            "certain": group.certain,
        }
        try:
            booked = await self._driver.ask("book", argument, within_s=group.timeout_s + _BOOK_SLACK_S)
        except RemoteError as error:
            if error.kind != "NotBooked":
                await self.unbook(group.id, group.attempt, "")
            raise HostError(error.message) from error
        except DriverLost as error:
            # Half-made perhaps: nothing of it may be left when the failure is told.
            await self.unbook(group.id, group.attempt, "")
            raise HostError(str(error)) from error
        return BookedGroup(booked["ray_id"], connection.session, booked["devices"])

    async def found(self) -> list[FoundGroup]:
        """Groups with a bundle on this node, and those that wait for room, which are on none."""
        connection = self._driver.connection
        if connection is None:
            raise HostError("this node is in no Ray cluster")
        there = await self._told("groups", {"prefix": f"cb/{self._cluster}/"}, _QUICK_S)
        return [
            FoundGroup(each["name"].split("/")[2], each["ray_id"], connection.session)
            for each in there
            if not each["nodes"] or connection.ray_node_id in each["nodes"]
        ]

    async def unbook(self, group_id: str, attempt: int, ray_id: str) -> None:
        """Remove the group from Ray, however long that takes."""
        argument = {"name": group_name(self._cluster, group_id, attempt), "ray_id": ray_id}
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while True:
            try:
                await self._driver.ask("unbook", argument, within_s=_QUICK_S)
            except (DriverLost, RemoteError) as error:
                _log.warning("placement_group_removal_retried", group=group_id, why=str(error))
                await asyncio.sleep(backoff.next_s())
            else:
                return

    async def listed(self) -> Json:
        """Actors on this node, or on none yet, and every placement group, as Ray lists them."""
        return await self._told("listed", {}, None)

    async def object_stores(self) -> Json:
        """The object store of every node of the Ray cluster."""
        return await self._told("object_stores", {}, None)

    async def _told(self, method: str, argument: Json, within_s: float | None) -> Json:
        try:
            return await self._driver.ask(method, argument, within_s=within_s)
        except (DriverLost, RemoteError) as error:
            raise HostError(str(error)) from error

    async def oom_of(self, hosted: Hosted) -> str:
        """Ray's memory monitor ends workers when its node runs out."""
        try:
            return str(await self._driver.ask("oom_of", {"actor_name": hosted.actor_name}, within_s=_QUICK_S))
        except (DriverLost, RemoteError) as error:
            _log.info("death_cause_unknown", actor=hosted.actor_name, why=str(error))
            return ""

    async def close(self) -> None:
        """Give up what is owed: the Ray node goes away with all of it."""
        await cancelled(self._owed.values())

    def forget(self, name: str) -> None:
        """Have Ray give an actor up; of one whose process is gone, its books needn't wait to find that out."""
        if name not in self._owed:
            task = asyncio.create_task(self._kill(name))
            self._owed[name] = task
            task.add_done_callback(lambda _: self._owed.pop(name, None))

    async def _kill(self, name: str) -> None:
        while self._driver.connection is not None:
            try:
                argument = {"actor_name": name, "launching": name in self._launching}
                await self._driver.ask("kill", argument, within_s=_QUICK_S)
            except (DriverLost, RemoteError) as error:
                _log.warning("actor_kill_retried", actor=name, why=str(error))
                await asyncio.sleep(_RETRY_FIRST_S)
            else:
                return


def _first_line(error: RemoteError) -> str:
    """Ray's errors go on with advice about other causes for a screenful."""
    return f"{error.kind}: {error.message.splitlines()[0] if error.message else ''}"[:500]


class RayHosted:
    """A worker host in a Ray actor."""

    def __init__(self, runtime: RayRuntime, driver: DriverClient, name: str, process: ProcessId) -> None:
        self.process = process
        self.actor_name = name
        self.address = name
        self._runtime = runtime
        self._driver = driver

    async def control(self, method: str, argument: Json = None) -> Json:
        """Ask the host. Every control method may be asked twice, so a lost driver only costs a repetition."""
        request = {"actor_name": self.actor_name, "method": method, "argument": argument}
        while True:
            try:
                return await self._driver.ask("control", request, within_s=None)
            except DriverLost as error:
                if self._driver.connection is None:
                    # Its Ray node is over and the actor with it: asked again, this would be said again at once.
                    raise HostError(str(error)) from error
                _log.info("control_repeated", actor=self.actor_name, method=method, why=str(error))
            except RemoteError as error:
                raise HostError(_first_line(error)) from error

    @property
    def peak_bytes(self) -> int:
        """Only the raylet is told."""
        return 0

    def exit_message(self) -> str:
        """Its parent, the raylet, learns the exit status; see `processes` for who else does."""
        return f"process {self.process.pid} ended"

    def release(self) -> None:
        self._runtime.forget(self.actor_name)
