"""Sealed secrets: values written down under a key that lies in a file of its own.

Protects what is copied, searched or mailed without that file. Not against whoever may read both: a controller that
starts again by itself has nobody to ask for the key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from callboard.controller.journal.state_dir import make_private_file

_KEY_BYTES = 32
_NONCE_BYTES = 16
_TAG_BYTES = 16
_PURPOSE = b"callboard.secret"


class Unsealable(Exception):
    """A value was sealed with another key, or changed since."""


class Seal:
    """Seals and opens values: a stream of SHAKE-256 over key and nonce, and a keyed BLAKE2b over the result."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of(cls, path: Path) -> Seal:
        """The seal whose key lies at ``path``, made where there is none.

        Raises:
            OSError: it can't be read or made.
        """
        if not path.exists() or path.stat().st_size != _KEY_BYTES:
            draft = path.with_suffix(".new")
            make_private_file(draft)
            with draft.open("wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())  # What it seals is durable too.
            draft.replace(path)
        return cls(path.read_bytes())

    def close(self, value: str) -> bytes:
        """The value, sealed."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        body = self._mixed(nonce, value.encode(errors="surrogatepass"))
        return nonce + body + self._tag(nonce + body)

    def open(self, sealed: bytes) -> str:
        """
        Raises:
            Unsealable: this key did not seal it.
        """
        said, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if len(said) < _NONCE_BYTES or not secrets.compare_digest(self._tag(said), tag):
            raise Unsealable
        return self._mixed(said[:_NONCE_BYTES], said[_NONCE_BYTES:]).decode(errors="surrogatepass")

    def _mixed(self, nonce: bytes, text: bytes) -> bytes:
        stream = hashlib.shake_256(self._key + nonce).digest(len(text))
        return (int.from_bytes(text) ^ int.from_bytes(stream)).to_bytes(len(text))

    def _tag(self, said: bytes) -> bytes:
        return hashlib.blake2b(said, key=self._key, digest_size=_TAG_BYTES, person=_PURPOSE).digest()
