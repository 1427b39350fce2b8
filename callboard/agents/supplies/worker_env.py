"""The environment of a worker: its variables, and what it is told at its assignment.

Never the agent's whole environment (docs/roles.md): an allow-list, the keys of experiment trackers, what the component
declares, then what the scheduler owns. Whatever an earlier tenant set is gone with its process (PG-20).
"""

from __future__ import annotations

import base64
import getpass
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import callboard
from callboard.agents.host.framing import Json
from callboard.agents.system.devices import Vendor, visibility_variables
from callboard.model.names import filled, is_actor_path, is_env_name, is_secret, prefix_of, why_refused
from callboard.model.quantities import on_each
from callboard.v1 import agent_pb2, common_pb2

PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    "EXPERIMENT_PATH",
    "HF_HOME",
    "HF_TOKEN",
)
PASSED_ON_PREFIXES = ("WANDB_", "SWANLAB_", "MLFLOW_")

_OF_SUPPLIES = (
    *("PIP_", "UV_", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "XDG_", "CC", "CXX", "CUDA_HOME"),
    *("CONTAINERS_", "REGISTRY_AUTH_FILE", "APPTAINER_", "SINGULARITY_"),
)
_OF_SUPPLIES_LOWER = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
"""Beginnings of further variables of the agent that builds of environments and runtimes of containers get: where
packages and images come from."""

MAX_ENVIRONMENT_BYTES = 1_250_000
"""What a job may state (1 MiB) and what its node adds. Linux takes 2 MiB for a program's environment and arguments."""

RENDERER_VARIABLES = ("EGL_DEVICE_ID", "MUJOCO_EGL_DEVICE_ID")
"""Variables by which renderers choose a device. EGL numbers them by itself and ignores CUDA_VISIBLE_DEVICES."""

_EARLY_PREFIXES = ("LD_", "PYTHON")

WORKER_MARKER = "CALLBOARD_WORKER"
"""Variable that a worker's descendants carry; its value is unique for cluster, worker and generation."""

AGENT_MARKER = "CALLBOARD_AGENT"
"""Variable that everything started for one node carries; its value is the node's run directory."""


class PlanRefused(Exception):
    """A start command asks for what this node must not do; the text names the field."""


@dataclass(frozen=True)
class NodeIdentity:
    """What every worker of a node is told about it."""

    cluster: str
    controller: str
    runtime: str
    vendor: Vendor
    run_dir: str
    devices: tuple[str, ...]
    """Ids of all its devices, in the order of its visible list."""
    environment: Mapping[str, str]
    """The agent's own."""
    import_path: str
    """PYTHONPATH under which a worker finds callboard and what the agent was given."""
    renderers: Mapping[str, str] = field(default_factory=dict)
    """Id of a device → its number among EGL's devices, where that is known."""
    near_cpus: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Id of a device → CPUs of its NUMA node that the agent may use, where that is known."""


def worker_name(command: agent_pb2.StartWorker) -> str:
    """`{job}/{component}/{rank}/g{generation}`."""
    return name_of(command.worker, command.generation)


def name_of(worker: common_pb2.WorkerKey, generation: int) -> str:
    """The same for a worker whose start command isn't at hand."""
    return f"{worker.job_id}/{worker.component}/{worker.rank}/g{generation}"


def worker_marker(node: NodeIdentity, name: str) -> str:
    """ "NAME=value" that finds a worker's descendants in the process table."""
    return f"{WORKER_MARKER}={node.cluster}/{name}"


def host_environment(node: NodeIdentity) -> dict[str, str]:
    """What every worker host of the node starts with, before it has a job."""
    agent = node.environment
    variables = {
        name: value for name, value in agent.items() if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }
    variables["LOG_LEVEL"] = agent.get("LOG_LEVEL", "INFO")
    variables["PYTHONPATH"] = node.import_path
    variables[AGENT_MARKER] = node.run_dir
    return variables


def build_environment(agent: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    """What the build of a Python environment on this node starts with."""
    passed = {
        name: value
        for name, value in agent.items()
        if name in PASSED_ON or name.startswith(_OF_SUPPLIES) or name.lower() in _OF_SUPPLIES_LOWER
    }
    passed.pop("PYTHONPATH", None)  # what is there without it would count as installed
    return passed | {AGENT_MARKER: str(run_dir), "PYTHONUNBUFFERED": "1"}


def worker_environment(command: agent_pb2.StartWorker, node: NodeIdentity, ports: Sequence[int] = ()) -> dict[str, str]:
    """The whole environment of a worker.

    Raises:
        PlanRefused: a variable the scheduler owns, a bad name, or too much.
    """
    variables = host_environment(node)
    for name in passed_names(command, node):
        variables[name] = node.environment[name]
    variables["OMP_NUM_THREADS"] = str(max(1, command.allocation.resources.cpu_milli // 1000))
    if command.allocation.devices:
        renderer = node.renderers.get(command.allocation.devices[0].id)
        variables |= dict.fromkeys(RENDERER_VARIABLES, renderer) if renderer is not None else {}
    facts = _facts(command, node)
    for name, value in command.env.items():
        _check(name, "env")
        variables[name] = filled(value, facts)
    variables |= _owned(command, node)
    if ports:
        variables["CALLBOARD_PORTS"] = ",".join(map(str, ports))
    size = sum(len(name) + len(os.fsencode(value)) + 2 for name, value in variables.items())
    if size > MAX_ENVIRONMENT_BYTES:
        largest = sorted(variables, key=lambda name: len(variables[name]), reverse=True)[:3]
        raise PlanRefused(
            f"the environment of a worker is {size} bytes; at most {MAX_ENVIRONMENT_BYTES}. The largest variables are "
            f"{', '.join(largest)}; pass on fewer, or put them in a file"
        )
    return variables


def _facts(command: agent_pb2.StartWorker, node: NodeIdentity) -> dict[str, str]:
    """What the placeholders in variables of a job stand for."""
    devices = visible_devices(command, node)
    return {
        "rank": str(command.worker.rank),
        "local_rank": str(command.local_rank),
        "node_rank": str(command.node_rank),
        "world_size": str(command.world_size),
        "local_world_size": str(command.local_world_size),
        "device": devices[0] if devices else "",
        "devices": ",".join(devices),
    }


def passed_names(command: agent_pb2.StartWorker, node: NodeIdentity) -> list[str]:
    """The agent's variables that a component passes on, as far as the agent has them.

    Raises:
        PlanRefused: a variable the scheduler owns, a bad name.
    """
    names: list[str] = []
    for stated in command.pass_env:
        prefix = prefix_of(stated)
        _check(prefix or stated, "pass_env")
        if prefix:
            names += sorted(
                name
                for name in node.environment
                if name.startswith(prefix) and is_env_name(name) and why_refused(name) is None
            )
        elif stated in node.environment:
            names.append(stated)
    return names


def _check(name: str, field: str) -> None:
    if not is_env_name(name):
        raise PlanRefused(f"{field}: {name!r} can't name a variable")
    why = why_refused(name)
    if why is not None:
        raise PlanRefused(f"{field}: {name}: {why}")


def visible_devices(command: agent_pb2.StartWorker, node: NodeIdentity) -> list[str]:
    """Ids of the devices a worker sees: those it holds, or all of the node's for one that only observes."""
    if command.observes_devices:
        return list(node.devices)
    return [share.id for share in command.allocation.devices]


def gpu_memory_on_each(command: agent_pb2.StartWorker) -> int:
    """Memory that a worker was promised on each of its GPUs; 0: no certain amount."""
    devices = command.allocation.devices
    return on_each(command.allocation.resources.gpu_memory_bytes, len(devices)) if devices else 0


def near_cpus(command: agent_pb2.StartWorker, node: NodeIdentity) -> list[int]:
    """CPUs that a worker shall keep to: those that its GPUs are near to. None: it may use any, because it doesn't ask,
    has no GPU, or nobody knows of one of them where it is."""
    near = [node.near_cpus.get(share.id, ()) for share in command.allocation.devices if command.cpu_affinity]
    return sorted(set().union(*near)) if all(near) else []


def _owned(command: agent_pb2.StartWorker, node: NodeIdentity) -> dict[str, str]:
    key = command.worker
    name = worker_name(command)
    devices = visible_devices(command, node)
    return {
        "RANK": str(key.rank),
        # An index into the worker's own visible list: what sets a device by it finds its own, whichever others of the
        # component are on the node (GV-07). `ctx.local_rank` counts those.
        "LOCAL_RANK": "0" if command.allocation.devices else str(command.local_rank),
        "WORLD_SIZE": str(command.world_size),
        "LOCAL_WORLD_SIZE": str(command.local_world_size),
        "NODE_RANK": str(command.node_rank),
        "MASTER_ADDR": command.master_address,
        "MASTER_PORT": str(command.master_port) if command.master_port else "",
        "CALLBOARD_JOB": key.job_id,
        "CALLBOARD_COMPONENT": key.component,
        "CALLBOARD_RANK": str(key.rank),
        "CALLBOARD_GENERATION": str(command.generation),
        "CALLBOARD_CONTROLLER": node.controller,
        "CALLBOARD_RUNTIME": node.runtime,
        "CALLBOARD_NODE_GROUP": command.node_group,
        "CALLBOARD_CPUS": str(max(1, command.allocation.resources.cpu_milli // 1000)),
        "CALLBOARD_MEMORY": str(command.allocation.resources.memory_bytes),
        "CALLBOARD_GPU_MEMORY_BYTES": str(gpu_memory_on_each(command)),
        "CALLBOARD_CPU_AFFINITY": ",".join(map(str, near_cpus(command, node))),
        "CALLBOARD_HARDWARE": command.hardware_json,
        "CALLBOARD_USER": getpass.getuser(),
        WORKER_MARKER: f"{node.cluster}/{name}",
        AGENT_MARKER: node.run_dir,
        **visibility_variables(node.vendor, devices),
    }


def early_variables(command: agent_pb2.StartWorker, node: NodeIdentity, variables: Mapping[str, str]) -> dict[str, str]:
    """What of the job's variables the loader or the interpreter reads before any code of ours runs."""
    there = host_environment(node)
    return {
        name: variables[name]
        for name in (*command.env, *passed_names(command, node))
        if name.startswith(_EARLY_PREFIXES) and name in variables and variables[name] != there.get(name)
    }


def worker_plan(command: agent_pb2.StartWorker, node: NodeIdentity, variables: Mapping[str, str]) -> Json:
    """The assignment a worker host gets.

    Raises:
        PlanRefused: a field can't be read.
    """
    key = command.worker
    declared = frozenset(command.secret_names)
    return {
        "env": dict(variables),
        "secrets": sorted(name for name in variables if name in declared or is_secret(name)),
        "visibility_variable": node.vendor.variables[0],
        "gpu_memory_limit": gpu_memory_on_each(command) if command.limit_gpu_memory else 0,
        "cpus": near_cpus(command, node),
        "gpus": [[share.index, share.milli] for share in command.allocation.devices],
        **_object(command, ""),
        "members": [
            {"name": member.name, "role": member.role, **_object(member, f"members[{i}].")}
            for i, member in enumerate(command.members)
        ],
        "checkpoint": _checkpoint(command),
        "context": {
            "job_id": key.job_id,
            "job_name": command.job_name or key.job_id,
            "component": key.component,
            "rank": key.rank,
            "world_size": command.world_size,
            "local_rank": command.local_rank,
            "local_world_size": command.local_world_size,
            "node_rank": command.node_rank,
            "generation": command.generation,
            "attempt": command.attempt,
            "devices": visible_devices(command, node),
            "node_group": command.node_group,
            "hardware": _json(command.hardware_json, list, "hardware_json"),
        },
    }


def _object(said: agent_pb2.StartWorker | agent_pb2.WorkerMember, field: str) -> dict[str, Json]:
    """What one object of the user is made of."""
    if not is_actor_path(said.actor):
        raise PlanRefused(f"{field}actor: {said.actor!r} is not an import path pkg.module:Class")
    return {
        "actor": said.actor,
        "args": _json(said.args_json, list, f"{field}args_json"),
        "kwargs": _json(said.kwargs_json, dict, f"{field}kwargs_json"),
        "entry": said.entry,
        "max_concurrency": max(1, said.max_concurrency),
    }


def _json(text: str, kind: type, field: str) -> Json:
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PlanRefused(f"{field}: {error}") from error
    if not isinstance(value, kind):
        raise PlanRefused(f"{field}: a JSON {kind.__name__} is wanted, not {type(value).__name__}")
    return value


def _checkpoint(command: agent_pb2.StartWorker) -> Json:
    match command.checkpoint.WhichOneof("content") if command.HasField("checkpoint") else None:
        case "data":
            return {"data": base64.b64encode(command.checkpoint.data).decode()}
        case "uri":
            return {"uri": command.checkpoint.uri}
        case _:
            return None


def import_path(given: str) -> str:
    """PYTHONPATH for children: the agent's, and callboard itself where it isn't installed."""
    root = Path(callboard.__file__).resolve().parent.parent
    folders = [each for each in given.split(os.pathsep) if each]
    if root.name not in {"site-packages", "dist-packages"} and str(root) not in folders:
        folders.append(str(root))
    return os.pathsep.join(folders)
