"""Does the controller keep code that jobs bring along, in bounds, and only what it says it is?"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from callboard.controller.journal.postgres import PostgresDatabase
from callboard.controller.package_store import PIECE_BYTES, Packages, SharedPackages
from callboard.wire.refusals import InvalidRequest, LimitReached, NotFound


def named(data: bytes) -> str:
    return f"package:{hashlib.sha256(data).hexdigest()}"


async def test_pieces_may_come_again_and_break_off(tmp_path: Path) -> None:
    packages = Packages(tmp_path / "p", dict)
    data = os.urandom(100)
    name = named(data)
    assert await packages.put(name, 100, 0, b"") == 0
    assert await packages.put(name, 100, 0, data[:60]) == 60
    assert await packages.put(name, 100, 0, data[:60]) == 60, "a repeated piece"
    assert await packages.put(name, 100, 80, data[80:]) == 60, "one that comes too soon"
    with pytest.raises(NotFound):
        await packages.read(name, 0)
    assert await packages.put(name, 100, 60, data[60:]) == 100
    assert await packages.read(name, 90) == (100, data[90:])
    assert await packages.put(name, 100, 0, b"") == 100, "it need not be sent again"


async def test_what_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    packages = Packages(tmp_path / "p", dict)
    with pytest.raises(InvalidRequest, match="what was sent is package:"):
        await packages.put(named(b"right"), 5, 0, b"wrong")
    assert await packages.put(named(b"right"), 5, 0, b"right") == 5
    for package, size, data in (
        ("package:../../etc/passwd", 1, b"x"),
        ("", 1, b"x"),
        (named(b""), 0, b""),
        (named(b""), 1 << 40, b"x"),
        (named(b""), 1 << 25, bytes(PIECE_BYTES + 1)),
    ):
        with pytest.raises(InvalidRequest):
            await packages.put(package, size, 0, data)


async def test_what_no_living_job_needs_makes_room(tmp_path: Path) -> None:
    needed: set[str] = set()
    packages = Packages(tmp_path / "p", lambda: {"p": needed}, total_bytes=250)
    kept, unused, new = (os.urandom(100) for _ in range(3))
    for data in (kept, unused):
        await packages.put(named(data), 100, 0, data)
    needed.add(named(kept))
    os.utime(packages._path(named(kept)), (1, 1))
    await packages.put(named(new), 100, 0, new)
    assert [packages.has(named(data)) for data in (kept, unused, new)] == [True, False, True]
    needed.add(named(new))
    with pytest.raises(LimitReached, match="there is no room for 100 more"):
        await packages.put(named(b"y" * 100), 100, 0, b"y" * 100)


async def test_controllers_that_share_a_database_have_the_same_packages_within_the_same_bound(
    tmp_path: Path, postgres_url: str
) -> None:
    database = PostgresDatabase(postgres_url, "prepares")
    database.share()
    database.close()
    needed: set[str] = set()
    leader, successor = (
        Packages(tmp_path / name, lambda: {"p": needed}, 250, shared=SharedPackages(postgres_url))
        for name in ("leader", "successor")
    )
    kept, unused, new = (os.urandom(100) for _ in range(3))
    for data in (kept, unused):
        await leader.put(named(data), 100, 0, data)
    assert await successor.put(named(kept), 100, 0, b"") == 100, "it need not be sent again"
    needed.add(named(kept))
    assert await successor.put(named(new), 100, 0, new) == 100
    (tmp_path / "leader" / named(unused).partition(":")[2]).unlink()
    assert [await leader.obtain(named(data)) for data in (kept, unused, new)] == [True, False, True]
    assert await leader.read(named(new), 90) == (100, new[90:])
    needed.add(named(new))
    with pytest.raises(LimitReached, match="there is no room for 100 more"):
        await leader.put(named(unused), 100, 0, unused)


async def test_two_who_send_the_same_at_one_time_and_a_restart_between_pieces(tmp_path: Path) -> None:
    data = os.urandom(5_000)
    name = named(data)
    received = {"a": 0, "b": 0}
    turns = 0
    packages = Packages(tmp_path / "p", dict)
    while min(received.values()) < len(data):
        packages = Packages(tmp_path / "p", dict)  # a new controller for each piece: what is there counts
        for who, there in received.items():
            received[who] = await packages.put(name, len(data), there, data[there : there + 1_000])
        turns += 1
    assert turns <= 5
    assert (await packages.read(name, 0))[1] == data


@pytest.mark.parametrize("spoilt", [b"", b"cut off"])
async def test_what_a_disk_has_changed_is_asked_for_again_and_never_given(tmp_path: Path, spoilt: bytes) -> None:
    packages = Packages(tmp_path / "p", dict)
    data = os.urandom(100)
    name = named(data)
    for _ in range(2):
        await packages.put(name, 100, 0, data)
        packages._path(name).write_bytes(spoilt)
        with pytest.raises(NotFound, match="submit the job again"):
            await packages.read(name, 0)
        assert await packages.put(name, 100, 0, b"") == 0


async def test_a_pool_has_a_bound_of_its_own(tmp_path: Path) -> None:
    needed: dict[str, set[str]] = {}
    packages = Packages(tmp_path / "p", lambda: needed, pool_bytes=250)
    names = []
    for _ in range(3):
        data = os.urandom(100)
        names.append(named(data))
        await packages.put(names[-1], 100, 0, data)
    needed["a"] = set(names[:2])
    await packages.check_room("a", names[:1])
    await packages.check_room("b", names[1:])
    with pytest.raises(LimitReached, match="packages of pool a's living jobs"):
        await packages.check_room("a", names[2:])
