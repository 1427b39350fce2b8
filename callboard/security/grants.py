"""Grants: the clients that a controller knows besides its owner, each with a role and the hash of its token.

They lie in the state directory in one private file. The commands that change it run on the controller's machine and
replace the file as a whole; the controller reads it again when it changes, so that a new or a revoked token counts
within a second and without a restart. The tokens themselves are kept nowhere.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from callboard.model.frozen import dataclass
from callboard.model.names import is_name
from callboard.security.caller_roles import GUEST, OWNER, Role
from callboard.security.places import UnsafeFile, locked, read_private, write_private
from callboard.security.tokens import fingerprint, new_token

GRANTS_NAME = "clients.json"
MAX_GRANTS = 10_000


class BadGrant(Exception):
    """A grant that can't be made or taken back; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One client.

    Attributes:
        name: unique; pools name their members by it.
        made_ms: when it was made, in milliseconds since 1970.
        expires_ms: from when on it doesn't count; 0: never.
        node: the only node that an agent may be; empty: any.
    """

    name: str
    role: Role
    sha256: str
    made_ms: int
    expires_ms: int = 0
    node: str = ""

    def is_over(self, now_ms: float) -> bool:
        """Whether it counts no more, so many milliseconds after 1970."""
        return 0 < self.expires_ms <= now_ms


def read_grants(state_dir: Path) -> list[Grant]:
    """Every grant, by name.

    Raises:
        UnsafeFile: the file is not private or is broken.
    """
    path = state_dir / GRANTS_NAME
    if not path.exists():
        return []
    try:
        plain = json.loads(read_private(path, most_bytes=MAX_GRANTS * 512))
        return [Grant(**(each | {"role": Role(each["role"])})) for each in plain["clients"]]
    except (ValueError, TypeError, KeyError) as error:
        raise UnsafeFile(path, f"is broken ({error}). Put a backup in its place, or remove it.") from error


def grant(state_dir: Path, name: str, role: Role, *, lasts_ms: int = 0, replace: bool = False, node: str = "") -> str:
    """Makes a grant and returns its token, which is not kept.

    Args:
        lasts_ms: how long it counts; 0: for ever.
        node: the only node that it is for; empty: any.
        replace: whether one of that name goes: its old token is no longer valid.

    Raises:
        BadGrant: the name is none or is taken.
        UnsafeFile, OSError: the file can't be used.
    """
    if node and not is_name(node):
        raise BadGrant(f"{node!r} can't be the id of a node")
    if not is_name(name) or name in (OWNER.name, GUEST.name):
        raise BadGrant(
            f"{name!r} can't be the name of a client; take letters, digits, '.', '_' and '-', a letter first"
        )
    token, now_ms = new_token(), time.time_ns() // 1_000_000
    made = Grant(
        name=name,
        role=role,
        sha256=fingerprint(token),
        made_ms=now_ms,
        expires_ms=now_ms + lasts_ms if lasts_ms else 0,
        node=node,
    )
    with _changing(state_dir) as grants:
        for gone in [each.name for each in grants.values() if each.role is Role.JOINER and each.is_over(now_ms)]:
            del grants[gone]  # a join token that nobody used
        if name in grants and not replace:
            raise BadGrant(f"there is a client {name} already; add --replace to give it a new token")
        if len(grants) >= MAX_GRANTS:
            raise BadGrant(f"there are {MAX_GRANTS} clients already; revoke some")
        grants[name] = made
    return token


def revoke(state_dir: Path, name: str) -> None:
    """Takes a grant back.

    Raises:
        BadGrant: there is none of that name.
        UnsafeFile, OSError: the file can't be used.
    """
    with _changing(state_dir) as grants:
        if grants.pop(name, None) is None:
            raise BadGrant(f"there is no client {name}; `callboard token list` shows those there are")


def consume(state_dir: Path, name: str) -> bool:
    """Takes a grant that counts once; False: somebody was faster.

    Raises:
        UnsafeFile, OSError: the file can't be used.
    """
    with _changing(state_dir) as grants:
        return grants.pop(name, None) is not None


@contextmanager
def _changing(state_dir: Path) -> Iterator[dict[str, Grant]]:
    """The grants by name, written back at the end; one program at a time."""
    with locked(state_dir / GRANTS_NAME):
        grants = {each.name: each for each in read_grants(state_dir)}
        yield grants
        plain = {"clients": [asdict(grants[name]) for name in sorted(grants)]}
        write_private(state_dir / GRANTS_NAME, json.dumps(plain, indent=1) + "\n")
