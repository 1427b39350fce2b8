"""How are the workers of a job called? As Ray actors, by their names: callboard is not in the way.

Ray is imported when the first call is made, in the caller's process. A handle holds only names, so it
pickles, and it works from any process that is connected to the job's Ray cluster.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

NAMESPACE = "callboard"
"""Ray namespace of every worker."""


class NoRay(Exception):
    """The cluster has no Ray: its nodes host workers as plain processes."""

    def __init__(self) -> None:
        super().__init__("the nodes host workers as plain processes; there is no Ray to connect to")


class NoActor(Exception):
    """The worker is no Ray actor: its node hosts workers as plain processes.

    Attributes:
        worker: which worker, "job/component/rank".
    """

    def __init__(self, worker: str) -> None:
        super().__init__(f"{worker} is a plain process, not a Ray actor")
        self.worker = worker


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A method of the user's class in a worker."""

    handle: WorkerHandle
    method: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it. Returns Ray's reference to the result: ``ray.get`` waits for it, ``await`` too.

        Raises:
            ValueError: Ray knows no such actor (any more).
        """
        return self.handle.actor().call.remote(self.method, *args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHandle:
    """One worker of a job, in one generation.

    ``handle.run.remote(x)`` calls ``run(x)`` of the user's object in the worker. A method whose name is
    taken by an attribute below is reached with ``handle.method("rank").remote()``.

    Attributes:
        job: name of the job.
        component: component of the job.
        rank: rank inside the component.
        generation: fencing token; a restarted worker has a greater one and another actor.
        node: node it runs on.
        devices: ids of the devices it sees, in order.
        actor_name: name of its Ray actor in namespace "callboard"; empty for plain processes.
    """

    job: str
    component: str
    rank: int
    generation: int
    node: str
    devices: tuple[str, ...]
    actor_name: str

    def method(self, name: str) -> RemoteMethod:
        """The method ``name`` of the user's object."""
        return RemoteMethod(self, name)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            # Pickle, copy and Ray look for their hooks here; none is a method of the user's.
            raise AttributeError(name)
        return RemoteMethod(self, name)

    def actor(self) -> Any:
        """The worker's Ray actor.

        Raises:
            NoActor: it is a plain process.
            ValueError: Ray knows no such actor (any more).
        """
        if not self.actor_name:
            raise NoActor(f"{self.job}/{self.component}/{self.rank}")
        return _actor(self.actor_name)


@lru_cache(maxsize=4096)
def _actor(name: str) -> Any:
    # The name holds the generation, so a cached handle never reaches a later worker.
    import ray  # noqa: PLC0415 - the SDK works without Ray until a worker is called.

    return ray.get_actor(name, namespace=NAMESPACE)


def connect_ray(address: str, *, token_path: str = "", node_ip: str = "") -> None:
    """Connects this process to the Ray cluster of the workers, as a driver in namespace "callboard".

    Args:
        address: GCS address "host:port", as ``Client.stats()`` gives it in ``ray_address``.
        token_path: file with the cluster's token; empty: RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH of the
            environment, or none.
        node_ip: address of this machine's Ray node; empty: Ray finds it. Needed where several nodes run
            on one machine.

    Raises:
        ConnectionError: no Ray cluster answers there.
    """
    if token_path:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}
    imported_before = "ray" in sys.modules
    import ray  # noqa: PLC0415 - as above.

    if token_path and imported_before:
        # Ray reads the variables when it is imported, and without them waits 20 s to say that nobody answers.
        # This is how Ray itself reads them again.
        importlib.import_module("ray._raylet").Config.initialize("")
    options: dict[str, Any] = {"_node_ip_address": node_ip} if node_ip else {}
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.WARNING,
        ignore_reinit_error=True,
        **options,
    )
