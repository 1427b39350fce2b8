"""Several controllers on one PostgreSQL: one leads, another takes over, and nothing that was acknowledged is lost (R1).

Real programs, a real database, real signals; what is cut is cut by a proxy that tells nobody.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import psycopg
import pytest

from callboard.client.client import Client
from callboard.controller.journal.postgres import WRITES, PostgresDatabase
from callboard.security.caller_roles import Role
from callboard.security.certificates import issue, make_authority
from callboard.security.dialing import open_channel
from callboard.security.places import CERTS_NAME, TLS_VARIABLES
from callboard.security.tls import TlsFiles
from callboard.v1 import job_pb2, job_pb2_grpc, pool_pb2_grpc
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason, NotAllowed
from tests.controller.support import pool
from tests.recovery.programs import Agent
from tests.support.controller_process import ControllerProcess
from tests.support.members import Members, Wire, more_than, until, writers
from tests.support.postgres import Postgres


@pytest.fixture
async def pair(tmp_path: Path, postgres_url: str) -> AsyncIterator[Members]:
    """A leader and a standby."""
    async with Members(tmp_path, [postgres_url] * 2) as members:
        yield members


async def caught_up(standby: ControllerProcess, revision: int) -> bool:
    return (await Members.stats_of(standby)).revision >= revision


async def pools_at(address: str) -> set[str]:
    async with Client(address) as client:
        return {pool.name.removeprefix("pools/") for pool in await client.list_pools()}


class TestAStandby:
    async def test_serves_reads_marked_with_their_age_and_refuses_writes_naming_the_leader(self, pair: Members) -> None:
        leader, standby = pair.all
        async with Client(leader.address) as client:
            await client.create_pool({"name": "p"})
            revision = (await client.stats()).revision
        await until(lambda: caught_up(standby, revision))
        stats = await pair.stats_of(standby)
        assert stats.standby
        assert [(each.address, each.leads) for each in stats.controllers] == [
            (leader.address, True),
            (standby.address, False),
        ]
        assert await pools_at(standby.address) == {"p"}
        async with open_channel(standby.address) as channel:
            listing = job_pb2_grpc.JobServiceStub(channel).ListJobs(job_pb2.ListJobsRequest())
            await listing
            trailers = {key: str(value) for key, value in await listing.trailing_metadata()}
            assert trailers["callboard-standby"].startswith(
                f"leader={leader.address}; revision={stats.revision}; age_ms="
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pool_pb2_grpc.PoolServiceStub(channel).CreatePool(pool("q"))
        said = parse_error(refused.value)
        assert (said.reason, said.metadata.get("leader", said)) == (ErrorReason.NOT_LEADER, leader.address)

    async def test_a_client_of_a_standby_writes_to_the_leader(self, pair: Members) -> None:
        leader, standby = pair.all
        async with Client(f"{standby.address},{leader.address}") as client:
            await client.create_pool({"name": "p"})
        assert await pools_at(leader.address) == {"p"}

    async def test_one_that_was_stopped_for_longer_than_the_lease_follows_again(
        self, pair: Members, postgres: Postgres
    ) -> None:
        leader, standby = pair.all

        async def is_out() -> bool:
            sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = "
            return postgres.ask(f"{sessions}'callboard follows {standby.address}'") == [(0,)]

        standby.signal(signal.SIGSTOP)
        await until(is_out)  # the server ended its session
        standby.signal(signal.SIGCONT)
        async with Client(leader.address) as client:
            await client.create_pool({"name": "p"})
            revision = (await client.stats()).revision
        await until(lambda: caught_up(standby, revision))
        assert await pools_at(standby.address) == {"p"}

    async def test_one_with_another_key_is_refused_in_words(
        self, pair: Members, tmp_path: Path, postgres_url: str
    ) -> None:
        other = Members(tmp_path / "other", [postgres_url]).leader
        await other.spawn()
        assert await other.ended() == 1
        assert "Copy theirs here" in "".join(other.other)
        del pair


class TestTakingOver:
    async def test_no_acknowledged_write_is_lost_when_the_leader_is_killed(self, pair: Members) -> None:
        async with writers(pair.addresses, 4) as acknowledged:
            await more_than(acknowledged, 40)
            await pair.leader.kill()
            successor = await pair.next_leader()
            await more_than(acknowledged, 40)
        assert set(acknowledged) <= await pools_at(successor.address)
        assert (await pair.stats_of(successor)).term == 2

    async def test_by_tls_with_the_certificate_of_one_authority_which_each_checks(
        self, tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        members = Members(tmp_path, [postgres_url] * 2)
        members.leader.state_dir.mkdir(mode=0o700)
        authority = members.leader.state_dir / CERTS_NAME
        make_authority(authority, [])
        for name, role in (("olga", Role.OPERATOR), ("vera", Role.VIEWER)):
            issue(authority, name, role, tmp_path / name)
        for part, file in {"ca": "ca.pem", "cert": "cert.pem", "key": "cert.key"}.items():
            monkeypatch.setenv(TLS_VARIABLES[part], str(tmp_path / "olga" / file))
        async with members, Client(members.addresses, timeout=60) as client:
            await client.create_pool({"name": "before"})
            await members.leader.kill()
            successor = await members.next_leader()
            await client.create_pool({"name": "after"})
            assert await pools_at(successor.address) == {"before", "after"}
            # Who changed what is told where it was done.
            assert [(each.who, each.role, each.subject) for each in await client.audit()] == [
                ("olga", "operator", "after")
            ]
            viewer = TlsFiles(*(tmp_path / "vera" / file for file in ("ca.pem", "cert.pem", "cert.key")))
            async with Client(successor.address, tls=viewer) as other:
                with pytest.raises(NotAllowed, match="vera"):
                    await other.create_pool({"name": "never"})

    async def test_code_that_the_old_leader_took_runs_and_need_not_be_sent_again(
        self, pair: Members, tmp_path: Path
    ) -> None:
        code = tmp_path / "code"
        code.mkdir()
        (code / "main.py").write_text("print('brought along')\n")
        part = {"name": "w", "command": [sys.executable, "main.py"], "working_dir": str(code)}
        spec = {"name": "first", "pool": "p", "wait_for_nodes": "2m", "components": [part]}
        leader, standby = pair.all
        async with Client(leader.address) as client:
            await client.create_pool({"name": "p"})
        # By way of the standby, which must not keep for itself what only the leader can give to a job.
        async with Client(f"{standby.address},{leader.address}", timeout=60) as client:
            sent = await client.send_code(spec)
            jobs = [await client.submit(sent)]
            assert not (standby.state_dir / "packages").exists()
            await leader.kill()
            assert await pair.next_leader() is standby
            jobs.append(await client.submit({**sent, "name": "second"}))  # as it was, without its files
            agent = Agent(tmp_path, "n0", None, standby.address, {})
            agent.wanted = True
            await agent.ensure()
            try:
                for job in jobs:
                    assert (await job.finished(60)).state == job_pb2.JOB_STATE_SUCCEEDED
                    assert [line.text async for line in job.logs()] == ["brought along"]
            finally:
                await agent.leave()

    async def test_a_watch_goes_on_without_loss(self, pair: Members) -> None:
        seen: list[int] = []

        async def watch() -> None:
            async with Client(pair.addresses) as client:
                async for event in client.watch(start_revision=1, types=["pool."]):
                    seen.append(event.revision)  # noqa: PERF401 - looked at meanwhile

        watching = asyncio.create_task(watch())
        async with writers(pair.addresses, 2) as acknowledged:
            await more_than(acknowledged, 20)
            await pair.leader.kill()
            successor = await pair.next_leader()
            await more_than(acknowledged, 20)
        async with Client(successor.address) as client:
            there = [event.revision for event in await client.list_events(types=["pool."])]

        async def is_at_the_end() -> bool:
            assert not watching.done(), watching
            return bool(seen) and seen[-1] >= there[-1]

        await until(is_at_the_end)
        watching.cancel()
        assert seen == there

    async def test_a_leader_that_was_stopped_for_longer_than_its_lease_commits_nothing(self, pair: Members) -> None:
        leader, standby = pair.all
        async with writers(pair.addresses, 4) as acknowledged:
            await more_than(acknowledged, 20)
            leader.signal(signal.SIGSTOP)  # in the middle of whatever it does
            await standby.said("term begins")
            await more_than(acknowledged, 20)
            leader.lines.clear()
            leader.signal(signal.SIGCONT)
            await leader.said("follows")
            await more_than(acknowledged, 20)
        assert set(acknowledged) <= await pools_at(standby.address)
        stats = await pair.stats_of(standby)
        assert (stats.term, stats.standby) == (2, False)
        assert (await pair.stats_of(leader)).standby

    async def test_a_transaction_of_which_only_the_first_half_was_sent_holds_nobody_up(
        self, pair: Members, postgres_url: str
    ) -> None:
        half = PostgresDatabase(postgres_url, WRITES, lease_ms=1_000, writes=True)
        pipeline = half._connection.pipeline()
        pipeline.__enter__()
        await asyncio.to_thread(self._send_half, half, postgres_url)
        await pair.leader.kill()
        successor = await pair.next_leader()
        assert (await pair.stats_of(successor)).term == 2
        with pytest.raises(psycopg.OperationalError, match="closed the connection"):
            pipeline.__exit__(None, None, None)
        half.close()

    @staticmethod
    def _send_half(half: PostgresDatabase, url: str) -> None:
        """What a leader leaves that is stopped in the middle of a commit: its fence is locked, with no time limit."""
        half.execute("BEGIN")
        half.execute("SELECT hold((SELECT fence FROM leader))")
        other = PostgresDatabase(url, "looks")
        while other.execute("SELECT one FROM leader FOR UPDATE SKIP LOCKED").fetchone():
            pass
        other.close()

    async def test_it_goes_on_when_the_database_was_killed_and_started_again(
        self, tmp_path: Path, own_postgres: Postgres
    ) -> None:
        url = own_postgres.url(own_postgres.new_database())
        async with Members(tmp_path, [url] * 2) as members, writers(members.addresses, 4) as acknowledged:
            await more_than(acknowledged, 20)
            own_postgres.kill()
            await asyncio.to_thread(own_postgres.start)
            await more_than(acknowledged, 20)
            (leader,) = [each for each in members.all if not (await members.stats_of(each)).standby]
            assert set(acknowledged[:-8]) <= await pools_at(leader.address)
            (standby,) = [each for each in members.all if each is not leader]
            revision = (await members.stats_of(leader)).revision
            await until(lambda: caught_up(standby, revision))

    async def test_a_leader_that_is_told_to_end_hands_over_at_once(self, pair: Members) -> None:
        async with writers(pair.addresses, 2) as acknowledged:
            await more_than(acknowledged, 10)
            pair.leader.signal(signal.SIGTERM)
            successor = await pair.next_leader()
            assert await pair.leader.ended() == 0
            await more_than(acknowledged, 10)
        assert set(acknowledged) <= await pools_at(successor.address)


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server that a test may kill."""
    server = Postgres()
    yield server
    server.close()


async def test_a_leader_that_is_cut_off_from_its_database_stops_before_another_one_starts(
    tmp_path: Path, postgres: Postgres
) -> None:
    """By a proxy, wherever tests run; each way, in a network of its own: tests/recovery/partition.py."""
    database = postgres.new_database()
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(postgres.port))
        urls = [postgres.url(database, wire.port), postgres.url(database)]
        members = await stack.enter_async_context(Members(tmp_path, urls))
        leader, standby = members.all
        acknowledged = await stack.enter_async_context(writers(members.addresses, 4))
        await more_than(acknowledged, 20)
        wire.there.clear()
        wire.back.clear()
        stopped = await leader.said("the journal failed; nothing is accepted until it works")
        began = await standby.said("term begins")
        await more_than(acknowledged, 20)
        assert stopped["timestamp"] < began["timestamp"]
        leader.lines.clear()
        wire.there.set()
        wire.back.set()
        await leader.said("follows")
        assert set(acknowledged) <= await pools_at(standby.address)
