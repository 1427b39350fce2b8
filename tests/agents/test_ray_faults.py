"""Why could Ray not be started? The kind of the fault, its cause, and whether another try can help."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from callboard.agents.ray.ray_command import SETTINGS, RayNodeSpec
from callboard.agents.ray.ray_faults import PortTaken, RayNodeError, fault_of, os_error, start_error
from callboard.agents.ray.ray_node import RayNode
from callboard.agents.system.processes import MachineProcesses
from callboard.model.ray_fault import RayFaultCode

TRACE = [
    "2026-11-28 13:39:51,394	INFO scripts.py:1234 -- Local node IP: 127.0.0.1",
    "Traceback (most recent call last):",
    '  File "click/core.py", line 1414, in invoke',
    "    return ctx.invoke(self.callback, **ctx.params)",
]

PRINTED = [
    (
        ["Usage: start [OPTIONS]", "", "Error: No such option '--bogus'."],
        "BAD_OPTION",
        True,
        "No such option '--bogus'",
    ),
    ([*TRACE, "FileNotFoundError: [Errno 2] No such file or directory: '/proc/xx'"], "FILES", True, "'/proc/xx'"),
    ([*TRACE, "PermissionError: [Errno 13] Permission denied: '/srv/x'"], "FILES", True, "'/srv/x'"),
    ([*TRACE, "OSError: [Errno 28] No space left on device: '/tmp/x'"], "START_FAILED", False, "No space left"),
    (
        [*TRACE, "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes"],
        "FILES",
        True,
        "",
    ),
    ([*TRACE, "ValueError: `object_store_memory` is 1000"], "BAD_OPTION", True, "is 1000"),
    (
        [
            *TRACE,
            "RuntimeError: Version mismatch: The cluster was started with:",
            "    Ray: 2.60.0",
            "    Python: 3.11.9",
            "This process on node 10.0.0.2 was started with:",
            "    Ray: 2.9.0",
            "    Python: 3.11.9",
        ],
        "VERSION_MISMATCH",
        True,
        "Ray: 2.60.0 Python: 3.11.9 This process on node 10.0.0.2 was started with: Ray: 2.9.0",
    ),
    (
        ["python3: Error while finding module", "ModuleNotFoundError: No module named 'ray'"],
        "NOT_INSTALLED",
        True,
        "ray",
    ),
    (
        [*TRACE, "ray.exceptions.AuthenticationError: Token was rejected"],
        "NOT_AUTHENTICATED",
        True,
        "Token was rejected",
    ),
    (
        ["[2026 W 1 1] rpc_client.h:153: Failed to connect to GCS at address 127.0.0.9:1 within 5 seconds."],
        "UNREACHABLE",
        False,
        "127.0.0.9:1",
    ),
    ([*TRACE, "ConnectionError: port 6379 already in use"], "PORT_TAKEN", False, "6379"),
    (["something that nobody has seen"], "START_FAILED", False, "something that nobody has seen"),
    ([], "START_FAILED", False, "it printed nothing"),
    (["x" * 100_000] * 10, "START_FAILED", False, "xxx"),
]


@pytest.mark.parametrize(("said", "code", "permanent", "cause"), PRINTED)
def test_ft_g6_what_ray_printed_tells_the_kind_and_the_cause(
    said: list[str], code: str, permanent: bool, cause: str
) -> None:
    fault = fault_of(start_error("ray start failed", said))
    assert (fault.code, fault.permanent) == (RayFaultCode(code), permanent)
    assert cause in fault.message
    assert "click/core.py" not in fault.message
    assert len(fault.message) <= 1_000
    assert "n7" in fault.remedy("n7") or code == "PORT_TAKEN"


def test_ft_g6_what_the_system_refuses_is_told_apart() -> None:
    assert os_error("ray start can't run", FileNotFoundError(2, "No such file or directory")).fault.permanent
    assert not os_error("ray start can't run", BlockingIOError(11, "Resource temporarily unavailable")).fault.permanent
    assert fault_of(PortTaken("port 1 is in use")).code is RayFaultCode.PORT_TAKEN


def spec(folder: Path, **fields: object) -> RayNodeSpec:
    with socket.create_server(("127.0.7.9", 0)) as free:
        port = free.getsockname()[1]
    known: dict[str, object] = {
        "node_id": "n0",
        "gcs_address": f"127.0.7.9:{port}",
        "head": True,
        "node_ip": "127.0.7.9",
        "cpu_milli": 1000,
        "gpus": 0,
        "memory_bytes": 1 << 30,
        "custom_milli": {},
        "object_store_bytes": 100 << 20,
        "port_base": None,
        "dashboard_port": None,
        # Below the 107 bytes of a socket's name, which a test's own directory may leave no room for.
        "temp_dir": fields.get("temp_dir") or Path(tempfile.mkdtemp(prefix="cb")),
        "log": folder / "ray.log",
        "environment": {**os.environ, **SETTINGS},
        **fields,
    }
    return RayNodeSpec(**known)  # type: ignore[arg-type]


async def test_ft_g6_a_directory_that_can_not_be_made_is_a_permanent_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    processes = MachineProcesses(f"CALLBOARD_TEST={tmp_path}")
    try:
        with pytest.raises(RayNodeError) as refused:
            await RayNode.start(spec(tmp_path, temp_dir=tmp_path / "file" / "ray"), processes)
    finally:
        processes.close()
    assert (refused.value.fault.code, refused.value.fault.permanent) == (RayFaultCode.FILES, True)
    assert str(tmp_path / "file") in str(refused.value)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temp_dir": Path("long" * 25)}, RayFaultCode.FILES),
        ({"object_store_bytes": 1_000}, RayFaultCode.BAD_OPTION),
        ({"environment": {"PATH": os.environ["PATH"], "PYTHONPATH": "shadow"}}, RayFaultCode.NOT_INSTALLED),
    ],
)
async def test_ft_g6_a_ray_start_that_fails_says_why(
    tmp_path: Path, fields: dict[str, object], code: RayFaultCode
) -> None:
    if "temp_dir" in fields:
        fields = {"temp_dir": tmp_path / str(fields["temp_dir"])}
    if "environment" in fields:
        (tmp_path / "shadow").mkdir()
        (tmp_path / "shadow" / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
        fields = {"environment": {**os.environ, **SETTINGS, "PYTHONPATH": str(tmp_path / "shadow")}}
    started, processes = spec(tmp_path, **fields), MachineProcesses(f"CALLBOARD_TEST={tmp_path}")
    try:
        with pytest.raises(RayNodeError) as refused:
            await RayNode.start(started, processes)
    finally:
        processes.close()
        shutil.rmtree(started.temp_dir, ignore_errors=True)
    assert (refused.value.fault.code, refused.value.fault.permanent) == (code, True), str(refused.value)
