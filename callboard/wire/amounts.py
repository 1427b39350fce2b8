"""Resources and labels as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from callboard.model.quantities import Resources
from callboard.model.specs import Labels
from callboard.v1 import common_pb2

FIXED_FIELDS = {"cpu": "cpu_milli", "gpu": "gpu_milli", "memory": "memory_bytes", "gpu_memory": "gpu_memory_bytes"}
"""Resource → field of ``callboard.v1.Resources``; every other resource is an entry of ``custom_milli``."""

SELECTORS = {"gpu_model": "gpu_model", "gpu_memory_min": "gpu_memory_min_bytes"}
"""What says which GPUs an ask is for → field of ``callboard.v1.Resources``."""


def resources_to_proto(amounts: Resources) -> common_pb2.Resources:
    """The message of ``amounts``; negative ones (a quota that is over) included."""
    return common_pb2.Resources(
        cpu_milli=amounts.cpu_milli,
        gpu_milli=amounts.gpu_milli,
        memory_bytes=amounts.memory_bytes,
        gpu_memory_bytes=amounts.gpu_memory_bytes,
        custom_milli=dict(amounts.custom_milli),
        gpu_model=amounts.gpu_model,
        gpu_memory_min_bytes=amounts.gpu_memory_min_bytes,
    )


def resources_from_proto(message: common_pb2.Resources) -> Resources:
    """The amounts of a message that a peer of ours wrote. Not validated: specs pass through ``…_spec_from_proto``."""
    return Resources(
        message.cpu_milli,
        message.gpu_milli,
        message.memory_bytes,
        tuple(sorted((name, milli) for name, milli in message.custom_milli.items() if milli)),
        message.gpu_memory_bytes,
        message.gpu_model,
        message.gpu_memory_min_bytes,
    )


def amounts_to_proto(amounts: Iterable[tuple[str, int]]) -> common_pb2.Resources:
    """The message of (name, amount) pairs, such as a quota; zero entries leave no trace in it."""
    return resources_to_proto(Resources.from_items(amounts))


def labels_from_proto(message: Mapping[str, str]) -> Labels:
    """The sorted form of a map field. Not validated."""
    return tuple(sorted(message.items()))
