"""The Ray driver of one agent, the only process of ours that imports Ray.

Started as `python -m callboard.agents.ray.ray_driver FD`: a child, because a driver dies with its cluster. After the
death of the GCS Ray ends the process about 60 s later, and calls hang before that (docs/agents.md). It keeps nothing
that can't be had again: hosts are detached actors found by name, placement groups are found by id or name. The end of
its socket ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast

import ray
from ray._private.state import actors as ray_actors
from ray._private.state import available_resources_per_node, total_resources_per_node
from ray._private.state import jobs as ray_jobs
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from callboard.agents.host.framing import Json, serve
from callboard.agents.host.worker_host import CONTROL_METHODS
from callboard.agents.ray.ray_bookings import NAMESPACE, Bookings, group_of
from callboard.agents.ray.worker_actor import GIVE_AWAY, RayWorkerHost
from callboard.security.processes import PROC, identify, start_ms

CONTROL_GROUP = "control"
_CONTROL_CALLS = 64
"""Control calls at once in one host; hanging hooks hold theirs, so more than a host has hooks."""

_CLAIM = "callboard/node/"
"""Before Ray's id of a node: the key under which it is said whose node it is."""

_HOST_CALLS = 1000
"""Calls the actor accepts at once; the host's own lane holds them to the component's max_concurrency."""

_STORE = "object_store_memory"
"""Ray's name for the memory of a node's object store, among its resources; the amounts are bytes."""

_THREADS = 64
"""For Ray's blocking calls: more than a node has placement groups under way."""

_POLL_S = 0.02
"""Between looks at whether Ray's table has heard of a death, or of an actor that is up."""

_DEAD_S = 1.0
"""For Ray's table to hear that an actor died: milliseconds, and below the time that a report waits for its cause."""


class Driver:
    """Answers the agent's requests."""

    def __init__(self) -> None:
        self._host_class = _host_class()
        self._actors: dict[str, Any] = {}
        self._begun: dict[str, asyncio.Event] = {}
        """By name of an actor: set once its launch has made or found it, or could not."""
        self._bookings = Bookings()
        # Groups that wait to be made must not hold up the calls beside them.
        self._bookers = ThreadPoolExecutor(_THREADS, thread_name_prefix="booking")
        self._blocking: dict[str, Callable[..., Json]] = {
            "connect": self._connect,
            "claim": self._claim,
            "groups": self._groups,
            "listed": self._listed,
            "object_stores": self._object_stores,
            "unbook": self._bookings.remove,
        }

    async def handle(self, method: str, argument: Json) -> Json:
        if method in self._blocking:
            return await asyncio.to_thread(self._blocking[method], **argument)
        match method:
            case "ping":
                return None
            case "launch":
                return await self._launch(**argument)
            case "kill":
                return await self._kill(**argument)
            case "oom_of":
                return await self._oom_of(**argument)
            case "control":
                return await self._control(**argument)
            case "book":
                book = partial(self._bookings.book, **argument)
                return await asyncio.get_running_loop().run_in_executor(self._bookers, book)
            case _:
                raise ValueError(f"unknown method {method!r}")

    @staticmethod
    def _connect(address: str, node_ip: str) -> Json:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            _node_ip_address=node_ip or None,
            log_to_driver=False,
            configure_logging=False,
        )
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        node = next(each for each in nodes if each["NodeID"] == node_id)
        return {
            "ray_node_id": node_id,
            "gcs_address": context.gcs_address,
            "session": context.get_session_name(),
            "node_ip": node["NodeManagerAddress"],
        }

    @staticmethod
    def _claim(owner: str) -> Json:
        """Say that this node is `owner`'s, in Ray's own store, and return the addresses of nodes that are another's.

        The store ends with the Ray cluster, and what it says of a node counts only while that node lives.
        """
        own = ray.get_runtime_context().get_node_id()
        _internal_kv_put(_CLAIM + own, owner, overwrite=True, namespace=NAMESPACE)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        others = []
        for node in nodes:
            if node["Alive"] and node["NodeID"] != own:
                claimed: bytes | None = _internal_kv_get(_CLAIM + node["NodeID"], namespace=NAMESPACE)
                if claimed is not None and claimed.decode() != owner:
                    others.append(node["NodeManagerAddress"])
        if others:
            _internal_kv_del(_CLAIM + own, namespace=NAMESPACE)
        return sorted(others)

    @staticmethod
    def _listed() -> Json:
        """Actors of this node or of none yet, and every placement group. From Ray's own table: its public list needs
        the dashboard."""
        own = ray.get_runtime_context().get_node_id()
        jobs: list[dict[str, Any]] = ray_jobs()  # type: ignore[no-untyped-call]
        programs = {job["JobID"]: job for job in jobs if not job["IsDead"]}
        none = {"DriverPid": 0, "DriverIPAddress": ""}
        actors = [
            {
                "id": str(actor["ActorID"]),
                "name": str(actor["Name"] or ""),
                "class_name": str(actor["ActorClassName"] or ""),
                "state": str(actor["State"]),
                "pid": int(actor["Pid"] or 0),
                "ray_node_id": str(actor["Address"]["NodeID"] or ""),
                "program_pid": int(programs.get(actor["JobID"], none)["DriverPid"]),
                "program_ip": str(programs.get(actor["JobID"], none)["DriverIPAddress"]),
            }
            for actor in cast("dict[str, dict[str, Any]]", ray_actors()).values()
            if actor["State"] != "DEAD" and (actor["Address"]["NodeID"] or own) == own
        ]
        groups = [
            {"id": table["placement_group_id"], "name": table["name"], "state": table["state"]}
            for table in placement_group_table().values()
            if table["state"] != "REMOVED"
        ]
        return {"actors": actors, "placement_groups": groups}

    @staticmethod
    def _object_stores() -> Json:
        """How full the object store of each node is, from the amounts that nodes report to the GCS all the time: two
        calls to it, however many nodes and objects there are."""
        total: dict[str, dict[str, float]] = total_resources_per_node()  # type: ignore[no-untyped-call]
        left: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return [
            {
                "ray_node_id": node,
                "used_bytes": int(amounts[_STORE] - left[node].get(_STORE, 0.0)),
                "total_bytes": int(amounts[_STORE]),
            }
            for node, amounts in sorted(total.items())
            if _STORE in amounts and node in left
        ]

    @staticmethod
    async def _oom_of(actor_name: str) -> Json:
        """What Ray says of an actor that it ended for lack of memory; empty when that isn't why it died."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _DEAD_S
        while True:
            # Its table hears of a death after the kernel does, and we may be faster.
            actors = await asyncio.to_thread(lambda: cast("dict[str, dict[str, Any]]", ray_actors()))
            found = next((actor for actor in actors.values() if actor["Name"] == actor_name), None)
            if found is None or found["State"] == "DEAD" or loop.time() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        if found is not None and found["State"] == "DEAD" and found["DeathCause"].HasField("oom_context"):
            return str(found["DeathCause"].oom_context.error_message)
        return ""

    # Hosts.

    async def _launch(self, *, actor_name: str, again: bool, **how: Any) -> Json:
        """Make a host, or find it when a driver before us made it; returns who its process is.

        Args:
            again: it may have been made before, and be dead for Ray while its process still lives.
        """
        try:
            if again and (left := await asyncio.to_thread(_left_of, actor_name)) is not None:
                return left
            actor = await self._make(actor_name, **how)
        finally:
            self._begin(actor_name).set()
        try:
            await self._give_main_thread_away(actor._actor_id.hex())  # noqa: SLF001 - Ray's table goes by it
            return await actor.ping.remote()
        except ray.exceptions.RayActorError:
            # Ray says so before the process is gone, and only its process can prove that.
            left = await asyncio.to_thread(_left_of, actor_name)
            if left is None:
                raise
            return left

    async def _make(
        self,
        actor_name: str,
        *,
        node_id: str,
        interpreter: str,
        early: dict[str, str],
        placement_group_id: str,
        bundle_index: int,
    ) -> Any:
        # Neither restarts nor retries: a new generation is the controller's decision.
        options: dict[str, Any] = {
            "name": actor_name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _HOST_CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        index = None
        if placement_group_id:
            index = await asyncio.to_thread(self._bookings.index_of, placement_group_id, bundle_index)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group_of(placement_group_id),
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=True,
            )
        # Only where asked for: a runtime_env doubles the cold start (m).
        runtime_env: dict[str, Any] = {"py_executable": interpreter} if interpreter else {}
        if early:
            runtime_env["env_vars"] = early
        if runtime_env:
            options["runtime_env"] = runtime_env
        actor = await asyncio.to_thread(self._host_class.options(**options).remote, index)
        self._actors[actor_name] = actor
        return actor

    def _begin(self, actor_name: str) -> asyncio.Event:
        return self._begun.setdefault(actor_name, asyncio.Event())

    @staticmethod
    async def _give_main_thread_away(actor_id: str) -> None:
        """Have the host's main thread given to code of the user: once Ray has made it, and before its first call."""
        while True:
            told = cast("dict[str, Any]", await asyncio.to_thread(ray_actors, actor_id))
            state, pid = told.get("State"), int(told.get("Pid") or 0)
            if state == "DEAD" or (state == "ALIVE" and not _catches(pid, GIVE_AWAY)):
                return  # The first call tells why it is dead.
            if state == "ALIVE":
                with suppress(ProcessLookupError):
                    os.kill(pid, GIVE_AWAY)
            await asyncio.sleep(_POLL_S)

    async def _control(self, actor_name: str, method: str, argument: Json) -> Json:
        if method not in CONTROL_METHODS:
            raise ValueError(f"{method!r} is not a control method")
        actor = await asyncio.to_thread(self._actor, actor_name)
        arguments = {} if argument is None else argument
        if method == "assign":
            return await actor.assign.remote(arguments)
        return await getattr(actor, method).remote(**arguments)

    async def _kill(self, *, actor_name: str, launching: bool) -> Json:
        """Tell Ray that an actor is over; also before it is up. Returns whether there was one.

        Args:
            launching: whoever asks has also asked for its launch, which comes first, whichever reaches us first.
        """
        if launching:
            await self._begin(actor_name).wait()
        self._begun.pop(actor_name, None)
        return await asyncio.to_thread(self._end, actor_name)

    def _end(self, actor_name: str) -> bool:
        try:
            actor = self._actor(actor_name)
        except ValueError:
            return False
        ray.kill(actor, no_restart=True)
        self._actors.pop(actor_name, None)
        return True

    def _actor(self, actor_name: str) -> Any:
        if actor_name not in self._actors:
            self._actors[actor_name] = ray.get_actor(actor_name, namespace=NAMESPACE)
        return self._actors[actor_name]

    # Placement groups.

    @staticmethod
    def _groups(prefix: str) -> Json:
        """Groups in Ray whose name begins so: who they are, and on which nodes their bundles are (none: pending)."""
        return [
            {
                "name": table["name"],
                "ray_id": table["placement_group_id"],
                "nodes": [node for node in table["bundles_to_node_id"].values() if node],
            }
            for table in placement_group_table().values()
            if table["name"].startswith(prefix) and table["state"] != "REMOVED"
        ]


def _left_of(actor_name: str) -> Json:
    """The process of a dead actor that still lives here; None: there is none."""
    own = ray.get_runtime_context().get_node_id()
    for actor in cast("dict[str, dict[str, Any]]", ray_actors()).values():
        process = identify(int(actor["Pid"] or 0)) if actor["Name"] == actor_name and actor["State"] == "DEAD" else None
        # A process that began after the death has only got its number.
        if process is not None and actor["Address"]["NodeID"] == own and start_ms(process) <= actor["EndTime"]:
            return {"pid": process.pid, "start_ticks": process.start_ticks}
    return None


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; not if it is gone."""
    try:
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _host_class() -> Any:
    """The worker host as an actor class whose control methods have a group of their own."""
    for method in CONTROL_METHODS:
        function: Callable[..., Any] = getattr(RayWorkerHost, method)
        setattr(RayWorkerHost, method, ray.method(concurrency_group=CONTROL_GROUP)(function))
    remote: Any = ray.remote  # Its overloads don't know actors with groups.
    return remote(concurrency_groups={CONTROL_GROUP: _CONTROL_CALLS})(RayWorkerHost)


async def _serve(descriptor: int) -> None:
    # Groups that wait to be ready must not hold up the calls beside them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    await serve(socket.socket(fileno=descriptor), Driver().handle)


def main() -> None:
    """Serve until the agent is gone."""
    asyncio.run(_serve(int(sys.argv[1])))
    # Not by way of Ray's exit handlers, which wait for a cluster that may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
