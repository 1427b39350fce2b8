"""Signed tokens of a company's login: which count, as whom, and until when."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from callboard.client.client import Client
from callboard.security import access as access_module
from callboard.security.caller_roles import Identity, Role
from callboard.security.places import UnsafeFile
from callboard.security.signed_tokens import SignedTokenRules, SignedTokens
from callboard.wire.refusals import NotAllowed, NotAuthenticated
from tests.controller.support import options_for, running

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
NOW_S = time.time()
DAY_S = 86_400
"""A token is made when the tests are collected, and may be tried long after."""
GOOD: dict[str, Any] = {
    "sub": "alice",
    "iss": "https://login",
    "aud": "callboard",
    "exp": NOW_S + DAY_S,
    "role": "viewer",
}


def public_pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def signed(key: Any = KEY, *, algorithm: str = "ES256", kid: str = "", **claims: Any) -> str:
    """A token; claims that are None are left out."""
    whole = {name: value for name, value in (GOOD | claims).items() if value is not None}
    return jwt.encode(whole, key, algorithm=algorithm, headers={"kid": kid} if kid else None)


def tokens(directory: Path, keys: bytes = public_pem(KEY), **rules: Any) -> SignedTokens:
    path = directory / "keys"
    path.write_bytes(keys)
    return SignedTokens(SignedTokenRules(key_file=path, issuer="https://login", audience="callboard", **rules))


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (signed(OTHER), "Signature"),
        (signed(exp=NOW_S - 60), "expired"),
        (signed(exp=None), "exp"),
        (signed(iss="https://elsewhere"), "issuer"),
        (signed(aud="another"), "[Aa]udience"),
        (signed(aud=None), "aud"),
        (signed(nbf=NOW_S + DAY_S), "not yet valid"),
        (signed(sub=None), "sub"),
        (signed(sub="owner"), "can't be a client's name"),
        (signed(sub="a b"), "can't be a client's name"),
        (signed(role="agent"), "gives no role"),
        (signed(role=None), "gives no role"),
        (signed(role={"viewer": 1}), "gives no role"),
        (jwt.encode(GOOD, "", algorithm="none"), "is not valid"),
        ("a.b.c", "is not valid"),
        ("..", "is not valid"),
    ],
)
def test_what_does_not_count_is_refused_with_the_reason(tmp_path: Path, token: str, why: str) -> None:
    with pytest.raises(NotAuthenticated, match=why):
        tokens(tmp_path).identify(token, NOW_S)


def test_a_token_signed_with_the_public_key_as_a_shared_secret_does_not_count(tmp_path: Path) -> None:
    head = jwt.utils.base64url_encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
    body = jwt.utils.base64url_encode(json.dumps(GOOD).encode())
    digest = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    sign = jwt.utils.base64url_encode(digest.sign(head + b"." + body, public_pem(KEY)))
    with pytest.raises(NotAuthenticated, match="is not valid"):
        tokens(tmp_path).identify(b".".join((head, body, sign)).decode(), NOW_S)


def test_name_and_role_come_from_the_claims_that_are_named(tmp_path: Path) -> None:
    assert tokens(tmp_path).identify(signed(), NOW_S) == Identity("alice", Role.VIEWER)
    assert tokens(tmp_path).identify(signed(role=["x", "viewer", "trainer"]), NOW_S).role is Role.TRAINER
    mapped = tokens(tmp_path, name_claim="user", role_claim="realm.groups", roles={"ml": Role.OPERATOR})
    assert mapped.identify(signed(user="bob", realm={"groups": ["ml"]}), NOW_S) == Identity("bob", Role.OPERATOR)
    with pytest.raises(NotAuthenticated, match="gives no role"):
        mapped.identify(signed(user="bob", realm={"groups": ["operator"]}), NOW_S)


def test_a_verified_token_ends_when_it_says_so(tmp_path: Path) -> None:
    known = tokens(tmp_path)
    now_s = time.time()
    token = signed(exp=int(now_s) + 2)
    assert known.identify(token, now_s).name == "alice"
    assert known._verified[token][1] < now_s + 60
    known._verified[token] = (known._verified[token][0], now_s)
    assert known.identify(token, now_s).name == "alice", "its signature is verified again"


def test_keys_are_chosen_by_their_id(tmp_path: Path) -> None:
    large = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    keys = []
    kinds: Any = (("a", KEY, jwt.algorithms.ECAlgorithm), ("b", large, jwt.algorithms.RSAAlgorithm))
    for kid, key, kind in kinds:
        keys.append(json.loads(kind.to_jwk(key.public_key())) | {"kid": kid})
    known = tokens(tmp_path, json.dumps({"keys": keys}).encode())
    assert known.identify(signed(kid="a"), NOW_S).name == "alice"
    assert known.identify(signed(large, algorithm="RS256", kid="b"), NOW_S).name == "alice"
    for token in (signed(kid="b"), signed(kid="c"), signed()):
        with pytest.raises(NotAuthenticated):
            known.identify(token, NOW_S)


def test_files_without_public_keys_are_refused(tmp_path: Path) -> None:
    private = KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    shared = json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}]}).encode()
    own = json.dumps({"keys": [json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY))]}).encode()
    for data in (b"", b"text", private, shared, own, b'{"keys": []}'):
        with pytest.raises(UnsafeFile):
            tokens(tmp_path, data)


async def test_a_controller_takes_them_and_keys_that_change_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "LOOK_EVERY_S", 0.0)
    (tmp_path / "keys").write_bytes(public_pem(KEY))
    rules = SignedTokenRules(key_file=tmp_path / "keys", issuer="https://login", audience="callboard")
    async with running(options_for(tmp_path, jwt=rules)) as controller:
        monkeypatch.setenv("CALLBOARD_TOKEN", signed(role="operator"))
        async with Client(controller.address) as client:
            await client.create_pool({"name": "a"})
            assert [(each.who, each.role) for each in controller.audit.newest(1)] == [("alice", "operator")]
            (tmp_path / "new").write_bytes(public_pem(OTHER))
            (tmp_path / "new").replace(tmp_path / "keys")
            with pytest.raises(NotAuthenticated, match="Signature"):
                await client.list_pools()
        monkeypatch.setenv("CALLBOARD_TOKEN", signed(OTHER))
        async with Client(controller.address) as client:
            assert len(await client.list_pools()) == 1
            with pytest.raises(NotAllowed):
                await client.create_pool({"name": "b"})
