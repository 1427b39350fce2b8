"""The list of certificates that an authority issued, and took back."""

from __future__ import annotations

import json
from pathlib import Path

from callboard.model.frozen import dataclass
from callboard.security.caller_roles import Role
from callboard.security.places import UnsafeFile, read_private

ISSUED_NAME = "issued.json"
SERVER, LOCAL, AUTHORITY = "server", "local", "authority"

_MAX_ISSUED_BYTES = 16 << 20


class BadCertificate(Exception):
    """A certificate can't be made or taken back; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One certificate.

    Attributes:
        serial: its number, hexadecimal.
        name: of the client, or "server".
        role: of the client; empty: the controller.
        folder: where it and its key were put; empty: nowhere here, an agent asked for it.
        made_ms: in milliseconds since 1970.
        expires_ms: from when on it doesn't count.
        revoked_ms: when it was taken back; 0: it was not.
        authority: number of the authority's certificate that signed it; empty: the first one.
    """

    serial: str
    name: str
    role: str
    folder: str
    made_ms: int
    expires_ms: int
    revoked_ms: int = 0
    authority: str = ""


def read_issued(directory: Path) -> list[Issued]:
    """All that was issued, oldest first.

    Raises:
        UnsafeFile: the list is not private or is broken.
    """
    path = directory / ISSUED_NAME
    if not path.exists():
        return []
    try:
        return [Issued(**each) for each in json.loads(read_private(path, most_bytes=_MAX_ISSUED_BYTES))["issued"]]
    except (ValueError, TypeError, KeyError) as error:
        raise UnsafeFile(path, f"is broken ({error}). Put a backup in its place.") from error


def maker_of(role: str | None) -> str:
    """The verb that makes a certificate of a role: one that was revoked is not renewed."""
    return "`callboard certs agent`" if role == Role.AGENT else "`callboard certs client`"
