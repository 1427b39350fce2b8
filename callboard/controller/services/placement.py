"""Placements: resolved and searched, against the nodes of this moment."""

from __future__ import annotations

from typing import Any

import grpc.aio

from callboard.controller.driver import Driver
from callboard.controller.placements import cluster_of, place_of
from callboard.controller.services.requests import invalid, text_of
from callboard.model.inputs.placement_config import MAX_BYTES
from callboard.placement import PlacementPlan, plan_placement
from callboard.scheduler import State
from callboard.v1 import placement_pb2, placement_pb2_grpc
from callboard.wire.job import place_to_proto

Context = grpc.aio.ServicerContext[Any, Any]


class PlacementService(placement_pb2_grpc.PlacementServiceServicer):
    """What a placement text means here."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def ResolvePlacement(
        self, request: placement_pb2.ResolvePlacementRequest, context: Context
    ) -> placement_pb2.ResolvePlacementResponse:
        """The workers of a text with their nodes and devices."""
        config = config_of(request.config)
        text_of(request.source, "source", 256)

        def build(state: State) -> placement_pb2.ResolvePlacementResponse:
            plan = plan_placement(config, cluster_of(state.nodes.values()))
            return resolved_message(plan, state.meta.revision)

        return await self._driver.read(build)


def config_of(text: str) -> str:
    """A config that was sent.

    Raises:
        InvalidRequest: there is none, or it is too long.
    """
    if not text.strip():
        raise invalid("config", "is empty; send YAML text")
    if len(text.encode()) > MAX_BYTES:
        raise invalid("config", f"{len(text.encode())} bytes are too many; {MAX_BYTES} are allowed")
    return text


def resolved_message(plan: PlacementPlan, revision: int) -> placement_pb2.ResolvePlacementResponse:
    """A plan as a message; values of secret variables are masked."""
    return placement_pb2.ResolvePlacementResponse(
        components=[
            placement_pb2.PlacedComponent(
                name=component.name,
                workers=[
                    placement_pb2.PlacedWorker(
                        rank=worker.placement.rank,
                        place=place_to_proto(place_of(worker), mask=True),
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
