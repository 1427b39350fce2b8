"""Each role may call what its table says, a trainer acts in its pools only, and every change is written down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from callboard.client.calls.connection import Connection
from callboard.client.client import Client
from callboard.client.jobs import JobHandle
from callboard.controller.options import Limits
from callboard.controller.server import SERVICES, Controller
from callboard.security import access as access_module
from callboard.security.access import Access
from callboard.security.audit_log import AUDIT_NAME, AuditLog
from callboard.security.caller_roles import OPEN, OWNER, ROLES, Identity, Role, caller, check_role
from callboard.security.gate import ClientLimits, Gate, changes
from callboard.security.grants import GRANTS_NAME, BadGrant, grant, read_grants, revoke
from callboard.security.places import UnsafeFile, write_private
from callboard.v1.job_pb2 import Job, JobSpec
from callboard.wire.errors import parse_error
from callboard.wire.refusals import CallboardError, LimitReached, NotAllowed, NotAuthenticated
from tests.controller.support import options_for, running
from tests.security.fuzzing import WROTE_TOO_LATE
from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).parents[2]

DESCRIBED = {
    f"/{service.full_name}/{method.name}": method
    for module in (*SERVICES, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@asynccontextmanager
async def client_of(controller: Controller, name: str, role: Role) -> AsyncIterator[Client]:
    """A client with a token of its own."""
    token = await asyncio.to_thread(grant, controller.options.state_dir, name, role)
    client = Client(controller.address, timeout=20, retry=0)
    await client._connection.close()
    client._connection = Connection(controller.address, timeout_s=20, retry_s=0, find=lambda _: token)
    async with client:
        yield client


@pytest.fixture
async def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controller]:
    monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
    async with running(options_for(tmp_path)) as running_one:
        yield running_one


def spec(name: str, pool: str) -> dict[str, Any]:
    worker = {"name": "w", "actor": "tests.support.actors:Plain", "resources": {"cpu": 1, "gpu": 1}}
    return {"name": name, "pool": pool, "components": [worker]}


class TestTheTable:
    def test_every_method_of_every_service_has_an_entry_and_no_other(self) -> None:
        assert set(DESCRIBED) == set(ROLES) | OPEN
        assert not set(ROLES) & OPEN

    def test_a_method_without_an_entry_is_for_nobody_but_the_owner(self) -> None:
        check_role(OWNER, "/callboard.v1.NewService/New")
        for role in Role:
            with pytest.raises(NotAllowed):
                check_role(Identity("x", role), "/callboard.v1.NewService/New")

    def test_viewers_change_nothing_and_agents_call_only_what_agents_need(self) -> None:
        for method, roles in ROLES.items():
            name = method.rpartition("/")[2]
            if changes(name):
                assert Role.VIEWER not in roles, method
            agents = ".AgentService/" in method
            assert (Role.AGENT in roles) == (agents or name == "DrainNode"), method
            assert (Role.JOINER in roles) == (name == "Join"), method
            if name == "Join":
                continue
            if ".AgentService/" in method:
                assert roles == {Role.AGENT}
            else:
                assert Role.OPERATOR in roles, method

    @pytest.mark.parametrize("role", list(Role))
    async def test_a_role_is_refused_exactly_what_the_table_says(self, role: Role, controller: Controller) -> None:
        token = grant(controller.options.state_dir, "somebody", role)
        async with grpc.aio.insecure_channel(controller.address) as channel:
            for path, method in DESCRIBED.items():
                code, said = await outcome(channel, path, method, token)
                if path in OPEN or role in ROLES[path]:
                    assert code not in {"PERMISSION_DENIED", "UNAUTHENTICATED", "INTERNAL", "UNKNOWN"}, (path, said)
                else:
                    assert code == "PERMISSION_DENIED", (path, code, said)
                    assert "somebody" in said, "it says who"
                    assert "Ask an operator" in said, "and what to do"


async def outcome(channel: Any, path: str, method: Any, token: str) -> tuple[str, str]:
    """The status of a call with an empty request, or of a stream that was still open after a moment."""
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        if method.client_streaming:
            call = channel.stream_stream(path)(iter([b""]), timeout=1, metadata=metadata)
            await call.read()
        elif method.server_streaming:
            await channel.unary_stream(path)(b"", timeout=1, metadata=metadata).read()
        else:
            await channel.unary_unary(path)(b"", timeout=20, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        if error.details() == WROTE_TOO_LATE:
            return await outcome(channel, path, method, token)
        known = parse_error(error)
        return known.code, known.message
    return "OK", ""


class TestTrainers:
    async def test_a_trainer_acts_only_in_pools_that_name_it(self, controller: Controller) -> None:
        async with (
            Client(controller.address) as owner,
            FakeAgent(controller.address, "n1", gpus=4),
            client_of(controller, "alice", Role.TRAINER) as alice,
        ):
            await owner.create_pool({"name": "hers", "nominal": {"cpu": 8}, "members": ["alice"]})
            await owner.create_pool({"name": "theirs", "nominal": {"cpu": 8}, "members": ["bob"]})
            await owner.submit(spec("other", "theirs"))
            mine = await alice.submit(spec("mine", "hers"))
            await mine.running(timeout=30)
            assert [job.name for job in await alice.list_jobs()] == ["jobs/mine"]
            overview = await alice.overview()
            assert ([job.name for job in overview.jobs], overview.more_jobs) == (["jobs/mine"], 0)
            other = JobHandle(alice._connection, Job(name="jobs/other", uid="other", spec=JobSpec(name="other")))
            attempts: list[Callable[[], Any]] = [
                lambda: alice.submit(spec("new", "theirs")),
                lambda: alice.submit(spec("new", "no-such-pool")),
                other.refresh,
                other.explain,
                other.cancel,
                other.complete,
                lambda: other.scale("w", 2),
                lambda: alice.create_pool({"name": "more"}),
                lambda: alice.drain_node("n1"),
                alice.list_placement_groups,
                alice.audit,
                alice.demand,
            ]
            for attempt in attempts:
                with pytest.raises(NotAllowed):
                    await attempt()
            two_pools = spec("both", "hers")
            two_pools["components"].append({"name": "v", "actor": "a.b:C", "pool": "theirs", "resources": {"cpu": 1}})
            with pytest.raises(CallboardError):
                await alice.submit(two_pools)
            # Of the other's job: amounts, and no name.
            (node,) = await alice.list_nodes()
            assert {name.job for device in node.devices for name in device.workers} == {"mine"}
            assert sum(device.used_milli for device in node.devices) == 2000
            assert {pool.name: pool.active_jobs for pool in await alice.list_pools()}["pools/theirs"] == 1
            seen = [event.subject for event in await alice.list_events()]
            assert any(subject == "jobs/mine" for subject in seen)
            assert {subject.split("/")[1] for subject in seen} <= {"mine", "hers"}
            everything = [event.subject for event in await owner.list_events()]
            assert "jobs/other" in everything
            async for event in alice.watch(start_revision=1, types=["job."]):
                assert event.subject == "jobs/mine"
                break
            await mine.cancel()
            # Taken out of the pool, it is out at once.
            await owner.update_pool({"name": "hers", "members": []}, fields=["members"])
            with pytest.raises(NotAllowed, match="does not name alice"):
                await alice.submit(spec("later", "hers"))

    async def test_a_trainer_has_no_more_jobs_waiting_than_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
        async with (
            running(options_for(tmp_path, limits=Limits(client_waiting_jobs=2))) as controller,
            Client(controller.address) as owner,
            client_of(controller, "alice", Role.TRAINER) as alice,
        ):
            await owner.create_pool({"name": "hers", "nominal": {"cpu": 8}, "members": ["alice"]})
            waiting = {"wait_for_nodes": {"timeout": "1h"}}
            for number in range(2):
                await alice.submit(spec(f"j{number}", "hers") | waiting)
            with pytest.raises(LimitReached, match="2 jobs wait in pool hers"):
                await alice.submit(spec("j2", "hers") | waiting)
            await owner.submit(spec("j3", "hers") | waiting)

    async def test_r7_who_calls_beyond_a_limit_again_and_again_waits_for_the_refusal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
        limits = Limits(client_requests_s=1, client_refusals_s=4)
        async with (
            running(options_for(tmp_path, limits=limits)) as controller,
            client_of(controller, "alice", Role.VIEWER) as alice,
        ):
            loop = asyncio.get_running_loop()

            async def refused() -> float:
                began = loop.time()
                with contextlib.suppress(LimitReached):
                    for _ in range(10):
                        await alice.list_pools()
                return loop.time() - began

            waits = sorted(await asyncio.gather(*(refused() for _ in range(16))))
            assert waits[-1] >= 0.9, waits


class TestGrants:
    def test_a_client_is_made_listed_and_revoked_and_its_token_is_kept_nowhere(self, tmp_path: Path) -> None:
        access = Access(tmp_path, insecure=False, now_s=iter(range(0, 1000, 5)).__next__)
        access.open()
        token = grant(tmp_path, "alice", Role.TRAINER)
        shown = (("authorization", f"Bearer {token}"),)
        assert access.identify(shown) == Identity("alice", Role.TRAINER)
        assert token not in (tmp_path / GRANTS_NAME).read_text()
        assert stat.S_IMODE((tmp_path / GRANTS_NAME).stat().st_mode) == 0o600
        with pytest.raises(BadGrant, match="--replace"):
            grant(tmp_path, "alice", Role.OPERATOR)
        other = grant(tmp_path, "alice", Role.OPERATOR, replace=True)
        with pytest.raises(NotAuthenticated, match="no longer"):
            access.identify(shown)
        assert access.identify((("authorization", f"Bearer {other}"),)).role is Role.OPERATOR
        revoke(tmp_path, "alice")
        with pytest.raises(NotAuthenticated):
            access.identify((("authorization", f"Bearer {other}"),))
        with pytest.raises(BadGrant):
            revoke(tmp_path, "alice")

    def test_a_token_that_is_over_counts_no_longer(self, tmp_path: Path) -> None:
        token = grant(tmp_path, "alice", Role.VIEWER, lasts_ms=60_000)
        made_s = read_grants(tmp_path)[0].made_ms / 1000
        now = [made_s + 59]
        access = Access(tmp_path, insecure=False, wall_s=lambda: now[0])
        access.open()
        shown = (("authorization", f"Bearer {token}"),)
        assert access.identify(shown).name == "alice"
        now[0] = made_s + 60
        with pytest.raises(NotAuthenticated):
            access.identify(shown)

    @pytest.mark.parametrize("name", ["owner", "", "a b", "../x", "x" * 100])
    def test_a_name_that_could_be_taken_for_another_is_refused(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(BadGrant):
            grant(tmp_path, name, Role.VIEWER)

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"clients": [{"name": "a"}]}', '{"clients": [{"name": "a", "role": "king"}]}']
    )
    def test_a_broken_file_lets_nobody_new_in_and_throws_nobody_out(self, content: str, tmp_path: Path) -> None:
        access = Access(tmp_path, insecure=False, now_s=iter(range(0, 1000, 5)).__next__)
        access.open()
        token = grant(tmp_path, "alice", Role.VIEWER)
        shown = (("authorization", f"Bearer {token}"),)
        assert access.identify(shown).name == "alice"
        write_private(tmp_path / GRANTS_NAME, content)
        assert access.identify(shown).name == "alice"
        assert GRANTS_NAME in access.trouble
        with pytest.raises(UnsafeFile):
            Access(tmp_path, insecure=False).open()

    async def test_the_command_line_makes_clients_and_shows_what_they_did(
        self, controller: Controller, tmp_path: Path
    ) -> None:
        async def callboard(*arguments: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "callboard.cli", *arguments]
            return await asyncio.to_thread(
                subprocess.run, line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            )

        state, file = str(controller.options.state_dir), tmp_path / "alice.token"
        for arguments in (
            ("token", "create", "alice", "--role", "operator", "--file", str(file), "--state-dir", state),
            ("token", "list", "--state-dir", state),
        ):
            shown = await callboard(*arguments)
            assert shown.returncode == 0, shown.stderr
            assert "alice" in shown.stdout
        async with Client(controller.address, timeout=20) as client:
            await client._connection.close()
            client._connection = Connection(controller.address, find=lambda _: file.read_text().strip())
            await client.create_pool({"name": "p"})
        shown = await callboard("audit", "--controller", controller.address, "-o", "json", "--who", "alice")
        (entry,) = json.loads(shown.stdout)
        assert (entry["who"], entry["role"], entry["method"], entry["code"]) == (
            "alice",
            "operator",
            "CreatePool",
            "OK",
        )
        assert entry["subject"] == "p"
        assert entry["peer"].startswith("ipv4:127.0.0.1:")
        assert (await callboard("token", "revoke", "alice", "--state-dir", state)).returncode == 0
        refused = await callboard("token", "revoke", "alice", "--state-dir", state)
        assert refused.returncode != 0
        assert "there is no client alice" in refused.stderr


class TestTheAuditLog:
    def test_what_was_added_is_brought_to_disk_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        monkeypatch.setattr("os.fdatasync", synced.append)
        log = AuditLog(tmp_path / AUDIT_NAME)
        log.open()
        log.sync()
        assert synced == [], "there is nothing yet"
        add(log, "a")
        log.sync()
        log.sync()
        assert len(synced) == 1
        add(log, "b")
        log.close()
        assert len(synced) == 2

    async def test_every_change_is_written_down_with_who_and_what_came_of_it(
        self, controller: Controller, tmp_path: Path
    ) -> None:
        async with Client(controller.address) as owner, client_of(controller, "eve", Role.VIEWER) as eve:
            await owner.create_pool({"name": "p", "nominal": {"cpu": 1}})
            await owner.create_pool({"name": "q"}, validate_only=True)
            await owner.list_pools()
            with pytest.raises(NotAllowed):
                await eve.delete_pool("p")
            with pytest.raises(CallboardError):
                await owner.delete_pool("nothing")
            entries = [(each.who, each.method, each.subject, each.code) for each in await owner.audit()]
        assert entries == [
            ("owner", "DeletePool", "pools/nothing", "NOT_FOUND"),
            ("eve", "DeletePool", "pools/p", "PERMISSION_DENIED"),
            ("owner", "CreatePool", "p", "OK"),
        ]
        lines = (tmp_path / "state" / AUDIT_NAME).read_text().splitlines()
        assert [json.loads(line)["who"] for line in lines] == ["owner", "eve", "owner"]

    def test_it_goes_on_after_a_restart_and_after_a_torn_line(self, tmp_path: Path) -> None:
        path = tmp_path / AUDIT_NAME
        log = AuditLog(path)
        log.open()
        add(log, "one")
        log.close()
        with path.open("ab") as file:
            file.write(b'{"number": 2, "who": "tor')
        log = AuditLog(path)
        log.open()
        add(log, "three")
        log.close()
        log = AuditLog(path)
        log.open()
        assert [(entry.number, entry.subject) for entry in log.newest(10)] == [(2, "three"), (1, "one")]
        log.close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_it_is_bounded_and_keeps_the_newest(self, tmp_path: Path) -> None:
        log = AuditLog(tmp_path / AUDIT_NAME, most_bytes=4096)
        log.open()
        for number in range(500):
            add(log, f"s{number}")
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 4096
        assert len(list(tmp_path.iterdir())) == 2
        log.close()
        log = AuditLog(tmp_path / AUDIT_NAME, most_bytes=4096)
        log.open()
        assert log.newest(1)[0].number == 500
        assert [entry.subject for entry in log.newest(2, before=499)] == ["s497", "s496"]
        log.close()

    def test_a_disk_that_takes_nothing_is_told_and_stops_no_call(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = AuditLog(tmp_path / AUDIT_NAME)
        log.open()
        with structlog.testing.capture_logs() as said:
            with monkeypatch.context() as full:
                full.setattr(os, "write", raise_full)
                add(log, "one")
                add(log, "lost")
                assert "No space left" in log.trouble
            assert log.newest(1)[0].subject == "lost"
            add(log, "two")
            assert not log.trouble
        assert [line["event"] for line in said] == ["audit_log_not_written", "audit_log_written_again"]
        log.close()


def raise_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def add(log: AuditLog, subject: str) -> None:
    log.add(at_ms=1, who="a", role="", method="M", subject=subject, peer="p", code="OK", why="")


class TestLimits:
    def test_a_client_that_calls_too_often_is_told_and_others_are_not(self) -> None:
        now = [0.0]
        gate = Gate(
            lambda name, _: Identity(name, Role.VIEWER), limits=ClientLimits(requests_s=5), now_s=lambda: now[0]
        )
        method = "/callboard.v1.PoolService/GetPool"

        def call(name: str) -> None:
            with gate.passing(gate.identify(method, name), method, stream=False):
                assert caller().name == name

        for _ in range(10):
            call("busy")
        with pytest.raises(LimitReached, match="more than 5 calls a second"):
            call("busy")
        call("calm")
        now[0] += 0.2
        call("busy")
        with pytest.raises(LimitReached):
            call("busy")

    def test_r7_a_change_takes_as_much_of_the_limit_as_four_reads(self) -> None:
        limits = ClientLimits(requests_s=20)
        gate = Gate(lambda *_: Identity("a", Role.TRAINER), limits=limits, now_s=lambda: 0.0)

        def call(method: str) -> None:
            with gate.passing(gate.identify(method, None), method, stream=False):
                pass

        for _ in range(9):
            call("/callboard.v1.JobService/SubmitJob")
        for _ in range(4):
            call("/callboard.v1.JobService/GetJob")
        with pytest.raises(LimitReached, match="more than 20 calls a second"):
            call("/callboard.v1.JobService/GetJob")
        with pytest.raises(LimitReached, match="more than 5 changes a second"):
            call("/callboard.v1.JobService/SubmitJob")

    def test_r7_refusals_that_cost_nothing_to_provoke_wait_and_only_those_of_their_caller(self) -> None:
        now = [0.0]
        limits = ClientLimits(refusals_s=10)
        gate = Gate(lambda *_: OWNER, limits=limits, now_s=lambda: now[0])
        waits = [gate.patience_s(OWNER, "ipv4:127.0.0.1:1") for _ in range(60)]
        assert waits[:20] == [0.0] * 20, "mistakes are answered at once"
        assert waits[20:30] == sorted(waits[20:30])
        assert waits[-1] == 1.0, "never longer"
        assert gate.patience_s(None, "ipv4:127.0.0.1:1") == 0, "a stranger is somebody else"
        assert gate.patience_s(Identity("alice", Role.VIEWER), "ipv4:127.0.0.1:1") == 0
        strangers = [gate.patience_s(None, f"ipv4:127.0.0.1:{port}") for port in range(2, 40)]
        assert strangers[-1] == 1.0, "the same one, on many connections"
        now[0] = 4.0
        assert gate.patience_s(OWNER, "") == gate.patience_s(None, "ipv4:127.0.0.1:9") == 0

    def test_open_streams_are_counted_until_they_end(self) -> None:
        gate = Gate(lambda name, _: Identity(name, Role.VIEWER), limits=ClientLimits(streams=1))
        method = "/callboard.v1.EventService/Watch"
        who = gate.identify(method, "busy")
        with (
            gate.passing(who, method, stream=True),
            pytest.raises(LimitReached, match="1 streams open"),
            gate.passing(who, method, stream=True),
        ):
            pass
        with gate.passing(who, method, stream=True):
            pass

    def test_the_owner_has_no_limit(self) -> None:
        gate = Gate(lambda *_: OWNER, limits=ClientLimits(requests_s=1, streams=1))
        for _ in range(100):
            with gate.passing(OWNER, "/callboard.v1.EventService/Watch", stream=True):
                pass
