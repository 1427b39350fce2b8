"""Commits of the store: SQLite beside PostgreSQL; how long another controller takes to lead once one was killed, and
how long one takes to serve again that was killed with a long history and many jobs.

    python benchmarks/store.py [--commits N] [--takeovers N] [--restarts N]

Starts a PostgreSQL of its own (docs/operating.md).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.scheduler import DEVICES, Cluster
from callboard.client.client import Client
from callboard.controller.journal.postgres import PostgresDatabase
from callboard.controller.journal.secret_store import SecretStore
from callboard.controller.journal.state_dir import StateDir
from callboard.controller.journal.store import Store
from callboard.scheduler import Scheduler, State
from callboard.scheduler.records.events import JobCompleted
from callboard.scheduler.records.job_records import EventRecord, JobRecord, Put, Record
from callboard.scheduler.records.states import JobState
from tests.support.controller_process import ControllerProcess
from tests.support.members import Members
from tests.support.postgres import Postgres

LEASE_MS = 4_000

LIVE, ENDED = 10_000, 100_000
"""Jobs in the journal of a restart."""


def commits(store: Store, batch: int, count: int) -> list[float]:
    """Seconds of each commit of so many changes with their events."""
    taken, number = [], 0
    for _ in range(count):
        numbers = range(number, number + batch)
        number += batch
        changes = [Put(JobRecord(uid=f"j{i}", name=f"job-{i}", order=i, state=JobState.PENDING)) for i in numbers]
        events = [
            EventRecord(
                revision=i + 1,
                at_ms=i,
                type="job.pending",
                subject=f"jobs/job-{i}",
                state="PENDING",
                reason="waits for room",
                cause="c",
            )
            for i in numbers
        ]
        began = time.perf_counter()
        store.commit(changes, events)
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def compare(server: Postgres, folder: Path, count: int) -> None:
    """Prints commits of both."""

    def sqlite(place: Path) -> Store:
        directory = StateDir(place)
        directory.open()
        return Store.of(directory, events_kept=10_000)

    def postgresql(place: Path) -> Store:
        place.mkdir()
        database = PostgresDatabase(server.url(server.new_database()), "benchmark")
        store = Store(database, SecretStore(database, place / "key", seals_anew=False), events_kept=10_000)
        database.share()
        (database.fence,) = database.execute("UPDATE leader SET fence = 1 RETURNING fence").fetchone()
        return store

    stores: dict[str, Callable[[Path], Store]] = {"sqlite": sqlite, "postgresql": postgresql}
    for batch in (1, 10, 100):
        for name, opened in stores.items():
            store = opened(folder / f"{name}-{batch}")
            taken = commits(store, batch, count)
            store.close()
            p50, p95 = taken[len(taken) // 2], taken[int(len(taken) * 0.95)]
            rate = len(taken) / sum(taken)
            print(
                f"{name:11} batch of {batch:3}: p50 {p50 * 1e3:5.1f} ms, p95 {p95 * 1e3:5.1f} ms, "
                f"{rate:5.0f} commits/s, {rate * batch:6.0f} changes/s"
            )


async def take_over(server: Postgres, folder: Path, count: int) -> None:
    """Prints how long it takes from the kill of a leader to the first write that is acknowledged."""
    taken: list[float] = []
    async with (
        Members(folder, [server.url(server.new_database())] * 2, lease_ms=LEASE_MS) as members,
        Client(members.addresses, timeout=60) as client,
    ):
        for number in range(count):
            await client.ensure_pool(f"before-{number}")
            leader, standby = members.all
            leader.signal(signal.SIGKILL)
            began = time.perf_counter()
            await client.ensure_pool(f"after-{number}")
            taken.append(time.perf_counter() - began)
            await leader.ended()
            members.all = [standby, leader]
            await leader.start()
            await leader.said("follows")
        kept = {pool.name for pool in await client.list_pools()}
    assert len(kept) == 2 * count, "an acknowledged write is lost"
    taken.sort()
    print(
        f"from the kill to an acknowledged write, {count} times: p50 {taken[count // 2]:.2f} s, "
        f"p95 {taken[int(count * 0.95)]:.2f} s, worst {taken[-1]:.2f} s; no acknowledged write lost"
    )


def long_history() -> list[Record]:
    """The state of a controller whose jobs run on full nodes, after many that have ended."""
    cluster = Cluster(1, Scheduler(State(), ENDED))
    first = cluster.submission()
    cluster.answer(cluster.handle(first))
    cluster.answer(cluster.handle(JobCompleted(now_ms=cluster.now_ms, uid=first.uid)))
    for number in range(1, LIVE // DEVICES):
        cluster.handle(cluster.hello(number))
    for _ in range(LIVE):
        cluster.answer(cluster.handle(cluster.submission()))
    state = cluster.scheduler.state
    spec, job = state.specs[first.uid], state.jobs[first.uid]
    for number in range(1, ENDED):
        uid, name = f"e{number}", f"ended-{number}"
        state.apply(Put(replace(spec, uid=uid, spec=replace(spec.spec, name=name))))
        state.apply(Put(replace(job, uid=uid, name=name, order=-number)))
    return list(state.records())


async def restart(folder: Path, count: int) -> None:
    """Prints how long a controller takes to serve after it was killed. Its modules are compiled already, as in every
    installation, by a first start that doesn't count."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder.with_name("bytecode"))
    directory = StateDir(folder)
    directory.open()
    store = Store.of(directory, events_kept=100_000)
    lines = store.snapshot(long_history())
    store.close()
    with sqlite3.connect(directory.journal_path) as database:
        database.execute("INSERT INTO past SELECT position, line FROM snapshot")
    directory.close()
    # Its agents are not there: a long grace keeps the nodes.
    options = ("--limit", f"ended_jobs={ENDED}", "--reconcile-grace", "1h")
    controller = ControllerProcess(folder, *options, program=("callboard.cli", "controller"))
    taken: list[float] = []
    busy: list[float] = []
    rss = 0
    await controller.start()
    await controller.kill()
    for _ in range(count):
        began = time.perf_counter()
        await controller.start()
        async with Client(controller.address) as client:
            stats = await client.stats()
        taken.append(time.perf_counter() - began)
        times = psutil.Process(controller.pid).cpu_times()
        busy.append(times.user + times.system)
        assert (stats.jobs["RUNNING"], stats.jobs["SUCCEEDED"]) == (LIVE, ENDED), stats
        rss = psutil.Process(controller.pid).memory_info().rss
        await controller.kill()
    print(
        f"from the start to an answer, {LIVE} jobs that run and {ENDED} that have ended ({lines} lines), "
        f"{count} times: fastest {min(taken):.2f} s, median {sorted(taken)[count // 2]:.2f} s, "
        f"CPU time {min(busy):.2f} s, {rss >> 20} MiB"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=300, metavar="N", help="commits of each kind")
    parser.add_argument("--takeovers", type=int, default=20, metavar="N", help="leaders to kill")
    parser.add_argument("--restarts", type=int, default=5, metavar="N", help="of a controller with a long history")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.restarts:
            asyncio.run(restart(Path(folder) / "state", options.restarts))
    if not options.commits and not options.takeovers:
        print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        return
    server = Postgres()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if options.commits:
                compare(server, Path(folder), options.commits)
            if options.takeovers:
                asyncio.run(take_over(server, Path(folder) / "members", options.takeovers))
    finally:
        server.close()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
