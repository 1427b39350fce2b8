"""The SDK for scripts, threads and notebooks: the same calls as :class:`callboard.client.Client`, blocking.

Guaranteed: safe from any thread, several at once; usable where an event loop runs already (a notebook), which it
blocks as any blocking call would. All clients of a process share one event loop in one background thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from callboard.client.address import Target
from callboard.client.background import background_loop
from callboard.client.client import Client, ray_of
from callboard.client.connection import DEFAULT_RETRY_S, DEFAULT_TIMEOUT_S
from callboard.client.methods import Method
from callboard.client.stores import ObjectStore
from callboard.client.sync_jobs import SyncJobHandle
from callboard.client.workers import WorkerHandle, connect_ray
from callboard.model.policy import PreemptionPolicy as ExactPolicy
from callboard.model.requests import JobSpec, PoolSpec, PreemptionPolicy
from callboard.model.specs import JobSpec as ExactJobSpec
from callboard.model.specs import PoolSpec as ExactPoolSpec
from callboard.v1.event_pb2 import Event
from callboard.v1.inspection_pb2 import NodeInspection
from callboard.v1.job_pb2 import Explanation, Job, Worker
from callboard.v1.node_pb2 import Node
from callboard.v1.placement_group_pb2 import PlacementGroup
from callboard.v1.pool_pb2 import Pool
from callboard.v1.scheduler_pb2 import AuditEntry, Demand, Stats

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class SyncClient:
    """A client of one controller whose calls block.

    ::

        with SyncClient() as cb:
            cb.ensure_pool("rlhf", nominal={"cpu": 6, "memory": "8GiB"})
            job = cb.submit({"name": "train", "pool": "rlhf", "components": [...]})
            job.running(timeout=120)

    Every method is that of :class:`callboard.client.Client`: arguments, results and errors are described there.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        retry: float = DEFAULT_RETRY_S,
        use_proxy: bool = False,
    ) -> None:
        """Finds the controller; connects with the first call. Arguments and errors as of ``Client``."""

        async def make() -> Client:
            return Client(address, timeout=timeout, retry=retry, use_proxy=use_proxy)

        self._loop = background_loop()
        self._client = self._loop.run(make())

    @classmethod
    def local(
        cls,
        *,
        agents: int = 1,
        gpus_per_node: int = 2,
        cpus_per_node: float | str = "",
        memory_per_node: str = "",
        runtime: str = "ray",
        startup_timeout: float = 120.0,
    ) -> Self:
        """Starts a cluster on this machine for this program: ``with SyncClient.local() as cb: …``. It ends with the
        client, or with the program."""
        starting = Client.local(
            agents=agents,
            gpus_per_node=gpus_per_node,
            cpus_per_node=cpus_per_node,
            memory_per_node=memory_per_node,
            runtime=runtime,
            startup_timeout=startup_timeout,
        )
        made = cls.__new__(cls)
        made._loop = background_loop()  # noqa: SLF001 - its own
        made._client = made._loop.run(starting)  # noqa: SLF001
        return made

    @property
    def target(self) -> Target:
        """The controller and how it was found."""
        return self._client.target

    @property
    def address(self) -> str:
        """The controller's address, "host:port"."""
        return self._client.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call in flight and the connection; session-owned jobs are not renewed any more."""
        self._loop.run(self._client.close())

    def call(self, method: Method[Request, Response], request: Request, *, timeout: float | None = None) -> Response:
        """One call of the API as it is on the wire, for what has no method of its own."""
        return self._loop.run(self._client.call(method, request, timeout=timeout))

    def reachable(self, timeout: float) -> bool:
        """Whether the controller can be reached within ``timeout`` seconds."""
        return self._loop.run(self._client.reachable(timeout))

    def connect_ray(self) -> None:
        """Connects this process to the Ray cluster of the workers. Call it in the main thread, as Ray wants."""
        address, token_path = ray_of(self._client.target, self.stats())
        connect_ray(address, token_path=token_path)

    def submit(self, spec: JobSpec | ExactJobSpec | Mapping[str, Any], *, request_id: str = "") -> SyncJobHandle:
        """Submits a job. One with a session owner is renewed in the background until this client is closed."""
        return SyncJobHandle(self._loop, self._loop.run(self._client.submit(spec, request_id=request_id)))

    def send_code(self, spec: JobSpec | Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends the directories that components name as ``working_dir``; returns the spec with packages instead."""
        return self._loop.run(self._client.send_code(spec))

    def validate(self, spec: JobSpec | ExactJobSpec | Mapping[str, Any]) -> Explanation:
        """What a submit would do now: checked and planned, nothing started."""
        return self._loop.run(self._client.validate(spec))

    def get_job(self, name: str) -> SyncJobHandle:
        """The newest job of that name, or the job of that uid."""
        return SyncJobHandle(self._loop, self._loop.run(self._client.get_job(name)))

    def report(self, name: str, gauges: Mapping[str, float]) -> dict[str, int]:
        """Reports gauges of a job."""
        return self._loop.run(self._client.report(name, gauges))

    def list_workers(self, *, job: str = "", node: str = "") -> list[tuple[Job, Worker]]:
        """Workers of the jobs that have not ended, each with its job."""
        return self._loop.run(self._client.list_workers(job=job, node=node))

    def inspect_node(
        self,
        node_id: str,
        *,
        job: str = "",
        component: str = "",
        rank: int | None = None,
        environment: bool = False,
        foreign: bool = False,
    ) -> NodeInspection:
        """What a node sees now: CPU, memory and calls of its workers."""
        ask = self._client.inspect_node(
            node_id, job=job, component=component, rank=rank, environment=environment, foreign=foreign
        )
        return self._loop.run(ask)

    def object_stores(self, nodes: Sequence[Node] | None = None) -> list[ObjectStore]:
        """How full the object store of each node of Ray is, by Ray's own account."""
        return self._loop.run(self._client.object_stores(nodes))

    def cluster_resources(self) -> dict[str, float]:
        """What the nodes that take part have, in numbers of CPUs and GPUs, bytes of memory."""
        return self._loop.run(self._client.cluster_resources())

    def available_resources(self) -> dict[str, float]:
        """What of it is free, in the same units."""
        return self._loop.run(self._client.available_resources())

    def lookup(self, alias: str) -> list[WorkerHandle]:
        """Handles of the workers whose component carries an alias; see :meth:`Client.lookup`."""
        return self._loop.run(self._client.lookup(alias))

    def list_jobs(self, *, pool: str = "", states: Sequence[str] = ()) -> list[Job]:
        """Jobs, newest submission first."""
        return self._loop.run(self._client.list_jobs(pool=pool, states=states))

    def create_pool(self, spec: PoolSpec | ExactPoolSpec | Mapping[str, Any], *, validate_only: bool = False) -> Pool:
        """Makes a pool; one that exists with an equal spec is returned as it is."""
        return self._loop.run(self._client.create_pool(spec, validate_only=validate_only))

    def ensure_pool(self, name: str, **fields: Any) -> Pool:
        """Makes the pool ``name`` unless it exists with an equal spec."""
        return self._loop.run(self._client.ensure_pool(name, **fields))

    def update_pool(
        self,
        spec: PoolSpec | ExactPoolSpec | Mapping[str, Any],
        *,
        fields: Sequence[str] = (),
        etag: str = "",
        validate_only: bool = False,
    ) -> Pool:
        """Changes a pool."""
        return self._loop.run(self._client.update_pool(spec, fields=fields, etag=etag, validate_only=validate_only))

    def get_pool(self, name: str) -> Pool:
        """One pool."""
        return self._loop.run(self._client.get_pool(name))

    def list_pools(self) -> list[Pool]:
        """Every pool, by name."""
        return self._loop.run(self._client.list_pools())

    def delete_pool(self, name: str, *, force: bool = False) -> Pool | None:
        """Deletes a pool."""
        return self._loop.run(self._client.delete_pool(name, force=force))

    def list_placement_groups(self, *, pool: str = "") -> list[PlacementGroup]:
        """Every placement group, by id."""
        return self._loop.run(self._client.list_placement_groups(pool=pool))

    def get_placement_group(self, group_id: str) -> PlacementGroup:
        """One placement group."""
        return self._loop.run(self._client.get_placement_group(group_id))

    def delete_placement_group(self, group_id: str, *, when_free: bool = False) -> PlacementGroup | None:
        """Removes an idle placement group; a reserved one stays away until its pool is updated."""
        return self._loop.run(self._client.delete_placement_group(group_id, when_free=when_free))

    def get_node(self, node_id: str) -> Node:
        """One node."""
        return self._loop.run(self._client.get_node(node_id))

    def list_nodes(self) -> list[Node]:
        """Every node, by rank."""
        return self._loop.run(self._client.list_nodes())

    def cordon_node(self, node_id: str) -> Node:
        """Nothing new starts on the node; what runs goes on."""
        return self._loop.run(self._client.cordon_node(node_id))

    def drain_node(self, node_id: str, *, within: float | str = 0, reason: str = "") -> Node:
        """Nothing new starts on the node, and what runs there yields, with notice. Returns at once."""
        return self._loop.run(self._client.drain_node(node_id, within=within, reason=reason))

    def uncordon_node(self, node_id: str) -> Node:
        """Takes a cordon or a drain back."""
        return self._loop.run(self._client.uncordon_node(node_id))

    def remove_node(self, node_id: str) -> None:
        """Forgets a node that is LOST or has LEFT."""
        self._loop.run(self._client.remove_node(node_id))

    def demand(self) -> list[Demand]:
        """What waiting jobs and growing components want beyond what there is, oldest first."""
        return self._loop.run(self._client.demand())

    def audit(self, *, last: int = 100, who: str = "") -> list[AuditEntry]:
        """Who changed what, newest first; for operators."""
        return self._loop.run(self._client.audit(last=last, who=who))

    def get_policy(self) -> ExactPolicy:
        """The cluster's preemption policy, every default filled in."""
        return self._loop.run(self._client.get_policy())

    def set_policy(
        self, policy: PreemptionPolicy | ExactPolicy | Mapping[str, Any], *, validate_only: bool = False
    ) -> ExactPolicy:
        """Replaces the cluster's preemption policy."""
        return self._loop.run(self._client.set_policy(policy, validate_only=validate_only))

    def stats(self) -> Stats:
        """Figures of the whole cluster, read from the ledger at the moment of the call."""
        return self._loop.run(self._client.stats())

    def list_events(
        self, *, start_revision: int = 0, types: Sequence[str] = (), subject: str = "", newest: int = 0
    ) -> list[Event]:
        """Events of the log, oldest first."""
        return self._loop.run(
            self._client.list_events(start_revision=start_revision, types=types, subject=subject, newest=newest)
        )

    def watch(self, *, start_revision: int = 0, types: Sequence[str] = (), subject: str = "") -> Iterator[Event]:
        """Follows the event log, through reconnects, without a gap and without repeats."""
        return self._loop.iterate(self._client.watch(start_revision=start_revision, types=types, subject=subject))
