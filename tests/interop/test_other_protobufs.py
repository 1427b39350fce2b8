"""Do the stubs and the client load where a trainer pins another protobuf? Fresh environments ask a live controller.

The stubs are made by the oldest supported compiler, so that they load on protobuf 5.29 … 7.x (01-architecture).
"""

from __future__ import annotations

import asyncio
import subprocess
import venv
from pathlib import Path

import pytest

from tests.controller.support import options_for, running

ROOT = Path(__file__).parent.parent.parent

CLIENT_NEEDS = ("googleapis-common-protos", "pydantic", "PyYAML")

PROGRAM = """
import asyncio, sys
import google.protobuf, grpc
from callboard import Client, JobSpec, ComponentSpec
from callboard.v1 import agent_pb2, event_pb2, job_pb2, node_pb2
from callboard.v1 import placement_group_pb2, policy_pb2, pool_pb2, scheduler_pb2
from callboard.wire.refusals import QuotaExceeded

async def main():
    async with Client(sys.argv[1]) as cb:
        await cb.ensure_pool("interop", nominal={"cpu": 1})
        assert [pool.name for pool in await cb.list_pools()] == ["pools/interop"]
        big = ComponentSpec("main", "a.b:C", resources={"cpu": 2})
        try:
            await cb.submit(JobSpec(pool="interop", components=[big]))
        except QuotaExceeded as error:
            assert "can have 1" in str(error), error
        else:
            raise AssertionError("a job beyond the quota was accepted")

asyncio.run(main())
print("protobuf", google.protobuf.__version__, "grpcio", grpc.__version__)
"""


@pytest.fixture(scope="module")
def installer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pip for all environments: they need none of their own, which takes longer than all else."""
    home = tmp_path_factory.mktemp("installer") / "env"
    venv.create(home, with_pip=True)
    return [str(home / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("protobuf", "grpcio"),
    [("protobuf==5.29.*", "grpcio==1.71.*"), ("protobuf>=6,<7", "grpcio"), ("protobuf>=7,<8", "grpcio")],
    ids=["5", "6", "7"],
)
async def test_the_client_works_with_this_protobuf(
    protobuf: str, grpcio: str, installer: list[str], tmp_path: Path
) -> None:
    home = tmp_path / "env"
    await asyncio.to_thread(venv.create, home)
    python = home / "bin" / "python"
    install = [*installer, "--python", str(python), "install", protobuf, grpcio, *CLIENT_NEEDS]
    ran = await asyncio.to_thread(subprocess.run, install, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    async with running(options_for(tmp_path / "controller")) as controller:
        asked = await asyncio.to_thread(
            subprocess.run,
            [str(python), "-c", PROGRAM, controller.address],
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.startswith(f"protobuf {protobuf.removeprefix('protobuf').lstrip('=>')[0]}"), asked.stdout
