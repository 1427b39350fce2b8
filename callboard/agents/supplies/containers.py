"""Containers that workers run in: by a runtime without a daemon, so that they are part of the worker's process tree.

A command runs in one below the worker's host, an actor's host runs in it itself. What podman and apptainer start are
below the worker's process: its signals reach them, they are found by the worker's marker, and its end is proved as that
of every tree. Docker's containers are children of its daemon, which may start one after everything of the worker is
proved gone: it isn't used.

Ray's own `image_uri` isn't used for actors: it mounts nothing but Ray's folder, asks podman for what it refuses root,
and a start that fails is tried by the raylet for ever. Ray's `py_executable` takes what is made here.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import callboard
from callboard.agents.host import worker_container
from callboard.agents.runtime import HostError
from callboard.agents.supplies.worker_env import AGENT_MARKER
from callboard.agents.system.tasks import ask
from callboard.model.log import structlog
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


_OURS = Path("/run/callboard")
"""Folder in a container that has the node's callboard, for the host of an actor."""

_INSIDE = ("python3", str(_OURS / Path(worker_container.__file__).relative_to(Path(callboard.__file__).parents[1])))
_OLDEST = (3, 11)
"""The oldest Python that callboard runs on."""

_CANNOT_RUN, _NOT_FOUND = 126, 127
"""Exit codes of podman and apptainer for a program that can't be run in an image, or isn't in it."""


@dataclass(frozen=True)
class _Asked:
    """A container to run.

    Attributes:
        program: what runs in it, with its arguments.
        named: variables of it, as its runtime has them: their values don't stand in the process table.
        stated: variables with their values, for those that its runtime needs as the node has them.
        folders: what it sees of the node, at the same path.
        folder: where it starts; empty: where the image says.
        ours: it sees the node's callboard.
        options: of podman.
    """

    program: Sequence[str]
    named: Sequence[str] = ()
    stated: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()
    folder: str = ""
    ours: bool = False
    has_gpus: bool = False
    options: Sequence[str] = ()


class Containers:
    """The containers of one node."""

    def __init__(
        self, variables: Mapping[str, str], sockets: Path, ray_version: str = "", of_ray: Sequence[Path] = ()
    ) -> None:
        """
        Args:
            variables: environment of the runtime where it works for the node.
            sockets: folder in which hosts are connected with their agent.
            ray_version: of the node's Ray; empty: it hosts plain processes.
            of_ray: what a worker of Ray needs of the node: the folder of its sockets and logs, the file of its token.
        """
        self._variables = variables
        self._sockets = str(sockets)
        self._ray_version = ray_version
        self._of_ray = of_ray
        self._fitting: set[str] = set()
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._forgetting: set[asyncio.Task[None]] = set()

    def command(self, start: agent_pb2.StartWorker, plan: Mapping[str, Any], marker: str) -> list[str]:
        """What runs the command of a worker in its container.

        Raises:
            HostError: this node has no runtime for containers.
        """
        own = {*_OF_PROGRAMS, *plan["env"]} - _OF_THE_NODE
        init = ["--init"] if any(map(os.path.exists, _INITS)) else []
        asked = _Asked(
            plan["args"][0],
            sorted(own),
            {name: start.env[name] for name in sorted(_OF_THE_NODE & start.env.keys())},
            [plan["output"]],
            plan["working_dir"],
            has_gpus=bool(start.allocation.devices),
            options=init,
        )
        return self._run(start.container, _name(marker), asked)

    def host(
        self, start: agent_pb2.StartWorker, plan: Mapping[str, Any], early: Sequence[str], marker: str
    ) -> list[str]:
        """What runs the host of an actor in its container, less the arguments of its runtime.

        Its processes are in the node's own table, so that its pid is the one that everybody knows.

        Args:
            start: its start command.
            plan: its assignment.
            early: variables that have to be there before its Python starts.
            marker: of everything that it starts.

        Raises:
            HostError: this node has no runtime for containers.
        """
        name, _, value = marker.partition("=")
        mine = {name: value, AGENT_MARKER: self._variables[AGENT_MARKER]}
        asked = _Asked(
            [*_INSIDE, "inside"],
            [*sorted({*early} - _OF_THE_NODE), *(["RAY_*"] if self._ray_version else [])],
            mine | {each: start.env[each] for each in sorted(_OF_THE_NODE & {*early} & start.env.keys())},
            [plan["output"], self._sockets, *(str(each) for each in self._of_ray if each.exists())],
            ours=True,
            has_gpus=bool(start.allocation.devices),
            options=["--pid", "host", "--replace", *([] if self._ray_version else ["--preserve-fds", "1"])],
        )
        runs = self._run(start.container, _name(marker), asked)
        # Ray's node starts it, in an environment of its own.
        needs = [f"{each}={value}" for each, value in sorted(self.of_runtime().items())]
        return ["env", *needs, *runs] if self._ray_version else runs

    def variables(self, plan: Mapping[str, Any], start: agent_pb2.StartWorker) -> dict[str, str]:
        """The environment of an actor in a container: the worker's, less what is the image's unless the job states
        it."""
        images = {*_OF_THE_NODE, "PYTHONPATH"} - {*start.env, *start.pass_env}
        return {name: value for name, value in plan["env"].items() if name not in images}

    async def check(self, image: str, tell: Callable[[str], None]) -> None:
        """Have the runtime bring an image, and see whether the host of an actor can run in it.

        Args:
            image: its name.
            tell: is told what a long wait is for.

        Raises:
            HostError: it can't; one line says why and what to do.
        """
        async with self._looking[image]:
            if image in self._fitting:
                return
            tell(f"has the image {image} brought and looks into it")
            told = await self._look_into(image)
            python, ray = ".".join(told[:2]), told[2]
            here = ".".join(platform.python_version_tuple()[:2])
            oldest = ".".join(map(str, _OLDEST))
            if tuple(map(int, told[:2])) < _OLDEST:
                why = f"its python3 is Python {python}; callboard needs {oldest} or newer there"
                raise HostError(f"container: {image}: {why}. Choose an image that has it")
            if self._ray_version and (python, ray) != (here, self._ray_version):
                has = f"Ray {ray}" if ray != "-" else "no Ray"
                wanted = f"Python {here} with Ray {self._ray_version}"
                why = f"it has Python {python} and {has}, but an actor in this node's Ray needs {wanted}"
                raise HostError(
                    f"container: {image}: {why}. Install them in the image, or choose nodes whose agents run with "
                    "--runtime process"
                )
            self._fitting.add(image)

    async def _look_into(self, image: str) -> list[str]:
        """Python's major and minor version, and Ray's."""
        looked = [*_INSIDE, "inside", "looked-at", *(["ray"] if self._ray_version else [])]
        name = f"callboard-look-{os.getpid()}-{hashlib.sha256(image.encode()).hexdigest()[:20]}"
        asked = _Asked(looked, [AGENT_MARKER], ours=True, options=["--replace"])
        said = await ask(self._run(image, name, asked), self._variables)
        what = "".join(said.errors.decode(errors="replace").strip().splitlines()[-1:]) or f"exit code {said.code}"
        if said.code in (_CANNOT_RUN, _NOT_FOUND):
            oldest = ".".join(map(str, _OLDEST))
            why = f"it has no python3 in its PATH, which hosts the actor ({what})"
            raise HostError(f"container: {image}: {why}. Choose an image with Python {oldest} or newer")
        if said.code:
            remedy = "Correct the image's name, or have the node pull it"
            raise HostError(f"container: {image}: it can't be run on this node: {what}. {remedy}")
        return said.output.decode().split()[-3:]

    def _run(self, image: str, name: str, asked: _Asked) -> list[str]:
        has_gpus = asked.has_gpus and _NVIDIA.exists()
        binds = [f"{each}:{each}" for each in asked.folders]
        if asked.ours:
            binds.append(f"{Path(callboard.__file__).parent}:{_OURS / callboard.__name__}:ro")
        if podman := self._found(_PODMAN):
            return [
                # Whatever the job's variables say: a container on another machine would be nobody's child here.
                podman, "--remote=false", "run", "--rm", "--name", name, *asked.options,
                "--network", "host", "--ipc", "host", "--security-opt", "label=disable",
                # Output is kept by callboard, and a log of podman's own has no bound.
                "--log-driver", "none",
                # As everything of a worker: the agent may not end what is another user's.
                "--user", f"{os.geteuid()}:{os.getegid()}",
                *([] if os.geteuid() == 0 else ["--userns", "keep-id"]),
                *(["--device", "nvidia.com/gpu=all"] if has_gpus else []),
                *(word for bind in binds for word in ("--volume", bind)),
                *(["--workdir", asked.folder] if asked.folder else []),
                # By name: values would stand in the process table.
                *(f"--env={each}" for each in asked.named),
                *(f"--env={each}={value}" for each, value in asked.stated.items()),
                "--entrypoint", asked.program[0], image, *asked.program[1:],
            ]  # fmt: skip
        if apptainer := self._found(_APPTAINER):
            gpus = ["--nv"] if has_gpus else []
            where = ["--pwd", asked.folder] if asked.folder else []
            return [
                *(apptainer, "exec", *gpus),
                *(word for bind in binds for word in ("--bind", bind)),
                *(*where, image, *asked.program),
            ]
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
        command = [podman, "--remote=false", "rm", "--force", "--ignore", name]
        code = 0
        try:
            async with asyncio.timeout(_FORGET_S):
                for _ in range(_FORGET_TRIES):
                    if not (code := (await ask(command, self._variables)).code):
                        return
            _log.warning("container_not_forgotten", container=name, why=f"`podman rm` ended with {code}")
        except TimeoutError:
            _log.warning("container_not_forgotten", container=name, why=f"`podman rm` took more than {_FORGET_S:g} s")

    def of_runtime(self) -> dict[str, str]:
        """Variables that the runtime needs as the node has them, whatever the job says."""
        mine = (*_OF_THE_NODE, *_OF_RUNTIMES, AGENT_MARKER)
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
