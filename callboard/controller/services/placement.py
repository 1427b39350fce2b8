"""Placements: resolved and searched, against the nodes of this moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from callboard.controller.loop.collector import uncollected
from callboard.controller.loop.driver import Driver
from callboard.controller.searches.searches import Searches
from callboard.controller.services.request_parts import Context, text_of
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.scalars import MAX_PLACEMENT_BYTES
from callboard.placement import PlacementPlan, plan_placement
from callboard.placement.jobs import hardware_shares, place_of
from callboard.scheduler import State
from callboard.scheduler.handlers.placing import cluster_of
from callboard.scheduler.records.node_record import NodeRecord
from callboard.v1 import placement_pb2, placement_pb2_grpc
from callboard.wire.refusals import Unschedulable, invalid
from callboard.wire.specs import place_to_proto

DEFAULT_LIMIT_MS = 10_000
LONGEST_MS = 3_600_000
"""Bounds of a search."""


class PlacementService(placement_pb2_grpc.PlacementServiceServicer):
    """What a placement text means here."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._searches = Searches()

    async def ResolvePlacement(
        self, request: placement_pb2.ResolvePlacementRequest, context: Context
    ) -> placement_pb2.ResolvePlacementResponse:
        """The workers of a text with their nodes and devices."""
        config = config_of(request.config)
        text_of(request.source, "source", 256)

        def build(nodes: Sequence[NodeRecord], revision: int) -> placement_pb2.ResolvePlacementResponse:
            return resolved_message(plan_placement(config, cluster_of(nodes)), revision)

        nodes, revision = await self._driver.read(lambda state: (tuple(state.nodes.values()), state.meta.revision))
        # In a thread: it may take long, and others must be answered meanwhile.
        return await asyncio.to_thread(uncollected, build, nodes, revision)

    async def SearchPlacement(
        self, request: placement_pb2.SearchPlacementRequest, context: Context
    ) -> AsyncIterator[placement_pb2.SearchPlacementResponse]:
        """How far the search is, then what it found."""
        config = config_of(request.config)
        text_of(request.source, "source", 256)
        limit_ms = request.time_limit_ms or DEFAULT_LIMIT_MS
        if not 1 <= limit_ms <= LONGEST_MS:
            raise invalid("time_limit_ms", f"{limit_ms} is not 1 … {LONGEST_MS}")
        nodes, revision = await self._driver.read(_inventory)
        asked = {"config": config, "nodes": nodes, "time_limit_s": limit_ms / 1000, "mixed": request.mixed}
        async with aclosing(self._searches.run(asked)) as steps:
            async for step in steps:
                if "progress" in step:
                    incumbent, bound = step["progress"]
                    progress = placement_pb2.SearchProgress(incumbent_seconds=incumbent, lower_bound_seconds=bound)
                    yield placement_pb2.SearchPlacementResponse(progress=progress)
                elif "found" in step:
                    yield placement_pb2.SearchPlacementResponse(found=found_message(step["found"], revision))
                elif "faults" in step:
                    raise InvalidInput(Fault(*fault) for fault in step["faults"])
                else:
                    raise Unschedulable(f"there is no plan: {step['no_plan']}")


def _inventory(state: State) -> tuple[list[dict[str, Any]], int]:
    """The nodes that a plan may use, by rank, and the revision at which they were so."""
    nodes = sorted((node for node in state.nodes.values() if node.usable), key=lambda node: node.rank)
    found = []
    for node in nodes:
        memory = [device.memory_bytes for device in node.devices if device.memory_bytes]
        described: dict[str, Any] = {"gpus": len(node.devices)}
        if node.node_group:
            described["group"] = node.node_group
        if memory:
            described["memory_gib"] = min(memory) / (1 << 30)
        found.append(described)
    return found, state.meta.revision


def found_message(found: Mapping[str, Any], revision: int) -> placement_pb2.FoundPlacement:
    """What a search found as a message."""
    return placement_pb2.FoundPlacement(
        iteration_seconds=found["iteration_seconds"],
        lower_bound_seconds=found["lower_bound_seconds"],
        gap=found["gap"],
        status=found["status"],
        spans=[placement_pb2.PlacementSpan(**span) for span in found["spans"]],
        alternatives=[
            placement_pb2.PlacementAlternative(layout=layout, iteration_seconds=seconds)
            for layout, seconds in found["alternatives"].items()
        ],
        cluster_yaml=found["cluster_yaml"],
        revision=revision,
    )


def config_of(text: str) -> str:
    """A config that was sent.

    Raises:
        InvalidRequest: there is none, or it is too long.
    """
    if not text.strip():
        raise invalid("config", "is empty; send YAML text")
    if len(text.encode()) > MAX_PLACEMENT_BYTES:
        raise invalid("config", f"{len(text.encode())} bytes are too many; {MAX_PLACEMENT_BYTES} are allowed")
    return text


def resolved_message(plan: PlacementPlan, revision: int) -> placement_pb2.ResolvePlacementResponse:
    """A plan as a message; values of secret variables are masked."""
    shares = hardware_shares(plan)
    return placement_pb2.ResolvePlacementResponse(
        components=[
            placement_pb2.PlacedComponent(
                name=component.name,
                workers=[
                    placement_pb2.PlacedWorker(
                        rank=worker.placement.rank,
                        place=place_to_proto(place_of(worker, shares), mask=True),
                        node_rank=worker.placement.cluster_node_rank,
                        local_rank=worker.placement.local_rank,
                        local_world_size=worker.placement.local_world_size,
                        visible_devices=worker.placement.visible_accelerators,
                    )
                    for worker in component.workers
                ],
            )
            for component in plan.components
        ],
        mode=plan.mode.value,
        warnings=[str(warning) for warning in plan.warnings],
        revision=revision,
    )
