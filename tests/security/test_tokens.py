"""A token is made with the first start, kept from others, and found by the programs of the same account."""

from __future__ import annotations

import asyncio
import hmac
import os
import stat
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callboard.client.client import Client
from callboard.client.sync import SyncClient
from callboard.controller.journal.state_dir import StoreFailed
from callboard.controller.server import SERVICES, Controller, serve_controller
from callboard.security import access as access_module
from callboard.security.access import LOOK_EVERY_S, Access, bearer_of
from callboard.security.caller_roles import OWNER, Role
from callboard.security.grants import grant
from callboard.security.places import UnsafeFile, account_directory, read_private, write_private
from callboard.security.tokens import (
    REGISTRY,
    TOKEN_NAME,
    BadToken,
    Registration,
    controller_token,
    find_token,
    new_token,
    registered_token,
    same,
    tidy,
)
from callboard.wire.errors import parse_error
from callboard.wire.refusals import ErrorReason, NotAuthenticated
from tests.controller.support import options_for, running
from tests.controller.test_metrics import get
from tests.support.controller_process import ControllerProcess
from tests.support.fake_agent import FakeAgent

ROOT = Path(__file__).parents[2]

METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


async def refusal(channel: Any, path: str, streams: bool, streamed: bool, *, token: str = "") -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    if streams:
        # Without a message: grpc.aio's client would hide the status when the stream ends before it has sent one.
        call = channel.stream_stream(path)(timeout=30, metadata=metadata)
    elif streamed:
        call = channel.unary_stream(path)(b"", timeout=30, metadata=metadata)
    else:
        call = channel.unary_unary(path)(b"", timeout=30, metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if streamed else call)
    return parse_error(caught.value)


class TestTheServer:
    async def test_every_method_refuses_a_call_without_the_token_or_with_a_wrong_one(self, tmp_path: Path) -> None:
        assert len(METHODS) > 30
        async with (
            running(options_for(tmp_path)) as controller,
            grpc.aio.insecure_channel(controller.address) as channel,
        ):
            before = controller.driver.state.meta.revision
            almost = controller.access.token[:-1] + ("A" if controller.access.token[-1] != "A" else "B")
            for path, streams, streamed in METHODS:
                for token in ("", new_token(), almost, "x", "y" * 2000):
                    error = await refusal(channel, path, streams, streamed, token=token)
                    assert (error.code, error.reason) == ("UNAUTHENTICATED", ErrorReason.NOT_AUTHENTICATED), path
                    assert "CALLBOARD_TOKEN_FILE" in error.message, "it says what to do"
            assert controller.driver.state.meta.revision == before

    async def test_a_probe_needs_no_token(self, tmp_path: Path) -> None:
        async with (
            running(options_for(tmp_path)) as controller,
            grpc.aio.insecure_channel(controller.address) as channel,
        ):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    async def test_what_a_stranger_sends_is_not_decoded(self, tmp_path: Path) -> None:
        """So that a stranger's bytes cost nothing and are no way in."""
        async with (
            running(options_for(tmp_path)) as controller,
            grpc.aio.insecure_channel(controller.address) as channel,
        ):
            call: Any = channel.unary_unary("/callboard.v1.JobService/SubmitJob")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff" * 1000)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_insecure_takes_everybody_and_warns_at_each_start(self, tmp_path: Path) -> None:
        for _ in range(2):
            listening = asyncio.Event()
            found: list[str] = []

            def heard(address: str, found: list[str] = found, listening: asyncio.Event = listening) -> None:
                found.append(address)
                listening.set()

            with structlog.testing.capture_logs() as lines:
                options = options_for(tmp_path, insecure=True, metrics="127.0.0.1:0")
                served = asyncio.create_task(serve_controller(options, heard))
                await listening.wait()
                async with grpc.aio.insecure_channel(found[0]) as channel:
                    call: Any = channel.unary_unary("/callboard.v1.SchedulerService/GetStats")
                    assert await call(b"")
                os.kill(os.getpid(), 15)
                assert await served == 0
            assert any("INSECURE" in line["event"] and line["log_level"] == "warning" for line in lines)
            assert not (tmp_path / "state" / TOKEN_NAME).exists()

    async def test_the_figures_are_for_callers_with_the_token_unless_they_are_opened(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path, metrics="127.0.0.1:0")) as controller:
            for page in ("metrics", "demand", "nothing"):
                url = f"http://{controller.metrics.address}/{page}"
                for token in ("", new_token()):
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        await asyncio.to_thread(get, url, token)
                    assert refused.value.code == 401
                    assert "--metrics-open" in refused.value.read().decode()
                    refused.value.close()
            url = f"http://{controller.metrics.address}/metrics"
            assert "callboard_jobs" in await asyncio.to_thread(get, url, controller.access.token)
        async with running(options_for(tmp_path, metrics="127.0.0.1:0", metrics_open=True)) as controller:
            assert "callboard_jobs" in await asyncio.to_thread(get, f"http://{controller.metrics.address}/metrics")

    async def test_a_token_file_that_others_can_read_ends_the_start(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)):
            pass
        (tmp_path / "state" / TOKEN_NAME).chmod(0o644)
        with pytest.raises(StoreFailed, match="others can read"):
            await Controller(options_for(tmp_path)).start()


class TestFinding:
    async def test_every_program_of_the_account_finds_the_token_by_itself(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Clients of both kinds, the command line and agents; also where a variable leads elsewhere."""
        async with running(options_for(tmp_path)) as controller:
            for directory in (os.environ["CALLBOARD_RUN_DIR"], str(tmp_path / "elsewhere")):
                monkeypatch.setenv("CALLBOARD_RUN_DIR", directory)
                async with Client(controller.address) as client:
                    await client.stats()

                def synchronous() -> None:
                    with SyncClient(controller.address) as client:
                        client.stats()

                await asyncio.to_thread(synchronous)
                async with FakeAgent(controller.address, "n1") as agent:
                    await agent.goodbye()
                shown = await asyncio.to_thread(
                    subprocess.run,
                    [sys.executable, "-m", "callboard.cli", "status", "--controller", controller.address],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert shown.returncode == 0, shown.stderr

    async def test_the_token_outlives_the_controller_and_is_private(self, tmp_path: Path, run_dir: Path) -> None:
        async with running(options_for(tmp_path)) as first:
            token, address = first.access.token, first.address
            path = tmp_path / "state" / TOKEN_NAME
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for base in (run_dir, account_directory()):
                assert stat.S_IMODE((base / REGISTRY).stat().st_mode) == 0o700
                assert stat.S_IMODE((base / REGISTRY / address).stat().st_mode) == 0o600
            async with Client(address, timeout=30) as client:
                await client.stats()
        assert registered_token(address) == ""
        assert not (run_dir / REGISTRY).exists(), "a clean stop leaves nothing"
        async with running(options_for(tmp_path, listen=address)) as second:
            assert second.access.token == token

    async def test_a_client_goes_on_after_a_controller_with_another_token_took_over(self, tmp_path: Path) -> None:
        async with running(options_for(tmp_path)) as first:
            address = first.address
            client = Client(address)
            await client.stats()
        async with running(options_for(tmp_path / "other", listen=address)) as second, client:
            assert second.access.token != first.access.token
            await client.stats()
            async for _event in client.watch(start_revision=1):
                break

    async def test_the_registration_of_a_controller_that_crashed_is_not_believed(
        self, tmp_path: Path, run_dir: Path
    ) -> None:
        """Whoever listens at its port now is somebody else, and must not be sent the token."""
        async with ControllerProcess(tmp_path) as process:
            assert registered_token(process.address)
            await process.kill()
            assert registered_token(process.address) == ""
            assert (run_dir / REGISTRY / process.address).exists()
            tidy(run_dir)
            assert not (run_dir / REGISTRY).exists()
            await process.start()
            assert registered_token(process.address) == controller_token(tmp_path)

    def test_what_listens_everywhere_is_found_by_its_loopback_addresses(self) -> None:
        token = new_token()
        registration = Registration("0.0.0.0:65001", token)
        try:
            for host in ("127.0.0.1", "[::1]", "localhost"):
                assert registered_token(f"{host}:65001") == token
            assert registered_token("10.0.0.1:65001") == "", "a token is sent nowhere else"
            assert registered_token("127.0.0.1:65002") == ""
        finally:
            registration.close()

    def test_a_stated_token_comes_first(self, tmp_path: Path) -> None:
        here, there, stated = new_token(), new_token(), new_token()
        write_private(tmp_path / "one", here)
        write_private(tmp_path / "two", there)
        environ = {"CALLBOARD_TOKEN_FILE": str(tmp_path / "two"), "CALLBOARD_TOKEN": stated}
        assert find_token("a:1", tmp_path / "one", environ) == here
        assert find_token("a:1", None, environ) == there
        assert find_token("a:1", None, {"CALLBOARD_TOKEN": stated + "\n"}) == stated
        assert find_token("a:1", None, {}) == ""

    @pytest.mark.parametrize("content", ["", "short", "two words of a token", "x" * 5000, "ü" * 30, "a" * (1 << 17)])
    def test_what_is_no_token_is_refused_before_it_is_sent(self, content: str, tmp_path: Path) -> None:
        write_private(tmp_path / "token", content)
        with pytest.raises(BadToken):
            find_token("a:1", tmp_path / "token")
        if content:
            with pytest.raises(BadToken):
                find_token("a:1", None, {"CALLBOARD_TOKEN": content})

    def test_a_token_file_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        write_private(tmp_path / "token", new_token())
        (tmp_path / "token").chmod(0o640)
        with pytest.raises(BadToken, match="chmod 600"):
            find_token("a:1", tmp_path / "token")
        with pytest.raises(BadToken, match="can't be read"):
            find_token("a:1", tmp_path / "missing")
        with pytest.raises(BadToken, match="plain file"):
            find_token("a:1", tmp_path)

    def test_a_directory_that_others_can_write_to_gets_no_token(self, run_dir: Path) -> None:
        run_dir.mkdir()
        run_dir.chmod(0o777)
        registration = Registration("127.0.0.1:65003", new_token())
        try:
            assert any("written by others" in why for why in registration.refused)
            assert not (run_dir / REGISTRY).exists()
        finally:
            registration.close()


def admits(access: Access, token: str) -> bool:
    try:
        return access.identify((("authorization", f"Bearer {token}"),)) == OWNER
    except NotAuthenticated:
        return False


class TestComparing:
    def test_tokens_are_compared_in_constant_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compared: list[tuple[bytes, bytes]] = []

        def compare(one: bytes, other: bytes) -> bool:
            compared.append((one, other))
            return one == other

        monkeypatch.setattr(hmac, "compare_digest", compare)
        assert not same("one", "other")
        access = Access(tmp_path, insecure=False)
        access.open()
        assert admits(access, access.token)
        assert not admits(access, "another-token-here")
        assert [other for _, other in compared[1:]] == [access.token.encode()] * 2

    def test_a_rotated_token_counts_without_a_restart_and_the_old_one_no_longer(self, tmp_path: Path) -> None:
        now_s = 100.0
        access = Access(tmp_path, insecure=False, now_s=lambda: now_s)
        access.open()
        old, new = access.token, new_token()
        write_private(tmp_path / TOKEN_NAME, new)
        assert admits(access, old), "not looked at again so soon"
        now_s += LOOK_EVERY_S
        assert admits(access, new)
        assert not admits(access, old)
        (tmp_path / TOKEN_NAME).write_text("broken")
        now_s += LOOK_EVERY_S
        assert admits(access, new), "a broken file leaves the last good token"
        assert access.trouble

    def test_a_token_that_was_made_just_now_counts_at_once(self, tmp_path: Path) -> None:
        access = Access(tmp_path, insecure=False, now_s=lambda: 100.0)
        access.open()
        assert not admits(access, "cb_" + "w" * 43)
        token = grant(tmp_path, "olga", Role.VIEWER)
        assert access.identify((("authorization", f"Bearer {token}"),)).name == "olga"

    async def test_a_client_follows_a_rotation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
        shown = tmp_path / "shown"
        async with running(options_for(tmp_path)) as controller:
            write_private(shown, controller.access.token)
            monkeypatch.setenv("CALLBOARD_TOKEN_FILE", str(shown))
            async with Client(controller.address) as client:
                await client.stats()
                rotated = new_token()
                write_private(tmp_path / "state" / TOKEN_NAME, rotated)
                with pytest.raises(NotAuthenticated, match="no longer"):
                    await client.stats()
                write_private(shown, rotated)
                await client.stats()

    @pytest.mark.parametrize(
        ("header", "token"), [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("", ""), ("abc", "")]
    )
    def test_the_header_is_that_of_bearer_tokens(self, header: str, token: str) -> None:
        assert bearer_of(header) == token

    def test_a_private_file_is_replaced_as_a_whole_and_never_readable(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            write_private(tmp_path / "secret", "one")
            write_private(tmp_path / "secret", "two")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
        assert read_private(tmp_path / "secret") == "two"
        assert os.listdir(tmp_path) == ["secret"]  # noqa: PTH208 - hidden files count
        (tmp_path / "secret").chmod(0o604)
        with pytest.raises(UnsafeFile):
            read_private(tmp_path / "secret")
