"""Does code that a job brings along arrive whole, and nothing that leads out of its folder?"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
from io import BytesIO
from pathlib import Path
from threading import Event

import pytest

from callboard.agents.supplies import package_cache
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


async def test_a_controller_that_is_away_for_a_moment_is_waited_for(
    start_agent: StartAgent, controller: FakeController
) -> None:
    await start_agent()
    name, data = package(code="17")
    controller.packages[name] = data
    controller.away, controller.piece_bytes = 2, 50
    await ready(controller, running(name))
    assert (await ended(controller)).succeeded
    assert controller.fetched == [name] * -(-len(data) // 50)


REFUSED = [
    (tarfile.TarInfo("../out"), "outside"),
    (tarfile.TarInfo("/etc/cron.d/x"), "outside|absolute"),
    (link("out", "/etc"), "absolute|outside"),
    (link("out", "../../.."), "outside"),
    (link("out", "../x", tarfile.LNKTYPE), "special"),
    (link("device", "", tarfile.CHRTYPE), "special"),
    (link("fifo", "", tarfile.FIFOTYPE), "special"),
    (link("second", "code", tarfile.LNKTYPE), "special"),
    (tarfile.TarInfo("code"), "File exists"),
    (tarfile.TarInfo("code/below"), "Not a directory|File exists"),
    (tarfile.TarInfo("a/../../out"), "outside"),
    (tarfile.TarInfo("n" * 300), "File name too long"),
]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(("member", "why"), REFUSED, ids=range(len(REFUSED)))
async def test_what_leads_out_of_its_folder_is_refused(
    controller: FakeController, tmp_path: Path, member: tarfile.TarInfo, why: str
) -> None:
    name, data = package(member, code="17")
    controller.packages[name] = data
    failed = (await controller.do(start_worker=running(name))).worker_start_failed
    assert re.search(f"the code of the job can't be unpacked on this node: .*({why})", failed.message)
    assert not (tmp_path / "n0" / "output" / "job-1" / "out").exists()


@pytest.mark.usefixtures("agent")
async def test_what_cant_be_had_is_told(controller: FakeController) -> None:
    name, data = package(code="17")
    failed = (await controller.do(start_worker=running(name))).worker_start_failed
    assert failed.message == "the code of the job can't be fetched: it is not kept here"
    controller.packages[name] = data + b"x"
    failed = (await controller.do(start_worker=running(name, 2))).worker_start_failed
    assert "arrived as package:" in failed.message


def header(name: str, kind: bytes, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def sparse() -> bytes:
    entry = tarfile.TarInfo("./GNUSparseFile.0/big")
    entry.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "big",
        "GNU.sparse.realsize": str(1 << 50),
    }
    entry.size = 512
    return entry.tobuf(tarfile.PAX_FORMAT) + b"0\n".ljust(512, b"\0")


BOMBS = [
    (header("big", tarfile.REGTYPE, (1 << 30) + 1), "more than 60000 files or 1024 MiB"),
    (header("@LongLink", tarfile.GNUTYPE_LONGNAME, 1 << 33), "the name of a file has 8589934592 bytes"),
    (header("x", tarfile.XHDTYPE, 1 << 29), "the name of a file has"),
    (header("x", tarfile.REGTYPE, -2048), "lie across each other|the name of a file has|invalid"),
    (sparse(), "more than 60000 files or 1024 MiB"),
]


@pytest.mark.parametrize(("content", "why"), BOMBS, ids=range(len(BOMBS)))
def test_a_small_file_that_would_unpack_to_a_large_one_is_refused_before_it_does(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "bomb").write_bytes(gzip.compress(content + bytes(1 << 20)))
    with pytest.raises(tarfile.TarError, match=why):
        package_cache._extract(tmp_path / "bomb", tmp_path / "out", Event())
    assert not (tmp_path / "out").exists()


def test_links_that_together_lead_out_are_refused_and_nothing_is_written_through_one(tmp_path: Path) -> None:
    """Each of them leads nowhere but inside, by its text."""
    _, data = package(link("here", "."), link("up", "here/../.."), code="17")
    (tmp_path / "package").write_bytes(data)
    with pytest.raises(tarfile.TarError, match="outside"):
        package_cache._extract(tmp_path / "package", tmp_path / "out", Event())
    _, data = package(link("here", "."), link("up", "here/.."), code="17")
    (tmp_path / "package").write_bytes(data)
    with pytest.raises(tarfile.TarError, match="leads outside of its folder"):
        package_cache._extract(tmp_path / "package", tmp_path / "out", Event())
    through = BytesIO()
    with tarfile.open(fileobj=through, mode="w:gz") as archive:
        archive.addfile(link("sub", "."))
        archive.addfile(tarfile.TarInfo("sub/file"))
    (tmp_path / "package").write_bytes(through.getvalue())
    with pytest.raises(OSError, match="File exists"):
        package_cache._extract(tmp_path / "package", tmp_path / "out", Event())


@pytest.mark.usefixtures("agent")
async def test_modules_can_be_imported_the_first_of_two_wins_and_the_working_directory_comes_first(
    controller: FakeController, tmp_path: Path
) -> None:
    named = [
        package(**files) for files in ({"one.py": "W = 0"}, {"one.py": "W = 1", "two.py": "W = 1"}, {"two.py": "W = 2"})
    ]
    controller.packages.update(named)
    text = f'python -c \'import one, two; print(one.W, two.W, file=open("{tmp_path}/said", "w"))\''
    start = shell(text, working_dir=named[0][0], py_modules=[name for name, _ in named[1:]])
    await ready(controller, start)
    assert (await ended(controller)).succeeded
    assert (tmp_path / "said").read_text() == "0 1\n"
    await stopped(controller, start)
    await until_absent(tmp_path / "n0" / "output", "*/*/modules")
