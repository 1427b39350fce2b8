"""Placement texts on the nodes that there are now: they become places of workers at submit.

To compile a text may take long, so it is done in a thread, beside the loop that decides. What comes of it counts only
if the nodes are still the same when the job is decided about; else it is done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from callboard.controller.loop.collector import uncollected
from callboard.controller.loop.driver import Driver, Listener
from callboard.model.faults import Fault, InvalidInput
from callboard.model.frozen import dataclass
from callboard.model.inputs.groups import settled
from callboard.model.inputs.job import JobInput
from callboard.model.inputs.located import Misfit, Misfits, path_of
from callboard.model.log import structlog
from callboard.model.roles import RolePreset, unfused
from callboard.model.specs import JobSpec
from callboard.placement.jobs import digest_of, place_job
from callboard.scheduler import State
from callboard.scheduler.handlers.placing import awaiting, cluster_of, on_nodes
from callboard.scheduler.records.events import PlacementResolved
from callboard.scheduler.records.job_records import EventRecord
from callboard.scheduler.records.node_record import NodeRecord
from callboard.scheduler.records.states import NodeState
from callboard.wire.refusals import CallboardError, ErrorReason, InventoryChanged, Unavailable
from callboard.wire.schema import refuse

log = structlog.get_logger(__name__)

_GONE = (NodeState.LOST, NodeState.LEFT)


T = TypeVar("T")

Roles = Mapping[str, RolePreset]

MOST_TRIES = 10
"""Most times that a text is compiled because nodes changed meanwhile; then its sender is told to try again."""


class _Moved(CallboardError):
    """What was worked out holds no longer."""

    code = "ABORTED"
    reason = ErrorReason.INVENTORY_CHANGED


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a job is resolved against.

    Attributes:
        state: the state, to tell it from another.
        first: uid of the job that the same request made before; None: there is none.
    """

    state: State
    version: int
    nodes: tuple[NodeRecord, ...]
    first: str | None

    @classmethod
    def of(cls, state: State, request_id: str) -> _Basis:
        """What there is now."""
        first = state.requests.get(request_id) if request_id else None
        return cls(state, state.nodes_version, tuple(state.nodes.values()), first)

    def holds(self, state: State, request_id: str) -> bool:
        """Whether it is so still."""
        first = state.requests.get(request_id) if request_id else None
        return state is self.state and state.nodes_version == self.version and first == self.first


class AwaitedPlacements(Listener):
    """Gives jobs whose placements waited for nodes their places once enough nodes have joined. Listens to the driver.

    Their texts are compiled beside the loop, against the nodes of one moment; what comes of it is an event if the nodes
    are still the same then, else it is done again.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._running: asyncio.Task[None] | None = None
        self._seen: _Basis | None = None
        """What was looked at last."""

    def started(self, events: Sequence[EventRecord]) -> None:  # noqa: ARG002 - only the state counts
        """A term began: placements may have waited through the end of the one before."""
        self._look()

    def publish(self, events: Sequence[EventRecord]) -> None:
        """No node joins without an entry in the log."""
        if events:
            self._look()

    def _look(self) -> None:
        state = self._driver.state
        if state.unplaced and self._running is None and not self._is_seen():
            self._running = asyncio.create_task(self._place())
            self._running.add_done_callback(self._ended)

    def _is_seen(self) -> bool:
        return self._seen is not None and self._seen.holds(self._driver.state, "")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is not None:
            log.error("placements that wait for nodes could not be resolved", exc_info=task.exception())

    async def _place(self) -> None:
        while not self._is_seen():
            self._seen = basis = _Basis.of(self._driver.state, "")
            waiting = [(uid, basis.state.specs[uid].spec) for uid in basis.state.unplaced]
            found = await asyncio.to_thread(uncollected, on_nodes, waiting, basis.nodes)
            for uid, spec in found:
                try:
                    await self._decided(basis, uid, spec)
                except _Moved:
                    break
                except Unavailable:
                    return  # the next term looks again

    async def _decided(self, basis: _Basis, uid: str, spec: JobSpec) -> None:
        def make(now_ms: int, cause: str) -> PlacementResolved:
            if not basis.holds(self._driver.state, ""):
                raise _Moved("nodes changed meanwhile")
            return PlacementResolved(now_ms=now_ms, cause=cause, uid=uid, spec=spec)

        await self._driver.ask(make, lambda _: None, source="placed")


async def resolving(
    spec: JobSpec,
    request_id: str,
    roles: Roles,
    now: Callable[[], State],
    use: Callable[[Callable[[], JobSpec]], Awaitable[T]],
) -> T:
    """Has a job used as it is scheduled: its placement text resolved against the nodes of the moment of its use, then
    filled in by its roles and its colocation groups fused.

    Args:
        spec: the job as it was sent.
        request_id: of its request; a repeated one is resolved as it was the first time.
        use: is given what returns the job at the moment it is called, or raises why there is none.
    """
    if not spec.placement_config:
        # Nothing depends on the nodes, and there is little to do.
        return await use(lambda: _resolved(spec, None, (), roles))
    for _ in range(MOST_TRIES):
        basis = _Basis.of(now(), request_id)
        first = basis.state.specs[basis.first].spec if basis.first is not None else None
        found = await asyncio.to_thread(uncollected, _found, spec, first, basis.nodes, roles)

        def at_once(basis: _Basis = basis, found: JobSpec | Exception = found) -> JobSpec:
            if not basis.holds(now(), request_id):
                raise _Moved("nodes changed meanwhile")
            if isinstance(found, Exception):
                raise found
            return found

        try:
            return await use(at_once)
        except _Moved:
            continue
    raise InventoryChanged(
        f"nodes changed {MOST_TRIES} times while the placement of {spec.name} was compiled; try again"
    )


def _found(spec: JobSpec, first: JobSpec | None, nodes: Sequence[NodeRecord], roles: Roles) -> JobSpec | Exception:
    try:
        return _resolved(spec, first, nodes, roles)
    except (InvalidInput, CallboardError) as refusal:
        return refusal


def _resolved(spec: JobSpec, first: JobSpec | None, nodes: Sequence[NodeRecord], roles: Roles) -> JobSpec:
    if spec.placement_config:
        spec = placed(spec, nodes) if first is None else as_before(spec, first)
    try:
        return settled(spec, roles)
    except Misfits as error:
        raise refuse(error.found, "spec", JobInput) from None


def placed(spec: JobSpec, nodes: Iterable[NodeRecord]) -> JobSpec:
    """The job with a place for each worker that its text places; a job without a text as it is.

    Raises:
        InvalidInput: every fault of the text, and of what the job says beside it.
        InventoryChanged: it was planned for other nodes than there are now.
    """
    if not spec.placement_config:
        return spec
    nodes = list(nodes)
    _check_planned_for(spec, nodes)
    try:
        return place_job(spec, cluster_of(nodes))
    except InvalidInput:
        later = awaiting(spec, nodes) if spec.wait_for_nodes_ms is not None else None
        if later is None:
            raise
        return later
    except Misfits as error:
        raise InvalidInput(map(_fault, error.found)) from None


def _fault(misfit: Misfit) -> Fault:
    """What a job says differently is at its place in the request, what its text says at its place in the text."""
    field = path_of(misfit.place)
    return Fault(field if misfit.place[0] == "cluster" else f"spec.{field}", misfit.message)


def _check_planned_for(spec: JobSpec, nodes: Iterable[NodeRecord]) -> None:
    """A plan whose GPUs are gone must not start half (AP-16)."""
    changed = [node for node in nodes if node.revision > spec.placement_revision]
    if spec.placement_revision and changed:
        listed = ", ".join(f"{node.node_id} is {node.state}" for node in changed[:5])
        raise InventoryChanged(
            f"{spec.name} was planned at revision {spec.placement_revision}, and since then "
            f"{len(changed)} nodes changed: {listed}",
            metadata={"planned": str(spec.placement_revision), "changed": str(max(node.revision for node in changed))},
        )


def as_before(spec: JobSpec, first: JobSpec) -> JobSpec:
    """A repeated request resolved as it was the first time, whatever became of the nodes; one that says something else
    stays different."""
    if first.placement_digest != digest_of(spec.placement_config):
        return spec
    resolved = {component.name: component for component in unfused(first).components}
    components = tuple(
        replace(
            component,
            min_workers=resolved[component.name].min_workers,
            max_workers=resolved[component.name].max_workers,
            resources=replace(component.resources, gpu_milli=0),
            places=resolved[component.name].places,
        )
        if component.name in resolved and resolved[component.name].places
        else component
        for component in spec.components
    )
    return replace(
        spec,
        components=components,
        placement_config=first.placement_config,
        placement_digest=first.placement_digest,
        placement_nodes=first.placement_nodes,
    )
