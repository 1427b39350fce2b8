"""A controller on a disk that is full, read-only or fails once, in a real file system (R10).

Each fault is a clear refusal that says what, why and what to do; what was acknowledged stays, and nothing is half
there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callboard.client.client import Client
from callboard.security.tokens import TOKEN_NAME
from callboard.wire.refusals import CallboardError, ErrorReason, Unavailable
from tests.support.controller_process import ControllerProcess

FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <stdio.h>

/* Fails, once for each file that $FAIL_ONCE names and that is removed then, for files of the journal. */
static int fails(int fd) {
    char link[64], path[4096];
    const char *once = getenv("FAIL_ONCE");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (!once || length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, "journal.sqlite") || unlink(once)) return 0;
    errno = EIO;
    return 1;
}
int fsync(int fd) { return fails(fd) ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { return fails(fd) ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""


class Disk:
    """A small file system of its own, in a mount namespace of its own."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self._holder: asyncio.subprocess.Process | None = None

    async def mount(self) -> None:
        """Makes it."""
        self.at.mkdir()
        script = 'mount -t tmpfs -o size=1536k,mode=700 none "$1" && echo mounted && exec cat'
        command = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(self.at))
        self._holder = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert await self._holder.stdout.readline() == b"mounted\n"

    @property
    def within(self) -> tuple[str, ...]:
        """What runs a command in its namespace."""
        assert self._holder is not None
        return ("nsenter", "--mount", f"--target={self._holder.pid}", "--wdns=.")

    @property
    def path(self) -> Path:
        """Where it is seen from here."""
        assert self._holder is not None
        return Path(f"/proc/{self._holder.pid}/root{self.at}")

    def fill(self) -> None:
        """Leaves no room at all."""
        with (self.path / "ballast").open("wb") as file:
            file.truncate(0)
            try:
                while True:
                    os.write(file.fileno(), bytes(512))
            except OSError:
                pass

    def empty(self) -> None:
        """Takes that back."""
        (self.path / "ballast").unlink()

    async def remount(self, how: str) -> None:
        """Makes it "ro" or "rw"."""
        done = await asyncio.create_subprocess_exec(*self.within, "mount", "-o", f"remount,{how}", str(self.at))
        assert await done.wait() == 0

    async def unmount(self) -> None:
        """Ends it, with all that is on it."""
        assert self._holder is not None
        self._holder.kill()
        await self._holder.communicate()


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a file system")
    found = Disk(tmp_path / "disk")
    await found.mount()
    yield found
    await found.unmount()


def client_of(controller: ControllerProcess, state: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that soon says what it was refused with."""
    monkeypatch.setenv("CALLBOARD_TOKEN_FILE", str(state / TOKEN_NAME))
    return Client(controller.address, timeout=60, retry=1)


async def refused(client: Client, count: int) -> Unavailable:
    """Submits until the disk has no room left, and returns what is said then."""
    for number in range(count):
        try:
            await client.submit(spec(f"fills-{number}"))
        except Unavailable as error:
            return error
    raise AssertionError("the disk never was full")


def spec(name: str) -> dict[str, object]:
    return {"name": name, "pool": "p", "wait_for_nodes": "1h", "components": [{"name": "w", "actor": "a:B"}]}


async def names(client: Client) -> set[str]:
    return {each.spec.name for each in await client.list_jobs()}


async def until_served(client: Client) -> None:
    """Waits until the controller has its journal again: it tries by itself."""
    while True:
        try:
            await client.stats()
        except CallboardError:
            await asyncio.sleep(0.05)  # Nobody tells a caller whom it refuses.
        else:
            return


@pytest.mark.timeout(120)
async def test_r10_a_disk_that_is_full_and_gets_room_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    state = disk.at / "state"
    async with ControllerProcess(state, within=disk.within) as controller:
        async with client_of(controller, disk.path / "state", monkeypatch) as client:
            await client.ensure_pool("p")
            await client.submit(spec("kept"))
            disk.fill()
            error = await refused(client, 2000)
            assert error.error.reason is ErrorReason.STORE_FAILED
            assert "journal.sqlite: can't be written, the disk is full" in str(error)
            assert "Free some space; a controller that runs goes on by itself" in str(error)
            with pytest.raises(Unavailable, match="the disk is full"):
                await client.list_jobs()
            # One that starts on it is refused in the same words, and leaves what there is.
            disk.empty()
            await until_served(client)
            before = await names(client)
            assert "kept" in before
            await client.submit(spec("after"))
        await controller.kill()
        disk.fill()
        try:
            await controller.start()
        except AssertionError:
            said = [line for line in controller.lines if "the disk is full" in str(line)]
            assert said or any("disk is full" in line for line in controller.other), (
                controller.lines,
                controller.other,
            )
            assert await controller.ended() != 0
        disk.empty()
        if controller.exit_code is not None:
            await controller.start()
        async with client_of(controller, disk.path / "state", monkeypatch) as client:
            await until_served(client)
            assert await names(client) == before | {"after"}


@pytest.mark.timeout(120)
async def test_r10_a_disk_that_becomes_read_only(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    state = disk.at / "state"
    controller = ControllerProcess(state, within=disk.within)
    async with controller:
        async with client_of(controller, disk.path / "state", monkeypatch) as client:
            await client.ensure_pool("p")
            await client.submit(spec("kept"))
        await controller.kill()
        await disk.remount("ro")
        with pytest.raises(AssertionError, match="Read-only file system"):
            await controller.start()
        assert await controller.ended() != 0
        assert "Traceback" not in "".join(controller.other), controller.other
        await disk.remount("rw")
        await controller.start()
        async with client_of(controller, disk.path / "state", monkeypatch) as client:
            assert await names(client) == {"kept"}


@pytest.mark.timeout(120)
async def test_r10_a_write_that_the_disk_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler, for a library whose fsync fails")
    library, once, state = tmp_path / "failing.so", tmp_path / "once", tmp_path / "state"
    compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=FAILING, text=True, check=True)  # noqa: ASYNC221 - nothing else runs yet
    environment = {"LD_PRELOAD": str(library), "FAIL_ONCE": str(once)}
    acknowledged: set[str] = set()
    async with ControllerProcess(state, environment=environment) as controller:
        async with client_of(controller, state, monkeypatch) as client:
            await client.ensure_pool("p")
            for number in range(6):
                once.touch()
                try:
                    await client.submit(spec(f"j{number}"))
                    acknowledged.add(f"j{number}")  # What failed was a commit of the controller's own, before it.
                except Unavailable as error:
                    assert error.error.reason is ErrorReason.STORE_FAILED  # noqa: PT017 - one of two ways
                    assert "the disk reports an error" in str(error)  # noqa: PT017
                await until_served(client)
                assert acknowledged <= await names(client)
        said = [line["why"] for line in controller.lines if line["event"].startswith("the journal failed")]
        assert len(said) == 6
        assert all("can't be read or written, the disk reports an error" in line for line in said)
        assert all("Check the disk and the system's log" in line for line in said)
        await controller.kill()
        await controller.start()
        async with client_of(controller, state, monkeypatch) as client:
            await until_served(client)
            assert acknowledged <= await names(client) <= {f"j{number}" for number in range(6)}
            await client.submit(spec("after"))


async def test_r10_a_second_controller_on_the_same_directory(tmp_path: Path) -> None:
    async with ControllerProcess(tmp_path / "state") as first:
        second = ControllerProcess(tmp_path / "state")
        await second.spawn()
        assert await second.ended() not in (0, None)
        said = f"{second.lines} {second.other}"
        assert f"is held by another controller (pid {first.pid})" in said
        assert "Stop that one, or choose another state directory" in said
        assert first.exit_code is None
