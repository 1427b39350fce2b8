"""The GPUs that this machine has to deal out to its nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import typer

from callboard.model.frozen import dataclass

SIMULATED = 8
"""GPUs that a machine without any is taken to have: as many as a common GPU server."""

MAX_GPUS = 1024
OPTION = "--machine-gpus"


@dataclass(frozen=True, slots=True)
class MachineGpus:
    """GPUs to deal out.

    Attributes:
        ids: what CUDA_VISIBLE_DEVICES calls them, in order.
        real: whether they are hardware.
    """

    ids: tuple[str, ...]
    real: bool


def shares(found: int, *, agents: int, gpus: int, stated: Collection[str]) -> tuple[int, int]:
    """How many nodes share the GPUs of a machine, and how many each gets: what isn't stated follows from what is there.

    Args:
        agents: nodes to start; unless "agents" is among ``stated``, at most so many.
        gpus: of each node; unless "gpus_per_node" is among ``stated``, an equal share for each.
        stated: which of the two somebody asked for.
    """
    if "gpus_per_node" not in stated:
        agents = agents if "agents" in stated else min(agents, found)
        return agents, max(1, found // agents)
    return (agents if "agents" in stated or not gpus else max(1, min(agents, found // gpus))), gpus


def machine_gpus(stated: str, environ: Mapping[str, str] = os.environ) -> MachineGpus:
    """GPUs of this machine.

    Args:
        stated: "" (every node has simulated ones of its own), "auto" (those that are visible; where there are none,
            8 simulated ones) or a number of simulated ones.
        environ: where a list of visible devices may be set.

    Raises:
        typer.BadParameter: it is none of these, or the list of visible devices is impossible.
    """
    if not stated:
        return MachineGpus((), real=False)
    if stated == "auto":
        return _visible(environ) or _simulated(SIMULATED)
    if not (stated.isascii() and stated.isdigit() and 1 <= int(stated) <= MAX_GPUS):
        raise typer.BadParameter(f"{stated!r} is neither auto nor a number from 1 to {MAX_GPUS}", param_hint=OPTION)
    return _simulated(int(stated))


def _simulated(count: int) -> MachineGpus:
    return MachineGpus(tuple(str(index) for index in range(count)), real=False)


def _visible(environ: Mapping[str, str]) -> MachineGpus | None:
    # Here, because whoever deals nothing out needs no agent.
    from callboard.agents.system.devices import DeviceError, find_devices  # noqa: PLC0415
    from callboard.agents.system.nvidia import probe_nvml  # noqa: PLC0415

    try:
        found = find_devices(environ, count=None, simulate=None, probe=probe_nvml)
    except DeviceError as error:
        raise typer.BadParameter(str(error), param_hint=OPTION) from error
    # A list of visible devices without a driver behind it selects nothing.
    real = [device.id for device in found.devices if device.uuid]
    return MachineGpus(tuple(real), real=True) if real else None
