"""Certificates and TLS on real sockets: who gets in, as whom, and how that ends without a restart."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from callboard.client.client import Client
from callboard.client.errors import Unreachable
from callboard.client.sync import SyncClient
from callboard.controller import server as server_module
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from callboard.model.options import OptionError
from callboard.security import access as access_module
from callboard.security import certificates
from callboard.security.caller_roles import Role
from callboard.security.dialing import open_channel
from callboard.security.grants import grant, revoke
from callboard.security.issued import BadCertificate
from callboard.security.places import TLS_VARIABLES, UnsafeFile, make_private
from callboard.security.tls import TlsFiles
from callboard.security.tokens import BadToken
from callboard.v1 import event_pb2, event_pb2_grpc
from callboard.wire.errors import parse_error
from callboard.wire.refusals import NotAllowed, NotAuthenticated
from tests.controller.support import options_for, running
from tests.support.fake_agent import FakeAgent


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation counts at once."""
    monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(server_module, "LOOK_EVERY_S", 0.05)


@asynccontextmanager
async def with_tls(directory: Path, **fields: Any) -> AsyncIterator[Controller]:
    """A controller that finds certificates in its state directory."""
    certificates.make_authority(directory / "state" / "certs", ["10.1.2.3"])
    async with running(options_for(directory, **fields)) as controller:
        yield controller


def shown(monkeypatch: pytest.MonkeyPatch, folder: Path | None, *, only_ca: bool = False) -> None:
    """From now on, programs connect with the certificate of a folder."""
    for part, name in {"ca": "ca.pem", "cert": "cert.pem", "key": "cert.key"}.items():
        if folder is None or (only_ca and part != "ca"):
            monkeypatch.delenv(TLS_VARIABLES[part], raising=False)
        else:
            monkeypatch.setenv(TLS_VARIABLES[part], str(folder / name))


def files(folder: Path) -> TlsFiles:
    """What a certificate and its authority are in."""
    return TlsFiles(*(folder / name for name in ("ca.pem", "cert.pem", "cert.key")))


def issued(controller: Controller, directory: Path, name: str, role: Role) -> Path:
    folder = directory / name
    certificates.issue(controller.options.certs, name, role, folder)
    return folder


@asynccontextmanager
async def somewhere_else(monkeypatch: pytest.MonkeyPatch, directory: Path) -> AsyncIterator[None]:
    """A program that finds no token of a controller of this account."""
    with monkeypatch.context() as patched:
        patched.setenv("CALLBOARD_RUN_DIR", str(directory / "elsewhere"))
        patched.setattr("callboard.security.tokens.account_directory", lambda: directory / "elsewhere")
        yield


async def ended(watch: Any) -> grpc.StatusCode:
    """How a stream ends that is open."""
    try:
        while await watch.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_certificate_says_who_calls_and_in_which_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        shown(monkeypatch, issued(controller, tmp_path, "olga", Role.OPERATOR))
        async with Client(controller.address) as client:
            await client.create_pool({"name": "a"})
            assert [(each.who, each.role) for each in controller.audit.newest(1)] == [("olga", "operator")]
        shown(monkeypatch, issued(controller, tmp_path, "vera", Role.VIEWER))
        async with Client(controller.address) as client:
            assert [pool.name for pool in await client.list_pools()] == ["pools/a"]
            with pytest.raises(NotAllowed, match="vera"):
                await client.create_pool({"name": "b"})


async def test_who_shows_no_certificate_gets_in_only_by_the_other_port_and_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        token = grant(controller.options.state_dir, "bob", Role.VIEWER)
        shown(monkeypatch, controller.options.certs, only_ca=True)
        monkeypatch.setenv("CALLBOARD_TOKEN", token)
        async with open_channel(controller.address) as channel:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.channel_ready(), 1)
        async with Client(controller.tokens_at) as client:
            assert await client.list_pools() == []
        monkeypatch.delenv("CALLBOARD_TOKEN")
        async with Client(controller.tokens_at) as client:
            with pytest.raises(NotAuthenticated):
                await client.list_pools()


async def test_programs_of_the_account_connect_without_being_told_how(tmp_path: Path) -> None:
    async with with_tls(tmp_path) as controller, Client(controller.address) as client:
        await client.create_pool({"name": "a"})
        assert controller.audit.newest(1)[0].who == "owner"


@pytest.mark.parametrize("how", ["a certificate", "a token"])
async def test_a_stream_ends_when_what_it_showed_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        state = controller.options.state_dir
        if how == "a token":
            shown(monkeypatch, controller.options.certs, only_ca=True)
            monkeypatch.setenv("CALLBOARD_TOKEN", grant(state, "eve", Role.VIEWER))
        else:
            shown(monkeypatch, issued(controller, tmp_path, "eve", Role.VIEWER))
        address = controller.tokens_at if how == "a token" else controller.address
        async with open_channel(address) as channel:
            watch: Any = event_pb2_grpc.EventServiceStub(channel).Watch(event_pb2.WatchRequest(start_revision=1))
            assert (await watch.read()).revision, "it is open"
            if how == "a token":
                revoke(state, "eve")
            else:
                certificates.revoke(controller.options.certs, "eve")
            assert await ended(watch) is grpc.StatusCode.UNAUTHENTICATED
            again: Any = event_pb2_grpc.EventServiceStub(channel).Watch(event_pb2.WatchRequest(start_revision=1))
            assert await ended(again) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_session_of_a_revoked_agent_ends_and_a_certificate_is_for_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        shown(monkeypatch, issued(controller, tmp_path, "n1", Role.AGENT))
        other = FakeAgent(controller.address, "n2")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.join()
        await other.cut()
        assert (parse_error(caught.value).code, "node n1" in parse_error(caught.value).message) == (
            "PERMISSION_DENIED",
            True,
        )
        async with FakeAgent(controller.address, "n1") as agent:
            certificates.revoke(controller.options.certs, "n1")
            assert await agent.over() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_goes_on_with_a_renewed_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        certs = controller.options.certs
        shown(monkeypatch, issued(controller, tmp_path, "olga", Role.OPERATOR))
        async with Client(controller.address) as client:
            assert await client.list_pools() == []
            certificates.revoke(certs, "olga")
            with pytest.raises(NotAuthenticated, match=r"was revoked.*`callboard certs client`"):
                await client.list_pools()
            with pytest.raises(BadCertificate, match="olga was revoked; `callboard certs client` makes a new"):
                certificates.renew(certs, "olga")
            certificates.issue(certs, "olga", Role.OPERATOR, tmp_path / "olga")
            assert await client.list_pools() == []


async def test_a_client_that_waits_connects_once_its_certificate_is_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.make_authority(tmp_path / "another", [])
    certificates.issue(tmp_path / "another", "olga", Role.OPERATOR, tmp_path / "olga")
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        shown(monkeypatch, tmp_path / "olga")
        async with Client(controller.address, retry=30) as client:
            waiting = asyncio.create_task(client.list_pools())
            done, _ = await asyncio.wait({waiting}, timeout=0.5)
            assert not done
            certificates.issue(controller.options.certs, "olga", Role.OPERATOR, tmp_path / "olga")
            assert await waiting == []


async def test_the_controller_shows_its_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    async with with_tls(tmp_path, metrics="127.0.0.1:0") as controller:
        certs = controller.options.certs
        ports = [int(each.rpartition(":")[2]) for each in (controller.tokens_at, controller.metrics.address)]

        async def seen() -> list[str]:
            return [await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port)) for port in ports]

        before = (certs / "server.pem").read_text()
        assert [each.strip() for each in await seen()] == [before.strip()] * 2
        for _ in range(5):  # and no connection that begins meanwhile is refused
            certificates.renew(certs, "server")
            after = (certs / "server.pem").read_text().strip()
            assert after != before.strip()
            while {each.strip() for both in await asyncio.gather(*(seen() for _ in range(4))) for each in both} != {
                after
            }:
                pass
        (certs / "server.pem").write_text("broken")
        async with Client(controller.address) as client:
            assert await client.list_pools() == [], "what was read before still counts"


async def test_the_authority_is_renewed_without_a_restart_and_nobody_is_shut_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tls(tmp_path) as controller:
        async with somewhere_else(monkeypatch, tmp_path):
            await _renewed_and_retired(controller, tmp_path)
        async with Client(controller.address) as own:
            assert await own.list_pools() == []


async def _renewed_and_retired(controller: Controller, tmp_path: Path) -> None:
    certs = controller.options.certs

    async def answered(folder: Path) -> bool:
        async with Client(controller.address, tls=files(folder), retry=0, timeout=20) as client:
            return await client.list_pools() == []

    olga = issued(controller, tmp_path, "olga", Role.OPERATOR)
    async with Client(controller.address, tls=files(olga)) as connected:
        assert await connected.list_pools() == []
        certificates.renew_authority(certs)
        vera = issued(controller, tmp_path, "vera", Role.VIEWER)
        assert await connected.list_pools() == []
        assert await answered(olga), "of the old authority"
        assert await answered(vera), "of the new one; the controller shows a certificate of the old one"
        with pytest.raises(BadCertificate, match=r"olga, server; renew"):
            certificates.retire_authority(certs)
        old = tmp_path / "old"
        shutil.copytree(olga, old)
        certificates.renew(certs, "olga")
        certificates.renew(certs, "server")
        assert await connected.list_pools() == []
        assert await answered(olga)
        assert await answered(vera)
        assert certificates.retire_authority(certs) == 1
        assert certificates.retire_authority(certs) == 0
        assert await answered(olga)
        assert await answered(vera)
        for ca in (old, olga):  # It trusts the controller, or not any more: it is refused either way.
            parts = files(old)._replace(ca=ca / "ca.pem")
            async with Client(controller.address, tls=parts, retry=0, timeout=5) as client:
                with pytest.raises(Unreachable):
                    await client.list_pools()


async def test_a_program_states_certificate_or_token_and_what_the_environment_says_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        vera = issued(controller, tmp_path, "vera", Role.VIEWER)
        monkeypatch.setenv("CALLBOARD_TOKEN", grant(controller.options.state_dir, "olga", Role.OPERATOR))
        async with Client(controller.address, tls=files(vera)) as client:
            with pytest.raises(NotAllowed, match="vera"):
                await client.ensure_pool("a")
        token = tmp_path / "token"
        token.write_text(grant(controller.options.state_dir, "tom", Role.VIEWER))
        token.chmod(0o600)
        only_ca = TlsFiles(ca=vera / "ca.pem")
        async with Client(controller.tokens_at, tls=only_ca, token_file=token) as client:
            with pytest.raises(NotAllowed, match="tom"):
                await client.ensure_pool("a")
        with await asyncio.to_thread(SyncClient, controller.tokens_at, tls=only_ca, token_file=token) as blocking:
            assert await asyncio.to_thread(blocking.list_pools) == []
        with pytest.raises(BadToken, match="can't be read"):
            Client(controller.address, tls=TlsFiles(ca=tmp_path / "nowhere"))


async def test_agents_of_several_nodes_join_by_tls_with_one_token_and_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_tls(tmp_path) as controller, somewhere_else(monkeypatch, tmp_path):
        monkeypatch.setenv(TLS_VARIABLES["ca"], str(controller.options.certs / "ca.pem"))
        monkeypatch.setenv("CALLBOARD_TOKEN", grant(controller.options.state_dir, "agents", Role.AGENT))
        for node in ("callboard-head-0", "callboard-agent-3"):
            async with FakeAgent(controller.tokens_at, node) as agent:
                assert agent.welcome.epoch


async def test_figures_are_read_by_tls_with_a_token(tmp_path: Path) -> None:
    async with with_tls(tmp_path, metrics="127.0.0.1:0") as controller:
        trust = ssl.create_default_context(cafile=str(controller.options.certs / "ca.pem"))
        asked = urllib.request.Request(
            f"https://{controller.metrics.address}/metrics",
            headers={"Authorization": f"Bearer {controller.access.token}"},
        )

        def read() -> bytes:
            with urllib.request.urlopen(asked, context=trust, timeout=20) as answer:
                return bytes(answer.read())

        assert b"callboard_" in await asyncio.to_thread(read)


async def test_a_token_is_not_sent_to_another_machine_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_channel("10.255.255.1:7700", find=lambda _: "cb_" + "x" * 43) as channel:
        with pytest.raises(BadToken, match="readable on the way"):
            channel.unary_unary("/a.B/C")(b"")


def test_without_certificates_no_other_machine_is_listened_to(tmp_path: Path) -> None:
    for fields in ({"listen": "0.0.0.0:7700"}, {"metrics": "0.0.0.0:8080"}):
        with pytest.raises(OptionError, match="certs init"):
            options_for(tmp_path, **fields)
    certificates.make_authority(tmp_path / "state" / "certs", [])
    options = options_for(tmp_path, listen="0.0.0.0:7700", metrics="0.0.0.0:8080")
    assert options.tokens_at == "0.0.0.0:7701"
    assert options_for(tmp_path, listen="0.0.0.0:7700", token_listen="none").tokens_at == ""
    assert ControllerOptions(listen="0.0.0.0:7700", state_dir=tmp_path / "state", insecure=True).secure is None


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    certificates.make_authority(certs, [])
    with pytest.raises(UnsafeFile, match="is not the certificate of the key"):
        TlsFiles(certs / "ca.pem", certs / "server.pem", certs / "local.key").read()
    with pytest.raises(UnsafeFile, match="alone"):
        TlsFiles(certs / "ca.pem", certs / "server.pem").read()
    (certs / "server.key").chmod(0o644)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        TlsFiles(certs / "ca.pem", certs / "server.pem", certs / "server.key").read()


@pytest.mark.parametrize(
    "host", ["bad host", "10.0.0.1:7700", "https://h", "a,b", "999.1.1.1", "h..x", "[::1]", "é", ""]
)
def test_a_host_that_nobody_can_call_is_refused_before_anything_is_made(tmp_path: Path, host: str) -> None:
    make_private(tmp_path)
    with pytest.raises(BadCertificate, match="neither the name nor the address of a machine"):
        certificates.make_authority(tmp_path / "certs", [host])
    certificates.make_authority(tmp_path / "certs", ["h", "h_1.example.com.", "*.example.com", "10.0.0.1", "::2"])


def test_an_authority_is_never_replaced_and_names_of_its_own_are_not_issued(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    make_private(tmp_path)
    with pytest.raises(BadCertificate, match="certs init"):
        certificates.issue(certs, "a", Role.VIEWER, tmp_path / "a")
    certificates.make_authority(certs, [])
    with pytest.raises(BadCertificate, match="already"):
        certificates.make_authority(certs, [])
    for name in ("owner", "server", "local", "../a", ""):
        with pytest.raises(BadCertificate, match="can't be the name"):
            certificates.issue(certs, name, Role.VIEWER, tmp_path / "a")
    with pytest.raises(BadCertificate, match="certs list"):
        certificates.revoke(certs, "nobody")
