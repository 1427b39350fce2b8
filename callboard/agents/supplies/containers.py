"""Containers that commands run in: by a runtime without a daemon, so that they are part of the worker's process tree.

What podman and apptainer start are children of the worker's host like those of any command: its signals reach them,
they are found by the worker's marker, and its end is proved as that of every tree. Docker's containers are children of
its daemon, which may start one after everything of the worker is proved gone: it isn't used.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from callboard.agents.runtime import HostError
from callboard.v1 import agent_pb2

_log = structlog.get_logger(__name__)

_PODMAN, _APPTAINER = ("podman",), ("apptainer", "singularity")

_OF_THE_NODE = frozenset({"PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL"})
"""Variables that an image has its own of. What a job states of them is for the container, not for its runtime."""

_OF_PROGRAMS = (
    "CALLBOARD_CHECKPOINT_DIR",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    *(f"PET_{name}" for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")),
)
"""Variables that the host of a command adds."""

_OF_RUNTIMES = ("XDG_", "CONTAINERS_", "REGISTRY_AUTH_FILE", "APPTAINER_", "SINGULARITY_")
"""Beginnings of variables by which a runtime finds its images and what it keeps: for the agent's calls and the worker's
they have to be the same."""

_INITS = ("/usr/libexec/podman/catatonit", "/usr/lib/podman/catatonit", "/usr/bin/catatonit")
_NVIDIA = Path("/dev/nvidiactl")
_FORGET_S, _FORGET_TRIES = 40.0, 3


class Containers:
    """The containers of one node."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """
        Args:
            variables: environment of the runtime where it works for the node.
        """
        self._variables = variables
        self._forgetting: set[asyncio.Task[None]] = set()

    def command(self, start: agent_pb2.StartWorker, plan: Mapping[str, Any], marker: str) -> list[str]:
        """What runs the command of a worker in its container.

        Raises:
            HostError: this node has no runtime for containers.
        """
        image, program = start.container, plan["args"][0]
        has_gpus = bool(start.allocation.devices) and _NVIDIA.exists()
        folder, output = plan["working_dir"], plan["output"]
        if podman := self._found(_PODMAN):
            own = {*_OF_PROGRAMS, *plan["env"]} - _OF_THE_NODE
            return [
                # Whatever the job's variables say: a container on another machine would be nobody's child here.
                podman, "--remote=false", "run", "--rm", "--name", _name(marker),
                "--network", "host", "--ipc", "host", "--security-opt", "label=disable",
                *([] if os.geteuid() == 0 else ["--userns", "keep-id"]),
                *(["--init"] if any(map(os.path.exists, _INITS)) else []),
                *(["--device", "nvidia.com/gpu=all"] if has_gpus else []),
                "--volume", f"{output}:{output}", *(["--workdir", folder] if folder else []),
                # By name: values would stand in the process table.
                *(f"--env={name}" for name in sorted(own)),
                *(f"--env={name}={start.env[name]}" for name in sorted(_OF_THE_NODE & start.env.keys())),
                "--entrypoint", program[0], image, *program[1:],
            ]  # fmt: skip
        if apptainer := self._found(_APPTAINER):
            gpus = ["--nv"] if has_gpus else []
            where = ["--pwd", folder] if folder else []
            return [apptainer, "exec", *gpus, "--bind", output, *where, image, *program]
        why = "neither podman nor apptainer is in the PATH of its agent"
        if self._found(("docker",)):
            why += "; docker's daemon starts containers where nobody could prove their end"
        raise HostError(
            f"container: {image}: this node has no runtime for containers: {why}. Install podman there, choose other "
            "nodes with node_selector, or leave out container"
        )

    def forget(self, marker: str) -> None:
        """A worker is gone: what its runtime keeps of a container that was killed is deleted, too."""
        if podman := self._found(_PODMAN):
            task = asyncio.create_task(self._forget(podman, _name(marker)))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, podman: str, name: str) -> None:
        """Asked again: where its monitor was killed with the container, podman's first `rm` waits ten seconds for what
        that would have written, notes that the container has ended, and fails."""
        process: asyncio.subprocess.Process | None = None
        code = 0
        try:
            async with asyncio.timeout(_FORGET_S):
                for _ in range(_FORGET_TRIES):
                    process = await asyncio.create_subprocess_exec(
                        *(podman, "--remote=false", "rm", "--force", "--ignore", name),
                        env=dict(self._variables),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        stderr=asyncio.subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    if not (code := await process.wait()):
                        return
            _log.warning("container_not_forgotten", container=name, why=f"`podman rm` ended with {code}")
        except TimeoutError:
            _log.warning("container_not_forgotten", container=name, why=f"`podman rm` took more than {_FORGET_S:g} s")
        finally:
            if process is not None and process.returncode is None:
                process.kill()

    def of_runtime(self) -> dict[str, str]:
        """Variables that the runtime needs as the node has them, whatever the job says."""
        mine = (*_OF_THE_NODE, *_OF_RUNTIMES)
        return {name: value for name, value in self._variables.items() if name.startswith(mine)}

    async def close(self) -> None:
        """Wait for what is being deleted."""
        if self._forgetting:
            await asyncio.wait(self._forgetting, timeout=_FORGET_S)

    def _found(self, names: tuple[str, ...]) -> str | None:
        path = self._variables.get("PATH", os.defpath)
        return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _name(marker: str) -> str:
    return f"callboard-{hashlib.sha256(marker.encode()).hexdigest()[:20]}"
