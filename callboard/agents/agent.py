"""The program of one node's agent: how it begins and how it ends.

`run_agent` is the whole program; it returns the exit code: 0 left as asked, 1 something of it failed or is
left behind, 2 refused (by an option, by the node, or by the controller), each with one clear sentence in the log.
Secrets are never fields of the log: tokens and values of variables aren't logged at all.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Literal

from callboard.agents.adoption import LeftBehind
from callboard.agents.files.run_dir import RunDir, RunDirError, default_run_dir
from callboard.agents.link.session import SessionRefused
from callboard.agents.machine import ThisMachine
from callboard.agents.node_agent import Agent
from callboard.agents.options import AgentOptions
from callboard.agents.ray.loopback import NoAddress, NodeAddress, earlier_ip
from callboard.agents.ray.ray_faults import PortTaken
from callboard.agents.system.devices import DeviceError, find_devices
from callboard.agents.system.inventory import inventory
from callboard.agents.system.nvidia import probe_nvml
from callboard.model.log import structlog

_log = structlog.get_logger(__name__)


async def run_agent(options: AgentOptions) -> int:
    """Run the agent of one node until it leaves; returns the exit code of the program."""
    configure(options.log_format, options.log_level)
    structlog.contextvars.bind_contextvars(node=options.node_id)
    # No fork handlers of gRPC: children are started with exec at once (GC-08).
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        devices = find_devices(os.environ, count=options.gpus, simulate=options.simulate_gpus, probe=probe_nvml)
        run_dir = RunDir(
            Path(options.run_dir) if options.run_dir else default_run_dir(options.cluster, options.node_id)
        )
    except (DeviceError, RunDirError) as error:
        _log.error("agent_refused", why=str(error))
        return 2
    for device in devices.left_out:
        _log.warning("device_left_out", device=device.id, uuid=device.uuid, why=device.fault)
    try:
        address = NodeAddress(options, earlier_ip(run_dir.recorded())) if options.runtime == "ray" else None
    except NoAddress as error:
        _log.error("agent_refused", why=str(error))
        run_dir.close(keep=bool(run_dir.recorded()))
        return 2
    agent = Agent(
        options,
        devices,
        inventory(options, devices),
        ThisMachine(options, run_dir),
        address.ip if address is not None else "",
    )
    try:
        # Nobody starts an agent again that is to end with somebody.
        return await live(agent, run_dir, keep_output=options.exit_with_parent is None and options.exit_with is None)
    finally:
        if address is not None:
            address.close()


async def live(agent: Agent, run_dir: RunDir, *, keep_output: bool) -> int:
    """Run an agent until it leaves and give its directory up; returns the exit code of the program."""
    code = 1
    try:
        await agent.run()
        code = 0
    except SessionRefused as error:
        _log.error("controller_refused", why=str(error), code=error.code.name)
        code = 2
    except PortTaken as error:
        _log.error("port_taken", why=str(error))
        code = 2
    except LeftBehind as error:
        _log.error("left_behind", what=str(error))
    finally:
        run_dir.close(keep=code == 1, keep_output=keep_output)
    return code


def configure(format_name: Literal["console", "json"], level: str) -> None:
    """Set structlog up for this process."""
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if format_name == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
