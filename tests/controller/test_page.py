"""Does the web page say what is true, to whom it may, and to nobody else?"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from callboard.controller.options import Limits
from callboard.controller.page import app as page_app
from callboard.controller.page.board import Board, Boards
from callboard.controller.page.login import CODE_LASTS_S, LASTS_S, Hosts, Logins, is_foreign
from callboard.controller.server import Controller
from callboard.security import certificates
from callboard.security.access import Access
from callboard.security.caller_roles import OWNER, Identity, Role
from callboard.security.grants import grant, revoke
from callboard.v1 import job_pb2, node_pb2, scheduler_pb2
from callboard.wire.refusals import LimitReached, NotAllowed, NotAuthenticated
from tests.controller.support import Api, api_at, job, options_for, pool, running
from tests.support.crowd import Crowd
from tests.support.fake_agent import FakeAgent


@dataclass
class Visitor:
    """A browser without a window: its cookie, and what it asks.

    Attributes:
        headers: of the last answer.
    """

    address: str
    cookie: str = ""
    trusts: ssl.SSLContext | None = None
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and content of an answer."""
        return await asyncio.to_thread(self._ask, path, body, headers)

    async def log_in(self, token: str) -> dict[str, Any]:
        """Logs in, and keeps the cookie."""
        status, answer = await self.ask("/api/login", {"token": token})
        assert status == 200, answer
        self.cookie = self.headers["set-cookie"].split(";")[0]
        found: dict[str, Any] = answer
        return found

    async def board(self) -> dict[str, Any]:
        """The whole board."""
        status, answer = await self.ask("/api/board")
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    async def call(self, service: str, method: str, **request: Any) -> tuple[int, Any]:
        """A call of a service."""
        return await self.ask(f"/api/call/{service}/{method}", request)

    def _ask(self, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        given = {"X-Callboard-Page": "1", "Cookie": self.cookie} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        request = urllib.request.Request(f"{self.address}{path}", data=data, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.trusts) as answer:
                status, text, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, text, found = error.code, error.read(), error.headers
        self.headers = {name.lower(): value for name, value in found.items()}
        return status, json.loads(text) if "json" in self.headers["content-type"] else text


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[Controller, Api]]:
    options = {"page": "127.0.0.1:0"} | options
    async with running(options_for(directory, **options)) as controller, api_at(controller.address) as api:
        yield controller, api


def token_of(controller: Controller, name: str, role: Role) -> str:
    token = grant(controller.options.state_dir, name, role)
    controller.access.look_again()
    return token


class TestBoard:
    async def test_it_holds_what_the_lists_hold(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, api), FakeAgent(controller.address, "n1", gpus=2):
            await api.pools.CreatePool(pool())
            await api.submit(job("a", gpu=1000, labels={"owner": "ana"}))
            await api.submit(job("b", gpu=500))
            await api.until_job("b", "RUNNING")
            visitor = Visitor(controller.page_address)
            await visitor.log_in(controller.access.token)
            shown = await visitor.board()
            jobs = (await api.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
            node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))).node
            stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
        assert {row["name"]: row["state"] for row in shown["jobs"]} == {
            one.name.removeprefix("jobs/"): job_pb2.JobState.Name(one.state).removeprefix("JOB_STATE_") for one in jobs
        }
        number = {row["id"]: row["name"] for row in shown["jobs"]}
        (row,) = shown["nodes"]
        assert [device[0] for device in row["devices"]] == [device.used_milli for device in node.devices]
        assert [[number[user[0]] for user in device[3:]] for device in row["devices"]] == [
            [worker.job for worker in device.workers] for device in node.devices
        ]
        assert shown["figures"]["used"]["gpu"] == stats.used.gpu_milli == 1500
        assert [each["labels"] for each in shown["jobs"] if each["name"] == "a"] == [{"owner": "ana"}]
        assert shown["pools"][0]["active"] == 2
        assert {group["job"] for group in shown["groups"]} == set(number)
        assert stats.page_address == controller.page_address

    async def test_what_changes_comes_as_rows_and_amounts_to_the_board(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, api), FakeAgent(controller.address, "n1", gpus=2):
            await api.pools.CreatePool(pool())
            board = Boards(controller.driver, controller.events, most_readers=4).of(OWNER)
            seen = json.loads(await board.whole())
            rows = {kind: {row["id"]: row for row in seen[kind]} for kind in ("nodes", "jobs", "pools", "groups")}
            following = board.follow(seen["board"], seen["seq"], tick_s=20)
            await api.submit(job("a", gpu=1000))
            await api.until_job("a", "RUNNING")
            await api.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
            await api.until_job("a", "CANCELLED")
            states: list[str] = []
            while not states or states[-1] != "CANCELLED" or rows["nodes"]["n1"]["used"]:
                delta = _data(await anext(following))
                for kind, known in rows.items():
                    known.update({row["id"]: row for row in delta.get(kind, [])})
                    for gone in delta.get("gone", {}).get(kind, []):
                        del known[gone]
                states += [row["state"] for row in delta.get("jobs", [])]
            again = json.loads(await board.whole())
        for kind in ("nodes", "jobs", "groups"):
            assert rows[kind] == {row["id"]: row for row in again[kind]}

    async def test_a_reader_that_comes_back_goes_on_and_one_that_stayed_away_too_long_begins_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("callboard.controller.page.board.KEPT", 3)
        async with served(tmp_path) as (controller, api):
            board = Boards(controller.driver, controller.events, most_readers=4).of(OWNER)
            begun = json.loads(await board.whole())
            for number in range(6):
                await api.pools.CreatePool(pool(f"p{number}"))
                while board.seq < number + 1:
                    await anext(board.follow(begun["board"], board.seq, tick_s=20))
            recent = _data(await anext(board.follow(begun["board"], board.seq - 2, tick_s=20)))
            assert recent["seq"] == board.seq - 1
            assert b"reset" in await anext(board.follow(begun["board"], begun["seq"], tick_s=20))
            assert b"reset" in await anext(board.follow("another", board.seq, tick_s=20))

    async def test_a_trainer_sees_of_other_pools_how_much_they_hold_and_no_names(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, api), FakeAgent(controller.address, "n1", gpus=2):
            await api.pools.CreatePool(pool("mine", members=["ana"]))
            await api.pools.CreatePool(pool("theirs"))
            await api.submit(job("own", gpu=1000, pool="mine"))
            await api.submit(job("secret", gpu=1000, pool="theirs"))
            await api.until_job("secret", "RUNNING")
            await api.until_job("own", "RUNNING")
            visitor = Visitor(controller.page_address)
            about = await visitor.log_in(token_of(controller, "ana", Role.TRAINER))
            shown = await visitor.board()
            status, refused = await visitor.call("JobService", "CancelJob", name="jobs/secret")
            assert (await visitor.call("JobService", "GetJob", name="jobs/own"))[0] == 200
            assert (await visitor.call("NodeService", "DrainNode", name="nodes/n1"))[0] == 403
        assert about["trainer"]
        assert "CancelJob" in about["may"]
        assert "DrainNode" not in about["may"]
        assert [row["name"] for row in shown["jobs"]] == ["own"]
        assert "secret" not in json.dumps(shown)
        assert sorted(device[0] for device in shown["nodes"][0]["devices"]) == [1000, 1000]
        assert sum(len(device) - 3 for device in shown["nodes"][0]["devices"]) == 1
        assert shown["groups"] == []
        assert (status, refused["code"]) == (403, "PERMISSION_DENIED")

    async def test_only_so_many_browsers_follow_it(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, _):
            boards = Boards(controller.driver, controller.events, most_readers=1)
            board = boards.of(OWNER)
            with boards.reading(board), pytest.raises(LimitReached, match="page_streams"), boards.reading(board):
                pass
            with boards.reading(board):
                pass

    async def test_a_defect_in_a_row_does_not_end_the_board(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served(tmp_path) as (controller, api):
            board = Boards(controller.driver, controller.events, most_readers=1).of(OWNER)
            await board.whole()
            right, failed = Board._row, asyncio.Event()

            def wrong(self: Board, kind: str, key: Any) -> Any:
                if not failed.is_set():
                    failed.set()
                    raise KeyError(key)
                return right(self, kind, key)

            monkeypatch.setattr(Board, "_row", wrong)
            await api.pools.CreatePool(pool("p"))
            await failed.wait()
            while [row["id"] for row in json.loads(await board.whole())["pools"]] != ["p"]:
                await anext(board.follow(board.id, board.seq, tick_s=0.1))


class TestLogin:
    async def test_nothing_is_shown_or_done_without_a_token(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, _):
            visitor = Visitor(controller.page_address)
            assert (await visitor.ask("/api/me"))[1]["name"] == ""
            for path in ("/api/board", "/api/stream?from=x-1", "/api/output?job=a"):
                status, refused = await visitor.ask(path)
                assert (status, refused["code"]) == (401, "UNAUTHENTICATED"), path
            assert (await visitor.call("JobService", "CancelJob", name="jobs/a"))[0] == 401
            assert (await visitor.ask("/api/login", {"token": "cb_wrong_wrong_wrong"}))[0] == 401
            assert "set-cookie" not in visitor.headers

    async def test_the_cookie_is_the_browsers_alone_and_ends_with_its_token(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, _):
            visitor = Visitor(controller.page_address)
            token = token_of(controller, "bo", Role.VIEWER)
            await visitor.log_in(token)
            said = visitor.headers["set-cookie"].lower()
            assert "httponly" in said
            assert "samesite=strict" in said
            assert token not in said
            assert (await visitor.ask("/api/board"))[0] == 200
            assert (await visitor.call("JobService", "CancelJob", name="jobs/a"))[0] == 403
            revoke(controller.options.state_dir, "bo")
            controller.access.look_again()
            assert (await visitor.ask("/api/board"))[0] == 401

    async def test_what_is_done_is_written_down_with_who_and_from_where(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, api), FakeAgent(controller.address, "n1"):
            visitor = Visitor(controller.page_address)
            await visitor.log_in(token_of(controller, "olga", Role.OPERATOR))
            assert (await visitor.call("NodeService", "CordonNode", name="nodes/n1"))[0] == 200
            node = (await api.nodes.GetNode(node_pb2.GetNodeRequest(name="nodes/n1"))).node
            (entry,) = (await api.scheduler.ListAudit(scheduler_pb2.ListAuditRequest(who="olga"))).entries
        assert node.state == node_pb2.NODE_STATE_CORDONED
        assert (entry.method, entry.subject, entry.code) == ("CordonNode", "nodes/n1", "OK")
        assert entry.peer.startswith("ipv4:127.0.0.1:")

    async def test_an_open_page_is_read_by_everybody_and_changed_by_nobody(self, tmp_path: Path) -> None:
        async with served(tmp_path, page_open=True) as (controller, _):
            visitor = Visitor(controller.page_address)
            assert (await visitor.ask("/api/me"))[1]["role"] == "viewer"
            assert (await visitor.ask("/api/board"))[0] == 200
            assert (await visitor.call("NodeService", "CordonNode", name="nodes/n1"))[0] == 403

    async def test_se_02_another_site_gets_nothing(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, _):
            visitor = Visitor(controller.page_address)
            await visitor.log_in(controller.access.token)
            request: dict[str, Any] = {"name": "jobs/a"}
            cancel = "/api/call/JobService/CancelJob"
            assert (await visitor.ask(cancel, request, Origin="https://evil.example"))[0] == 403
            assert (await visitor.ask(cancel, request, X_Callboard_Page=""))[0] == 403
            assert (await visitor.ask("/api/board", Sec_Fetch_Site="cross-site"))[0] == 403
            assert (await visitor.ask("/", Host="evil.example:8780"))[0] == 421
            assert (await visitor.ask("/api/call/PoolService/DeletePool", request))[0] == 404
            status, _ = await visitor.ask("/")
            assert status == 200
            policy = visitor.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy

    async def test_where_there_are_certificates_it_is_served_by_tls_alone(self, tmp_path: Path) -> None:
        certificates.make_authority(tmp_path / "state" / "certs", ["10.1.2.3"])
        async with running(options_for(tmp_path, page="127.0.0.1:0")) as controller:
            assert controller.page_address.startswith("https://127.0.0.1:")
            trusts = ssl.create_default_context(cafile=str(controller.options.certs / "ca.pem"))
            visitor = Visitor(controller.page_address, trusts=trusts)
            await visitor.log_in(controller.access.token)
            assert "secure" in visitor.headers["set-cookie"].lower()
            assert (await visitor.board())["jobs"] == []
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                await Visitor(controller.page_address, trusts=ssl.create_default_context()).ask("/")
            made = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "callboard.cli", "page", "--controller", controller.address),
                stdout=asyncio.subprocess.PIPE,
            )
            printed, _ = await made.communicate()
        assert printed.decode().startswith(f"{controller.page_address}/#login=")

    async def test_requests_are_bounded_and_typed(self, tmp_path: Path) -> None:
        async with served(tmp_path) as (controller, _):
            visitor = Visitor(controller.page_address)
            await visitor.log_in(controller.access.token)
            for body in ([1], {"nam": "jobs/a"}, {"name": 7}, {"name": "x" * 70_000}):
                status, refused = await visitor.ask("/api/call/JobService/GetJob", body)
                assert (status, refused["code"]) == (400, "INVALID_ARGUMENT"), body
            assert (await visitor.ask("/api/output?job=a&rank=minus"))[0] == 400
            assert (await visitor.ask("/static/..%2f..%2fapp.py"))[0] == 404

    def test_a_link_logs_in_once_and_not_for_long(self, tmp_path: Path) -> None:
        now_s, wall_s = [0.0], [1e9]
        access = Access(tmp_path, insecure=False)
        access.open()
        logins = Logins(access, is_open=False, now_s=lambda: now_s[0], wall_s=lambda: wall_s[0])
        code = logins.new_code(access.token)
        cookie, who = logins.redeem(code)
        assert who == OWNER == logins.who(cookie)
        with pytest.raises(NotAuthenticated, match="once"):
            logins.redeem(code)
        late = logins.new_code(access.token)
        now_s[0] += CODE_LASTS_S + 1
        with pytest.raises(NotAuthenticated, match="callboard page"):
            logins.redeem(late)
        wall_s[0] += LASTS_S + 1
        with pytest.raises(NotAuthenticated):
            logins.who(cookie)
        with pytest.raises(NotAuthenticated):
            logins.who(cookie[:-4] + "AAAA")

    def test_agents_do_not_read_it_and_logins_are_counted(self, tmp_path: Path) -> None:
        access = Access(tmp_path, insecure=False)
        access.open()
        token = grant(tmp_path, "n1", Role.AGENT)
        logins = Logins(access, is_open=False, now_s=lambda: 0.0)
        with pytest.raises(NotAllowed, match="agent"):
            logins.log_in(token)
        refused = []
        for _ in range(40):
            with pytest.raises((NotAuthenticated, LimitReached)) as caught:
                logins.log_in("cb_nobody_nobody_nobody")
            refused.append(caught.type)
        assert refused[0] is NotAuthenticated
        assert refused[-1] is LimitReached

    @pytest.mark.parametrize(
        ("host", "known"),
        [
            ("127.0.0.1:8780", True),
            ("[::1]:8780", True),
            ("10.1.2.3", True),
            ("localhost:8780", True),
            ("Board.Example:8780", True),
            ("evil.example", False),
            ("127.0.0.1.evil.example:8780", False),
            ("", False),
        ],
    )
    def test_it_answers_to_its_own_names(self, host: str, known: bool) -> None:
        assert Hosts(("board.example",)).knows(host) is known

    def test_a_program_without_headers_of_a_browser_may_read(self) -> None:
        assert is_foreign({"host": "a:1"}, changes=False) == ""
        assert is_foreign({"host": "a:1", "origin": "http://a:1", "x-callboard-page": "1"}, changes=True) == ""
        assert is_foreign({"host": "a:1", "origin": "http://a:2", "x-callboard-page": "1"}, changes=True)
        assert is_foreign({"host": "a:1", "origin": "null"}, changes=False)


def test_every_row_of_the_page_is_for_roles_that_may_read_the_lists() -> None:
    """The stream is under the rules of Watch; whoever may watch may list what the rows are made of."""
    from callboard.security.caller_roles import ROLES

    watch = ROLES["/callboard.v1.EventService/Watch"]
    for method in (
        "NodeService/ListNodes",
        "JobService/ListJobs",
        "PoolService/ListPools",
        "SchedulerService/GetStats",
    ):
        assert watch <= ROLES[f"/callboard.v1.{method}"]
    readers = ROLES["/callboard.v1.PlacementGroupService/ListPlacementGroups"]
    assert all(role in readers or Identity("x", role).in_pools_only for role in watch)


def _data(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.decode().partition("data: ")[2])
    return found


async def test_a_browser_that_takes_nothing_is_dropped_and_gives_its_place_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_app, "STALLED_S", 0.3)
    async with served(tmp_path, limits=Limits(page_streams=1)) as (controller, _):
        visitor = Visitor(controller.page_address)
        await visitor.log_in(controller.access.token)
        shown = await visitor.board()
        host, _, port = controller.page_address.removeprefix("http://").partition(":")
        with socket.socket() as stalled:
            # It reads until it has its place, and then no more.
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stalled, (host, int(port)))
            where = f"/api/stream?from={shown['board']}-{shown['seq']}"
            asked = f"GET {where} HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {visitor.cookie}\r\n\r\n"
            await loop.sock_sendall(stalled, asked.encode())
            answer = b""
            while b"retry: " not in answer:
                answer += await loop.sock_recv(stalled, 1)
            crowd = Crowd(controller)
            await crowd.nodes(1)
            await crowd.fill(0, gpus=0)
            wide: Any = {"workers": 1, "ask": {"cpu": 1}, "labels": tuple((f"l{n}", "x" * 60) for n in range(30))}
            refused = 0
            while (status := await _status(visitor)) != 200:
                assert status == 429
                refused += 1
                await asyncio.gather(*(crowd.job(pool="batch", **wide) for _ in range(100)))
            assert refused, "it had the only place"


async def _status(visitor: Visitor) -> int:
    return await asyncio.to_thread(_status_of_stream, visitor)


def _status_of_stream(visitor: Visitor) -> int:
    request = urllib.request.Request(f"{visitor.address}/api/stream", headers={"Cookie": visitor.cookie})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_page_that_can_not_be_loaded_is_named_nowhere_and_the_controller_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "callboard.controller.page.server", None)  # importing it fails
    async with running(options_for(tmp_path, page="127.0.0.1:0")) as controller, api_at(controller.address) as api:
        assert controller._page_loading is not None
        await asyncio.wait({controller._page_loading})
        stats = (await api.scheduler.GetStats(scheduler_pb2.GetStatsRequest())).stats
        assert (stats.page_address, controller.page_address) == ("", "")
