"""Joining: how an agent on another machine gets credentials of its own for a join token, keeps them and renews them.

A join token counts once, for a short time, for the role of an agent, and for one node if it names one. What is handed
over (:class:`JoinToken`) also holds the authority by which the agent knows the controller, and the port to call.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import grpc.aio

from callboard.model.frozen import dataclass
from callboard.model.log import structlog
from callboard.security.access import Access
from callboard.security.caller_roles import Identity, Role, check_node
from callboard.security.dialing import Channel, Whereabouts, open_channel
from callboard.security.grants import consume, grant
from callboard.security.places import TLS_VARIABLES, make_private, read_private, write_private
from callboard.security.tls import TlsParts
from callboard.security.tokens import BadToken
from callboard.v1 import agent_pb2, agent_pb2_grpc
from callboard.wire.refusals import NotAuthenticated

_PREFIX = "cbj1."
_JOIN_S = 30.0

LOOK_EVERY_S = 6 * 3600.0
"""How often an agent looks whether its certificate ends soon."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """What is handed to whoever starts an agent.

    Attributes:
        port: where the controller takes tokens; 0: at the address that the agent is given, or with an authority at the
            port after it.
        authority: who signed the controller's certificate, PEM; empty: it has none.
    """

    secret: str
    port: int = 0
    authority: str = ""

    def text(self) -> str:
        """One line, for a file."""
        plain = {"token": self.secret, "port": self.port, "authority": self.authority}
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(plain).encode()).decode()

    @classmethod
    def read(cls, path: Path) -> JoinToken:
        """
        Raises:
            UnsafeFile: the file can't be used.
            BadToken: it holds no join token.
        """
        text = read_private(path)
        try:
            plain = json.loads(base64.urlsafe_b64decode(text.removeprefix(_PREFIX)))
            found = cls(secret=str(plain["token"]), port=int(plain["port"]), authority=str(plain["authority"]))
        except (ValueError, KeyError, TypeError) as error:
            raise BadToken(str(path), "is not a join token. Make one with `callboard node token create`.") from error
        return found

    def address(self, controller: str) -> str:
        """Where to call, for an agent whose controller is at ``controller``, or one of several there."""
        if "," in controller:
            return ",".join(map(self.address, controller.split(",")))
        host, _, port = controller.rpartition(":")
        return f"{host}:{self.port or (int(port) + 1 if self.authority else port)}"


def new_join_token(state_dir: Path, *, lasts_ms: int, node: str, port: int, authority: str) -> tuple[str, JoinToken]:
    """Makes one; returns the name by which it is listed and revoked, and the token.

    Raises:
        BadGrant, UnsafeFile, OSError: it can't be made.
    """
    name = f"join-{secrets.token_hex(4)}"
    secret = grant(state_dir, name, Role.JOINER, lasts_ms=lasts_ms, node=node)
    return name, JoinToken(secret=secret, port=port, authority=authority)


@dataclass(frozen=True, slots=True)
class Joining:
    """The controller's end.

    Attributes:
        certs: of the authority; None: there is none.
        access: is told of new tokens.
    """

    state_dir: Path
    certs: Path | None
    access: Access

    def join(self, who: Identity, request: agent_pb2.JoinRequest) -> agent_pb2.JoinResponse:
        """Credentials for an agent. Not to be called on the event loop: it writes files.

        Raises:
            NotAuthenticated: the token has been used.
            NotAllowed: it is for another node.
            BadGrant, BadCertificate: the request can't be met.
        """
        check_node(request.node_id, who)
        if who.role is Role.JOINER and not consume(self.state_dir, who.name):
            raise NotAuthenticated("the join token was used already. Make another with `callboard node token create`")
        if self.certs is not None and (self.certs / "ca.key").exists():
            from callboard.security.certificates import sign_request  # noqa: PLC0415 - slow to import

            signed = sign_request(self.certs, request.certificate_request, request.node_id, Role.AGENT)
            authority = (self.certs / "ca.pem").read_text(encoding="ascii")
            return agent_pb2.JoinResponse(certificate=signed, authority=authority)
        node = request.node_id
        token = grant(self.state_dir, f"agent.{node}", Role.AGENT, node=node, replace=True)
        self.access.look_again()
        return agent_pb2.JoinResponse(token=token)


class AgentCredentials:
    """What an agent keeps of its own, in a private directory of its account."""

    def __init__(self, cluster: str, node_id: str, environ: Mapping[str, str] = os.environ) -> None:
        base = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
        self.directory = Path(base) / "callboard" / "agents" / cluster / node_id
        self.token_file = self.directory / "token"
        self._pem = {"ca": self.directory / "ca.pem", "cert": self.directory / "cert.pem"}
        self._pem["key"] = self.directory / "cert.key"
        self._joined_with = self.directory / "joined-with"

    def exist(self) -> bool:
        return self.token_file.exists() or self._pem["cert"].exists()

    def come_from(self, joining: JoinToken) -> bool:
        """Whether it got them for this token. A unit goes on to name the token that was used up; another token is of
        somebody who wants the node to join anew, perhaps a controller that was made anew under the same name."""
        if self._joined_with.exists():
            return self._joined_with.read_text().strip() == _digest(joining)
        # A version before this one kept no note; what another authority signed is of another controller all the same.
        return self.exist() and (not joining.authority or joining.authority in self._authority())

    def _authority(self) -> str:
        return self._pem["ca"].read_text() if self._pem["ca"].exists() else ""

    def environment(self) -> dict[str, str]:
        """Variables by which the program finds a certificate; empty: it has a token."""
        if not self._pem["cert"].exists():
            return {}
        return {TLS_VARIABLES[part]: str(path) for part, path in self._pem.items()}

    async def obtain(self, controller: str, joining: JoinToken, node_id: str) -> None:
        """Exchanges a join token for them.

        Raises:
            grpc.aio.AioRpcError: the controller refuses or can't be reached.
            UnsafeRunDirectory, OSError: they can't be kept.
        """
        for folder in (self.directory.parent, self.directory):
            make_private(folder)
        key, request = _new_request(node_id)
        authority = joining.authority.encode()
        tls = TlsParts(ca=authority, cert=b"", key=b"") if authority else None
        options = [("grpc.enable_http_proxy", 0)]
        where = Whereabouts(joining.address(controller))
        async with Channel(where, options, lambda _: joining.secret, lambda _: tls) as channel:
            answer = await _joined(channel, node_id, request)
        if answer.token:
            write_private(self.token_file, answer.token + "\n")
        else:
            self._keep(key, answer)
        write_private(self._joined_with, _digest(joining) + "\n")

    async def keep_renewed(self, controller: str, node_id: str, *, look_every_s: float = LOOK_EVERY_S) -> None:
        """Asks for the next certificate when a third of its time is left, for ever; who has a token needs none. The
        next session shows the new one, and so does every other call."""
        while True:
            if self._pem["cert"].exists() and self._is_due():
                try:
                    await self._renew(controller, node_id)
                    _log.info("certificate_renewed", node=node_id)
                except (grpc.aio.AioRpcError, BadToken, OSError) as error:
                    why = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    _log.warning("certificate_not_renewed", node=node_id, why=why, tried_again_in_s=look_every_s)
            await asyncio.sleep(look_every_s)

    async def _renew(self, controller: str, node_id: str) -> None:
        key, request = _new_request(node_id)
        async with open_channel(controller, [("grpc.enable_http_proxy", 0)]) as channel:
            answer = await _joined(channel, node_id, request)
        if answer.certificate:
            self._keep(key, answer)

    def _is_due(self) -> bool:
        from callboard.security.certificates import lifetime  # noqa: PLC0415 - slow to import

        begins_s, ends_s = lifetime(self._pem["cert"].read_bytes())
        return time.time() > ends_s - (ends_s - begins_s) / 3

    def _keep(self, key: str, answer: agent_pb2.JoinResponse) -> None:
        write_private(self._pem["key"], key)
        write_private(self._pem["ca"], answer.authority)
        write_private(self._pem["cert"], answer.certificate)


def _new_request(node_id: str) -> tuple[str, str]:
    from callboard.security.certificates import new_request  # noqa: PLC0415 - slow to import

    return new_request(node_id)


def _digest(joining: JoinToken) -> str:
    return hashlib.sha256(joining.secret.encode()).hexdigest()


async def _joined(channel: Channel, node_id: str, request: str) -> agent_pb2.JoinResponse:
    """The answer of the controller that leads, each of several asked once and those that were named."""
    asked: set[str] = set()
    while True:
        asked.add(channel.address)
        try:
            answer: agent_pb2.JoinResponse = await agent_pb2_grpc.AgentServiceStub(channel).Join(
                agent_pb2.JoinRequest(node_id=node_id, certificate_request=request.encode()), timeout=_JOIN_S
            )
        except grpc.aio.AioRpcError as error:
            away = error.code() is grpc.StatusCode.UNAVAILABLE
            if not (away and channel.moved(error)) or channel.address in asked:
                raise
        else:
            return answer
