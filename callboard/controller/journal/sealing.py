"""Sealed secrets: values written down under a key that lies in a file of its own.

Protects what is copied, searched or mailed without that file. Not against whoever may read both: a controller that
starts again by itself has nobody to ask for the key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from callboard.controller.journal.state_dir import make_private_file

_KEY_BYTES = 32
_FORM = b"callboard.secret.1"
"""First bytes of a sealed value. They are authenticated, too, and no value of the older form begins like this: those
begin with 16 random bytes."""
_NONCE_BYTES = 12
_OLD_NONCE_BYTES = 16
_OLD_TAG_BYTES = 16


class Unsealable(Exception):
    """A value was sealed with another key, or changed since."""


class Seal:
    """Seals and opens values."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # A key of its own for each cipher: the older form used the one in the file as it is.
        self._cipher = AESGCM(hashlib.blake2b(_FORM, key=key, digest_size=_KEY_BYTES).digest())

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

    @staticmethod
    def is_old(kept: bytes | str) -> bool:
        """Whether a value was written by an earlier version: sealed in another form, or not at all."""
        return isinstance(kept, str) or not kept.startswith(_FORM)

    def close(self, value: str) -> bytes:
        """The value, sealed."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FORM + nonce + self._cipher.encrypt(nonce, value.encode(errors="surrogatepass"), _FORM)

    def open(self, sealed: bytes) -> str:
        """
        Raises:
            Unsealable: this key did not seal it.
        """
        if not sealed.startswith(_FORM):
            return self._open_old(sealed).decode(errors="surrogatepass")
        nonce, said = sealed[len(_FORM) :][:_NONCE_BYTES], sealed[len(_FORM) + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, said, _FORM).decode(errors="surrogatepass")
        except (InvalidTag, ValueError):  # ValueError: cut off inside the nonce.
            raise Unsealable from None

    def _open_old(self, sealed: bytes) -> bytes:
        """What the first version sealed, which had no library: a stream of SHAKE-256, and a keyed BLAKE2b."""
        said, tag = sealed[:-_OLD_TAG_BYTES], sealed[-_OLD_TAG_BYTES:]
        expected = hashlib.blake2b(said, key=self._key, digest_size=_OLD_TAG_BYTES, person=b"callboard.secret").digest()
        if len(said) < _OLD_NONCE_BYTES or not secrets.compare_digest(expected, tag):
            raise Unsealable
        nonce, body = said[:_OLD_NONCE_BYTES], said[_OLD_NONCE_BYTES:]
        stream = hashlib.shake_256(self._key + nonce).digest(len(body))
        return (int.from_bytes(body) ^ int.from_bytes(stream)).to_bytes(len(body))
