"""Does code that a job brings along arrive whole, and nothing that leads out of its folder?"""

from __future__ import annotations

import hashlib
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from callboard.v1 import agent_pb2
from tests.agents.conftest import StartAgent
from tests.agents.test_worker_program import ended, shell, until_absent
from tests.agents.test_workers import ready, stopped
from tests.support.fake_controller import FakeController


def package(*members: tarfile.TarInfo, **files: str) -> tuple[str, bytes]:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, BytesIO(text.encode()))
        for member in members:
            archive.addfile(member)
    return f"package:{hashlib.sha256(file.getvalue()).hexdigest()}", file.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def running(name: str, generation: int = 1) -> agent_pb2.StartWorker:
    return shell("test $(cat code) = 17; echo written > here", working_dir=name, generation=generation)


async def test_a_worker_runs_in_a_tree_of_its_own_and_the_next_needs_no_fetch(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path
) -> None:
    await start_agent()
    name, data = package(code="17")
    controller.packages[name] = data
    for generation in (1, 2):
        start = running(name, generation)
        await ready(controller, start)
        assert (await ended(controller, generation)).succeeded
        await stopped(controller, start)
    assert controller.fetched == [name]
    await until_absent(tmp_path / "n0" / "output", "*/*/code")


async def test_a_file_that_changed_in_the_cache_is_fetched_again(
    start_agent: StartAgent, controller: FakeController, tmp_path: Path
) -> None:
    await start_agent()
    name, data = package(code="17")
    controller.packages[name] = data
    for generation, spoilt in ((1, b""), (2, b"nothing"), (3, data[:-3])):
        if spoilt:
            (tmp_path / "n0" / "packages" / name.partition(":")[2]).write_bytes(spoilt)
        start = running(name, generation)
        await ready(controller, start)
        assert (await ended(controller, generation)).succeeded
        await stopped(controller, start)
    assert controller.fetched == [name] * 3


REFUSED = [
    (tarfile.TarInfo("../out"), "outside"),
    (tarfile.TarInfo("/etc/cron.d/x"), "outside|absolute"),
    (link("out", "/etc"), "absolute|outside"),
    (link("out", "../../.."), "outside"),
    (link("out", "../x", tarfile.LNKTYPE), "outside|not found"),
    (link("device", "", tarfile.CHRTYPE), "special"),
]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(("member", "why"), REFUSED, ids=range(len(REFUSED)))
async def test_what_leads_out_of_its_folder_is_refused(
    controller: FakeController, tmp_path: Path, member: tarfile.TarInfo, why: str
) -> None:
    name, data = package(member, code="17")
    controller.packages[name] = data
    report = await controller.do(start_worker=running(name))
    if member.name.startswith("/") and report.HasField("worker_ready"):
        assert not os.path.exists(member.name)  # noqa: ASYNC240, PTH110 - taken for a path below its folder
        return
    failed = report.worker_start_failed
    assert "the code of the job can't be unpacked on this node" in failed.message
    assert not (tmp_path / "n0" / "output" / "job-1" / "out").exists()


@pytest.mark.usefixtures("agent")
async def test_what_cant_be_had_is_told(controller: FakeController) -> None:
    name, data = package(code="17")
    failed = (await controller.do(start_worker=running(name))).worker_start_failed
    assert failed.message == "the code of the job can't be fetched: it is not kept here"
    controller.packages[name] = data + b"x"
    failed = (await controller.do(start_worker=running(name, 2))).worker_start_failed
    assert "arrived as package:" in failed.message
