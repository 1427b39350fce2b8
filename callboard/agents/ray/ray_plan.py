"""The plan by which this node starts its part in a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from callboard.agents.files.run_dir import RunDir
from callboard.agents.options import AgentOptions
from callboard.agents.ray.ray_command import SETTINGS, RayNodeSpec
from callboard.agents.supplies.worker_env import AGENT_MARKER, PASSED_ON, PASSED_ON_PREFIXES
from callboard.agents.system.devices import NodeDevices
from callboard.agents.system.inventory import object_store_bytes
from callboard.v1 import agent_pb2


@dataclass(frozen=True)
class RayTarget:
    """A cluster to be in."""

    gcs_address: str
    session: str
    """Empty: whichever is there."""
    token: str | None
    """None: Ray's own rules, or the token file of the options."""


_FOR_RAY = frozenset(
    {"USER", "LOGNAME", "SHELL", "VIRTUAL_ENV", "HOSTNAME", "TERM"}
    | {name for proxy in ("http_proxy", "https_proxy", "no_proxy", "all_proxy") for name in (proxy, proxy.upper())}
)
_FOR_RAY_PREFIXES = (
    *("RAY_", "GRPC_", "CALLBOARD_", "LC_", "LD_", "PYTHON", "CONDA", "XDG_", "SSL_", "OPENSSL_"),
    *("CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "ROCM_", "ASCEND_", "UCX_", "OMP_", "MKL_"),
)
"""What Ray, the loader, the interpreter and the libraries of devices read."""


@dataclass(frozen=True)
class RayPlan:
    """What this node's Ray node is started with, whichever cluster it joins."""

    options: AgentOptions
    inventory: agent_pb2.Inventory
    devices: NodeDevices
    run_dir: RunDir
    node_ip: str
    import_path: str

    def shape(self) -> dict[str, object]:
        """What an earlier agent's node must have been started with to go on."""
        capacity = self.inventory.capacity
        return {
            "head": self.options.ray_head,
            "node_ip": self.node_ip,
            "cpu_milli": capacity.cpu_milli,
            "gpus": len(self.devices.devices),
            "memory_bytes": capacity.memory_bytes,
            "custom_milli": dict(capacity.custom_milli),
            "object_store_bytes": object_store_bytes(self.options),
        }

    def spec(self, target: RayTarget, environment: Mapping[str, str]) -> RayNodeSpec:
        """How to start the node."""
        options, capacity = self.options, self.inventory.capacity
        return RayNodeSpec(
            node_id=options.node_id,
            gcs_address=target.gcs_address,
            head=options.ray_head,
            node_ip=self.node_ip,
            cpu_milli=capacity.cpu_milli,
            gpus=len(self.devices.devices),
            memory_bytes=capacity.memory_bytes,
            custom_milli=dict(capacity.custom_milli),
            object_store_bytes=object_store_bytes(self.options),
            port_base=options.port_base,
            dashboard_port=options.dashboard_port,
            temp_dir=self.run_dir.ray_temp,
            log=self.run_dir.logs / "ray.log",
            environment=environment,
            monitor=options.ray_head,
        )

    def environment(self, target: RayTarget) -> dict[str, str]:
        """Environment of the node and its driver: what Ray and its libraries read, not all that the agent has. Workers
        inherit it when they start, and clear what isn't theirs; thousands of variables would be copied to each."""
        variables = {
            **{name: value for name, value in os.environ.items() if self._is_for_ray(name)},
            **SETTINGS,
            "PYTHONPATH": self.import_path,
            AGENT_MARKER: str(self.run_dir.path),
        }
        if self.devices.simulated:
            # Ray refuses more GPUs than it sees; simulated ones it can't see at all.
            for name in self.devices.vendor.variables:
                variables.pop(name, None)
        if target.token:
            self.run_dir.write_ray_token(target.token)
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.run_dir.ray_token)}
        elif self.options.ray_token_path:
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.options.ray_token_path}
        elif target.token is not None:
            variables["RAY_AUTH_MODE"] = "disabled"
        return variables

    def _is_for_ray(self, name: str) -> bool:
        return (
            name in PASSED_ON
            or name in _FOR_RAY
            or name in self.devices.vendor.variables
            or name.startswith((*PASSED_ON_PREFIXES, *_FOR_RAY_PREFIXES))
        )
