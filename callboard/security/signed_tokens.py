"""Signed tokens: JSON Web Tokens of a company's own login (OIDC), verified with its public keys from a file.

The keys are read from a file, so that the controller calls nobody; it is read again when it changes. Only signatures by
a private key count: with one that both ends know, whoever verifies could also sign.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from callboard.model.frozen import dataclass
from callboard.model.names import is_name
from callboard.security.caller_roles import OWNER, Identity, Role
from callboard.security.places import MAX_SECRET_BYTES, UnsafeFile
from callboard.wire.refusals import NotAuthenticated

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")

LEEWAY_S = 30
"""Clocks of machines differ."""

ROLES_OF_PEOPLE = (Role.OPERATOR, Role.TRAINER, Role.VIEWER)
"""Roles that a signed token can give, the one that may do most first."""

_KEPT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedTokenRules:
    """Which signed tokens count.

    Attributes:
        key_file: public keys, PEM or a JSON Web Key Set.
        issuer: who must have issued them (``iss``).
        audience: whom they must be for (``aud``).
        name_claim: claim with the client's name.
        role_claim: claim with its role, or a list of groups; dots lead into objects (``realm_access.roles``).
        roles: group → role; empty: groups are named like roles.
    """

    key_file: Path
    issuer: str
    audience: str
    name_claim: str = "sub"
    role_claim: str = "role"
    roles: Mapping[str, Role] = field(default_factory=dict)


class SignedTokens:
    """Verifies signed tokens; each signature once."""

    def __init__(self, rules: SignedTokenRules) -> None:
        """
        Raises:
            UnsafeFile: the keys can't be used.
        """
        self._rules = rules
        self._keys: dict[str, Any] = {}
        self._verified: dict[str, tuple[Identity, float]] = {}
        self.read()

    @property
    def key_file(self) -> Path:
        """The file with the keys."""
        return self._rules.key_file

    def read(self) -> None:
        """Reads the keys again.

        Raises:
            UnsafeFile: they can't be used; those that were read before still count.
        """
        self._keys = _read_keys(self._rules.key_file)
        self._verified.clear()

    def identify(self, token: str, now_s: float) -> Identity:
        """Who a token is.

        Raises:
            NotAuthenticated: it doesn't count; the text says why.
        """
        known = self._verified.get(token)
        if known is not None and now_s < known[1]:
            return known[0]
        identity, expires_s = self._verify(token)
        if len(self._verified) >= _KEPT:
            self._verified.clear()
        self._verified[token] = (identity, expires_s)
        return identity

    def _verify(self, token: str) -> tuple[Identity, float]:
        import jwt  # noqa: PLC0415 - an extra, and only needed where signed tokens are

        rules = self._rules
        try:
            key_id = jwt.get_unverified_header(token).get("kid", "")
            key = self._keys.get(key_id) or (next(iter(self._keys.values())) if len(self._keys) == 1 else None)
            if key is None:
                raise NotAuthenticated(f"the signed token names the key {key_id!r}, which is not in {rules.key_file}")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                issuer=rules.issuer,
                audience=rules.audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", rules.name_claim.partition(".")[0]]},
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            why = str(error).rstrip(".")
            raise NotAuthenticated(f"the signed token is not valid: {why}. Log in again with its issuer") from error
        return Identity(self._name(claims), self._role(claims)), float(claims["exp"]) + LEEWAY_S

    def _name(self, claims: Mapping[str, Any]) -> str:
        name = _claim(claims, self._rules.name_claim)
        if not isinstance(name, str) or not is_name(name) or name == OWNER.name:
            raise NotAuthenticated(
                f"the claim {self._rules.name_claim} of the signed token is {str(name)[:80]!r}, which can't be a "
                "client's name. Choose another claim with --jwt-name-claim"
            )
        return name

    def _role(self, claims: Mapping[str, Any]) -> Role:
        stated = _claim(claims, self._rules.role_claim)
        groups = [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
        named = self._rules.roles or {str(role): role for role in ROLES_OF_PEOPLE}
        given = {named[group] for group in groups if isinstance(group, str) and group in named}
        for role in ROLES_OF_PEOPLE:
            if role in given:
                return role
        raise NotAuthenticated(
            f"the claim {self._rules.role_claim} of the signed token gives no role here; there are {', '.join(named)}. "
            "Ask the person who manages the groups of the login"
        )


def looks_signed(token: str) -> bool:
    """Whether a token has the form of a signed one; tokens of callboard have no dots."""
    return token.count(".") == 2


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    if path in claims:
        return claims[path]  # also one whose name has dots, such as a URL
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _read_keys(path: Path) -> dict[str, Any]:
    """Public keys by id; one in PEM has none."""
    import jwt  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnsafeFile(path, f"can't be read ({error.strerror}).") from error
    if len(data) > MAX_SECRET_BYTES:
        raise UnsafeFile(path, f"holds more than {MAX_SECRET_BYTES} bytes.")
    try:
        if data.lstrip().startswith(b"{"):
            keys = {each.key_id or "": each.key for each in jwt.PyJWKSet.from_dict(json.loads(data)).keys}
        else:
            keys = {"": load_pem_public_key(data)}
    except (ValueError, jwt.PyJWTError) as error:
        raise UnsafeFile(path, f"holds neither a public key in PEM nor a set of keys in JSON ({error}).") from error
    if any(isinstance(key, bytes) or hasattr(key, "private_numbers") for key in keys.values()):
        raise UnsafeFile(path, "holds a private or shared key. Put the public keys there.")
    return keys
