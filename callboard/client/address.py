"""The address of the controller: the one named, else CALLBOARD_CONTROLLER, else the only one running here.

Two that run here are an error that lists them: a command that reaches the wrong cluster is worse
than one that reaches none (MU-07).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from callboard.client.clusters import ClusterRecord, recorded_clusters, running_clusters
from callboard.client.errors import NoController, SeveralControllers
from callboard.security.places import run_directory

DEFAULT_PORT = 7700
ADDRESS_VARIABLE = "CALLBOARD_CONTROLLER"


@dataclass(frozen=True, slots=True)
class Target:
    """A controller and how it was found.

    Attributes:
        address: "host:port".
        source: where the address comes from, for people.
        cluster: its record, when it runs on this machine and is registered.
    """

    address: str
    source: str
    cluster: ClusterRecord | None = None


def find_controller(address: str | None = None, environ: Mapping[str, str] = os.environ) -> Target:
    """The controller that is meant.

    Args:
        address: "host:port" or "host" (port 7700), as the caller stated it.
        environ: the environment to look at.

    Raises:
        NoController: none is stated and none runs on this machine.
        SeveralControllers: none is stated and several run on this machine.
    """
    base = run_directory(environ)
    here = running_clusters(base)
    stated, source = address, "as stated"
    if not stated:
        stated, source = environ.get(ADDRESS_VARIABLE), f"from {ADDRESS_VARIABLE}"
    if stated:
        full = with_port(stated)
        match = next((record for record in here if record.controller == full), None)
        return Target(full, source, match)
    if not here:
        ended = tuple((each.name, each.controller, str(each.directory)) for each in recorded_clusters(base))
        raise NoController(run_directory=str(base), ended=ended)
    if len(here) > 1:
        raise SeveralControllers(tuple((record.name, record.controller) for record in here))
    return Target(here[0].controller, f"cluster {here[0].name} on this machine", here[0])


def with_port(address: str) -> str:
    """``address`` with the default port, when it names none."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and (host.endswith("]") or ":" not in host):
        return address
    return f"{address}:{DEFAULT_PORT}"
