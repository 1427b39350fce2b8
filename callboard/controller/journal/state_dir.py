"""The state directory: private, and held by one controller at a time."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from callboard.security.places import Held, take_lock, write_private

JOURNAL_NAME = "journal.sqlite"
SECRETS_NAME = "secrets.sqlite"
PACKAGES_NAME = "packages"
KEY_NAME = "secrets.key"
LOCK_NAME = "lock"
IDENTITY_NAME = "identity"


class StoreFailed(Exception):
    """The journal can't be read or written. What was acknowledged before is on disk.

    Attributes:
        path: file, directory or database concerned.
        why: what is wrong, as a sentence.
        remedy: what to do, as a sentence.
    """

    def __init__(self, path: Path | str, why: str, remedy: str) -> None:
        super().__init__(f"{path}: {why}. {remedy}")
        self.path = path
        self.why = why
        self.remedy = remedy


class StateDir:
    """The directory, locked while open. The lock ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1
        self.identity = ""
        """Of this state, given when it was made and kept as long as it is; known once the directory is open."""

    @property
    def journal_path(self) -> Path:
        return self.path / JOURNAL_NAME

    @property
    def secrets_path(self) -> Path:
        return self.path / SECRETS_NAME

    def open(self) -> None:
        """Makes the directory if needed, mode 0700, and locks it.

        Raises:
            StoreFailed: not ours, not writable, or held by a live controller.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
            if found.st_uid != os.getuid():
                raise StoreFailed(self.path, f"belongs to user {found.st_uid}", "Choose a directory of your own.")
            if stat.S_IMODE(found.st_mode) & 0o077:
                # Values of secret variables are kept in here.
                self.path.chmod(0o700)
            self._lock_fd = take_lock(self.path / LOCK_NAME, f"{os.getpid()}\n")
        except OSError as error:
            raise StoreFailed(
                self.path, f"can't be used as state directory ({error.strerror})", "Choose a writable directory."
            ) from error
        except Held as error:
            raise StoreFailed(
                self.path,
                f"is held by another controller (pid {error.holder})",
                "Stop that one, or choose another state directory.",
            ) from error
        try:
            self.identity = self._identify()
        except OSError as error:
            self.close()
            raise StoreFailed(
                self.path / IDENTITY_NAME, f"can't be read or written ({error.strerror})", "Make it readable."
            ) from error

    def _identify(self) -> str:
        file = self.path / IDENTITY_NAME
        if not file.exists() or not file.read_text().strip():
            write_private(file, secrets.token_hex(8) + "\n")
        return file.read_text().strip()

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def make_private_file(path: Path) -> None:
    """Makes an empty file with mode 0600 if there is none, so that SQLite never makes it with another mode.

    Raises:
        OSError: it can't be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
