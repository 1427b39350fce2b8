"""The SDK for asyncio programs: one object that talks to one controller."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self, TypeVar

from google.protobuf.message import Message

from callboard.client.calls import methods
from callboard.client.calls.cluster_calls import ClusterCalls, id_of
from callboard.client.calls.connection import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S, Connection
from callboard.client.calls.job_calls import LIVE_STATES, JobCalls, SessionKeeper
from callboard.client.calls.methods import Method
from callboard.client.clusters import LocalCluster, Target, find_controller
from callboard.client.errors import NoRay, OlderController
from callboard.client.workers import connect_ray
from callboard.security.tls import TlsFiles
from callboard.security.tokens import find_token
from callboard.v1.node_pb2 import NodeState
from callboard.v1.scheduler_pb2 import GetOverviewResponse, Stats

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class Client(JobCalls, ClusterCalls):
    """A client of one controller.

    ::

        async with Client() as cb:
            await cb.ensure_pool("rlhf", nominal={"cpu": 6, "memory": "8GiB"})
            job = await cb.submit({"name": "train", "pool": "rlhf", "components": [...]})
            await job.running(timeout=120)

    Every call has a deadline. While the controller is away, calls that may be made twice are repeated until then, for
    ``retry`` seconds while none has answered yet; a submit carries a request id, so it is one of them. A client
    belongs to the event loop it is made in; threads and notebooks use :class:`callboard.client.SyncClient`.

    Attributes:
        target: the controller and how it was found.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        retry: float = DEFAULT_RETRY_S,
        use_proxy: bool = False,
        tls: TlsFiles | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        """Finds the controller; connects with the first call.

        Args:
            address: "host:port" or "host" (port 7700); of several controllers of which one leads, all, with commas
                between them; None: CALLBOARD_CONTROLLER, else the only one that runs on this machine.
            timeout: deadline of each call in seconds.
            retry: seconds for which calls are repeated while no controller has answered this client yet; one that
                has answered before is waited for until the deadline. 0: never.
            use_proxy: go through http_proxy of the environment.
            tls: files to connect with by TLS, ``TlsFiles(ca=Path("ca.pem"), cert=Path("cert.pem"), key=…)``; they come
                before those of the environment, and are read again when they change. None: they are found.
            token_file: private file with the token to show; None: it is found, or the certificate says who calls.

        Raises:
            NoController: no address is stated and no controller runs on this machine.
            SeveralControllers: no address is stated and several run on this machine.
            BadToken: a file can't be used.
        """
        self.target: Target = find_controller(address)
        named = None if token_file is None else Path(token_file)
        self._connection = Connection(
            self.target.address,
            timeout_s=timeout,
            retry_s=retry,
            use_proxy=use_proxy,
            find=lambda at: find_token(at, named, stated_tls=tls),
            tls=tls,
        )
        self._sessions = SessionKeeper(self._connection)
        self._cluster: LocalCluster | None = None

    @property
    def address(self) -> str:
        """The controller's address, "host:port"."""
        return self.target.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @classmethod
    async def local(
        cls,
        *,
        agents: int = 1,
        gpus_per_node: int | None = None,
        machine_gpus: int | str = "",
        cpus_per_node: float | str = "",
        memory_per_node: str = "",
        runtime: str = "ray",
        startup_timeout: float = 120.0,
    ) -> Self:
        """Starts a cluster on this machine for this program, and returns a client of it: for scripts and tests.

        ::

            async with await Client.local() as cb:
                job = await cb.submit({"name": "train", "pool": "default", "components": [...]})

        The cluster has a pool "default" without limits. It ends when the client is closed, and also when the program
        exits or is killed.

        Args:
            agents: number of nodes.
            gpus_per_node: GPUs of each node; None: an equal share of ``machine_gpus``, or 2 simulated ones.
            machine_gpus: ``"auto"``: deal out this machine's real GPUs (8 simulated ones where there are none); a
                number: so many simulated ones; empty: every node has simulated ones of its own.
            cpus_per_node: CPUs of each node for jobs; empty: as `callboard up` says.
            memory_per_node: memory of each node for jobs, such as ``"4GiB"``; empty: as `callboard up` says.
            runtime: ``"ray"``: workers are Ray actors and can be called; ``"process"``: plain processes, without Ray.
            startup_timeout: seconds until the cluster must be ready.

        Raises:
            ClusterFailed: it did not start; the error says why.
        """
        cluster = await LocalCluster.start(
            {
                "agents": agents,
                "gpus_per_node": 2 if gpus_per_node is None and not machine_gpus else gpus_per_node,
                "machine_gpus": machine_gpus,
                "cpus_per_node": cpus_per_node,
                "memory_per_node": memory_per_node,
                "runtime": runtime,
                "timeout": startup_timeout,
            }
        )
        client = cls(cluster.controller)
        client._cluster = cluster
        try:
            await client.create_pool({"name": "default"})
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        """Ends every call in flight, the connection, and the cluster that :meth:`local` started.

        Session-owned jobs are not renewed any more: the controller cancels them when their lease is over.
        """
        await self._sessions.close()
        await self._connection.close()
        if self._cluster is not None:
            await self._cluster.stop()

    async def call(
        self, method: Method[..., Request, Response], request: Request, *, timeout: float | None = None
    ) -> Response:
        """One call of the API as it is on the wire, for what has no method of its own.

        Args:
            method: one of :mod:`callboard.client.calls.methods`.
            request: its request.
            timeout: deadline in seconds; None: the client's.

        Raises:
            CallboardError: the call failed; the type says why.
        """
        return await self._connection.call(method, request, timeout_s=timeout)

    async def overview(self, *, nodes: int = 100, jobs: int = 100) -> GetOverviewResponse:
        """What one screen shows of a cluster of any size: figures, pools, and the nodes and jobs that matter most.

        A controller that is too old to choose is asked for its lists: the first of each come.

        Args:
            nodes: most nodes, up to 1000: those that need attention, then by rank.
            jobs: most jobs, up to 1000: half that hold something, half that start next.
        """
        request = methods.GET_OVERVIEW.request(max_nodes=nodes, max_jobs=jobs)
        try:
            return await self._connection.call(methods.GET_OVERVIEW, request)
        except OlderController:
            seen = await self.everything()
        there = [node for node in seen.nodes if node.state != NodeState.NODE_STATE_LEFT]
        return GetOverviewResponse(
            stats=seen.stats,
            pools=seen.pools,
            nodes=there[:nodes],
            more_nodes=max(0, len(there) - nodes),
            jobs=seen.jobs[:jobs],
            more_jobs=max(0, len(seen.jobs) - jobs),
            ray_nodes=seen.ray_nodes,
        )

    async def everything(self) -> GetOverviewResponse:
        """An overview of all that the lists hold, with nothing left out; also the nodes that have left."""
        stats, nodes, pools, jobs = await asyncio.gather(
            self.stats(), self.list_nodes(), self.list_pools(), self.list_jobs(states=LIVE_STATES)
        )
        return GetOverviewResponse(
            stats=stats,
            nodes=nodes,
            pools=pools,
            jobs=jobs,
            ray_nodes={node.ray_node_id: id_of(node) for node in nodes if node.ray_node_id},
        )

    async def reachable(self, timeout: float) -> bool:
        """Whether the controller can be reached within ``timeout`` seconds."""
        return await self._connection.ready(timeout)

    async def connect_ray(self) -> None:
        """Connects this process to the Ray cluster of the workers, so that their handles can be called.

        The token of a cluster that `callboard up` started on this machine is found; for any other set
        RAY_AUTH_TOKEN_PATH and RAY_AUTH_MODE=token before. Blocks the loop for about a second: Ray wants
        the main thread, for its signal handlers.

        Raises:
            ConnectionError: no Ray cluster answers there, or it wants another token.
            NoRay: the cluster hosts its workers as plain processes.
        """
        address, token_path = ray_of(self.target, await self.stats())
        connect_ray(address, token_path=token_path)


def ray_of(target: Target, stats: Stats) -> tuple[str, str]:
    """Address of the Ray cluster of the workers, and the file with its token (empty: none is known).

    Raises:
        NoRay: the cluster hosts its workers as plain processes.
    """
    if not stats.ray_address:
        raise NoRay
    return stats.ray_address, target.cluster.ray_token_path if target.cluster else ""
