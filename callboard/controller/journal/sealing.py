"""Sealed secrets: values written down under a key that lies in a file of its own.

The key is a new one with each start of a controller (:meth:`Seal.rotated`), so that a copy of an old key opens nothing
that is sealed now. Protects what is copied, searched or mailed without that file. Not against whoever may read both: a
controller that starts again by itself has nobody to ask for the key.
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

    def __init__(self, *keys: bytes) -> None:
        """
        Args:
            keys: the first seals, and each opens what it has sealed.
        """
        self._keys = keys
        # A key of its own for each cipher: the older form used the one in the file as it is.
        self._ciphers = [AESGCM(hashlib.blake2b(_FORM, key=key, digest_size=_KEY_BYTES).digest()) for key in keys]

    @classmethod
    def of(cls, path: Path) -> Seal:
        """The seal whose key lies at ``path``, made where there is none.

        Raises:
            OSError: it can't be read or made.
        """
        if not path.exists() or not cls.is_key(path):
            _write_keys(path, secrets.token_bytes(_KEY_BYTES))
        data = path.read_bytes()
        return cls(*(data[at : at + _KEY_BYTES] for at in range(0, len(data), _KEY_BYTES)))

    @staticmethod
    def is_key(path: Path) -> bool:
        """Whether a file holds keys.

        Raises:
            OSError: it can't be looked at.
        """
        size = path.stat().st_size
        return size > 0 and not size % _KEY_BYTES

    def rotated(self, path: Path) -> Seal:
        """A seal with a new key, which still opens what this one sealed. Both keys lie at ``path`` until :meth:`only`:
        a crash in between loses nothing.

        Raises:
            OSError: the keys can't be written.
        """
        keys = (secrets.token_bytes(_KEY_BYTES), *self._keys)
        _write_keys(path, *keys)
        return Seal(*keys)

    def only(self, path: Path) -> Seal:
        """The seal with its newest key alone, once nothing is sealed with the others.

        Raises:
            OSError: the key can't be written.
        """
        _write_keys(path, self._keys[0])
        return Seal(self._keys[0])

    @staticmethod
    def is_old(kept: bytes | str) -> bool:
        """Whether a value was written by an earlier version: sealed in another form, or not at all."""
        return isinstance(kept, str) or not kept.startswith(_FORM)

    def close(self, value: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FORM + nonce + self._ciphers[0].encrypt(nonce, value.encode(errors="surrogatepass"), _FORM)

    def open(self, sealed: bytes) -> str:
        """
        Raises:
            Unsealable: this key did not seal it.
        """
        if not sealed.startswith(_FORM):
            opened = (self._open_old(sealed, key) for key in self._keys)
            for value in opened:
                if value is not None:
                    return value.decode(errors="surrogatepass")
            raise Unsealable
        nonce, said = sealed[len(_FORM) :][:_NONCE_BYTES], sealed[len(_FORM) + _NONCE_BYTES :]
        for cipher in self._ciphers:
            try:
                return cipher.decrypt(nonce, said, _FORM).decode(errors="surrogatepass")
            except (InvalidTag, ValueError):  # ValueError: cut off inside the nonce.
                continue
        raise Unsealable

    @staticmethod
    def _open_old(sealed: bytes, key: bytes) -> bytes | None:
        """What the first version sealed, which had no library: a stream of SHAKE-256, and a keyed BLAKE2b."""
        said, tag = sealed[:-_OLD_TAG_BYTES], sealed[-_OLD_TAG_BYTES:]
        expected = hashlib.blake2b(said, key=key, digest_size=_OLD_TAG_BYTES, person=b"callboard.secret").digest()
        if len(said) < _OLD_NONCE_BYTES or not secrets.compare_digest(expected, tag):
            return None
        nonce, body = said[:_OLD_NONCE_BYTES], said[_OLD_NONCE_BYTES:]
        stream = hashlib.shake_256(key + nonce).digest(len(body))
        return (int.from_bytes(body) ^ int.from_bytes(stream)).to_bytes(len(body))


def _write_keys(path: Path, *keys: bytes) -> None:
    draft = path.with_suffix(".new")
    make_private_file(draft)
    with draft.open("wb") as file:
        file.write(b"".join(keys))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())  # What they seal is durable too.
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
