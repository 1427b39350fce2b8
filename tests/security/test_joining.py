"""Join tokens: an agent on another machine gets credentials of its own, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest

from callboard.agents.ray.ray_command import free_port
from callboard.controller.server import Controller
from callboard.security import access as access_module
from callboard.security import certificates
from callboard.security.caller_roles import Role
from callboard.security.grants import GRANTS_NAME, read_grants
from callboard.security.issued import read_issued
from callboard.security.joining import AgentCredentials, JoinToken, new_join_token
from callboard.security.places import write_private
from callboard.security.tokens import BadToken
from tests.controller.support import options_for, running
from tests.support.fake_agent import FakeAgent


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What agents keep, and a revocation that counts at once."""
    monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of the agent"))


def apart(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """From now on, nobody finds the token of a controller of this account."""
    monkeypatch.setenv("CALLBOARD_RUN_DIR", str(directory))
    monkeypatch.setattr("callboard.security.tokens.account_directory", lambda: directory)


def made(controller: Controller, *, node: str = "", lasts_ms: int = 60_000) -> JoinToken:
    """A join token of a running controller."""
    ca = controller.options.certs / "ca.pem"
    return new_join_token(
        controller.options.state_dir,
        lasts_ms=lasts_ms,
        node=node,
        port=int(controller.tokens_at.rpartition(":")[2]) if controller.tokens_at else 0,
        authority=ca.read_text() if ca.exists() else "",
    )[1]


async def refused(
    own: AgentCredentials, controller: Controller, token: JoinToken, node_id: str
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await own.obtain(controller.address, token, node_id)
    assert not own.exist()
    return caught.value


@pytest.mark.parametrize("tls", [True, False], ids=["for a certificate", "for a token"])
async def test_an_agent_exchanges_a_join_token_and_joins_with_what_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    if tls:
        certificates.make_authority(tmp_path / "state" / "certs", [])
    async with running(options_for(tmp_path)) as controller:
        apart(monkeypatch, tmp_path / "elsewhere")
        token = made(controller, node="n1")
        write_private(tmp_path / "join.token", token.text())
        assert JoinToken.read(tmp_path / "join.token") == token
        own = AgentCredentials("default", "n1")
        assert "PERMISSION_DENIED" in str((await refused(own, controller, token, "n2")).code())
        await own.obtain(controller.address, token, "n1")
        again = await refused(AgentCredentials("b", "n1"), controller, token, "n1")
        assert again.code() is grpc.StatusCode.UNAUTHENTICATED
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        if not tls:
            monkeypatch.setenv("CALLBOARD_TOKEN_FILE", str(own.token_file))
        async with FakeAgent(controller.address, "n1") as agent:
            assert agent.welcome.epoch
        other = FakeAgent(controller.address, "n2")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.join()
        await other.cut()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert own.directory.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in own.directory.iterdir())
        if tls:
            listed = [each for each in read_issued(controller.options.certs) if each.name == "n1"]
            assert [(each.role, each.folder) for each in listed] == [("agent", "")], "its key never left the agent"


async def test_an_agent_renews_its_certificate_by_the_one_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.make_authority(tmp_path / "state" / "certs", [])
    async with running(options_for(tmp_path)) as controller:
        apart(monkeypatch, tmp_path / "elsewhere")
        own = AgentCredentials("default", "n1")
        await own.obtain(controller.address, made(controller), "n1")
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        first = (own.directory / "cert.pem").read_text()
        assert not own._is_due(), "it has most of its time left"
        with monkeypatch.context() as later:
            later.setattr("time.time", lambda: certificates.lifetime(first.encode())[1] - 3600)
            assert own._is_due()
        await own._renew(controller.address, "n1")
        assert (own.directory / "cert.pem").read_text() != first
        async with FakeAgent(controller.address, "n1") as agent:
            assert agent.welcome.epoch
        listed = [each.name for each in read_issued(controller.options.certs)]
        assert listed.count("n1") == 2


async def test_an_agent_renews_its_certificate_by_itself_when_it_is_due_and_tries_again_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.make_authority(tmp_path / "state" / "certs", [])
    async with running(options_for(tmp_path)) as controller:
        apart(monkeypatch, tmp_path / "elsewhere")
        own = AgentCredentials("default", "n1")
        await own.obtain(controller.address, made(controller), "n1")
        for name, value in own.environment().items():
            monkeypatch.setenv(name, value)
        first = (own.directory / "cert.pem").read_text()
        looked: asyncio.Queue[bool] = asyncio.Queue()
        due = AgentCredentials._is_due

        def is_due(credentials: AgentCredentials) -> bool:
            looked.put_nowait(found := due(credentials))
            return found

        monkeypatch.setattr(AgentCredentials, "_is_due", is_due)
        nowhere = f"127.0.0.1:{free_port()}"
        for address, renewed in ((nowhere, False), (controller.address, True)):
            ends_s = certificates.lifetime((own.directory / "cert.pem").read_bytes())[1]
            keeping = asyncio.create_task(own.keep_renewed(address, "n1", look_every_s=0.01))
            for _ in range(3):
                assert not await looked.get(), "it has most of its time left"
            assert (own.directory / "cert.pem").read_text() == first
            with monkeypatch.context() as later:
                later.setattr("callboard.security.joining.time.time", lambda ends_s=ends_s: ends_s - 3600)
                while not await looked.get():
                    pass
                # It is due, and is looked at again once that was tried: of one that was renewed an hour before the
                # old one ends by this clock most of the time is left, too.
                await looked.get()
            assert ((own.directory / "cert.pem").read_text() != first) is renewed
            assert not keeping.done()
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        async with FakeAgent(controller.address, "n1") as agent:
            assert agent.welcome.epoch


async def test_of_many_at_once_one_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(options_for(tmp_path)) as controller:
        apart(monkeypatch, tmp_path / "elsewhere")
        token = made(controller)

        async def tries(number: int) -> bool:
            try:
                await AgentCredentials("default", f"n{number}").obtain(controller.address, token, f"n{number}")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED  # noqa: PT017 - of those that came later
                return False
            return True

        assert sum(await asyncio.gather(*map(tries, range(8)))) == 1
        assert [(each.name[:7], each.role) for each in read_grants(controller.options.state_dir)] == [
            ("agent.n", Role.AGENT)
        ]


async def test_a_join_token_ends_does_nothing_else_and_is_kept_as_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(options_for(tmp_path)) as controller:
        apart(monkeypatch, tmp_path / "elsewhere")
        own = AgentCredentials("default", "n1")
        late = await refused(own, controller, made(controller, lasts_ms=1), "n1")
        assert late.code() is grpc.StatusCode.UNAUTHENTICATED
        token = made(controller)
        monkeypatch.setenv("CALLBOARD_TOKEN", token.secret)
        agent = FakeAgent(controller.address, "n1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await agent.join()
        await agent.cut()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        kept = (controller.options.state_dir / GRANTS_NAME).read_text()
        assert token.secret not in kept
        assert len(json.loads(kept)["clients"]) == 1, "the one that ended is gone"


def test_what_is_no_join_token_is_refused_in_words(tmp_path: Path) -> None:
    write_private(tmp_path / "join.token", "cb_" + "x" * 43)
    with pytest.raises(BadToken, match="node token create"):
        JoinToken.read(tmp_path / "join.token")


def test_where_an_agent_calls_to_join() -> None:
    assert JoinToken(secret="s").address("10.0.0.1:7700") == "10.0.0.1:7700"
    assert JoinToken(secret="s", authority="…").address("10.0.0.1:7700") == "10.0.0.1:7701"
    assert JoinToken(secret="s", authority="…", port=9).address("[::1]:7700") == "[::1]:9"


async def test_another_token_lets_an_agent_join_anew_and_the_one_it_used_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that was made anew under the same name has another authority: what the first gave is of no use."""
    own = AgentCredentials("default", "n1", {"XDG_STATE_HOME": str(tmp_path / "home")})
    used: list[JoinToken] = []
    for name in ("first", "anew"):
        certificates.make_authority(tmp_path / name / "state" / "certs", [])
        async with running(options_for(tmp_path / name)) as controller:
            token = made(controller, node="n1")
            assert not own.come_from(token)
            with monkeypatch.context() as patched:
                apart(patched, tmp_path / "elsewhere")
                await own.obtain(controller.address, token, "n1")
                for variable, value in own.environment().items():
                    patched.setenv(variable, value)
                async with FakeAgent(controller.address, "n1") as agent:
                    assert agent.welcome.epoch
            assert own.come_from(token)
            used.append(token)
    assert not own.come_from(used[0])
    # Of a version that kept no note of the token, the authority says it.
    (own.directory / "joined-with").unlink()
    assert [own.come_from(token) for token in used] == [False, True]
