"""Images for a real podman, of this machine's own Python: no registry is asked."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

PYTHON, BARE = "localhost/callboard-python", "localhost/callboard-bare"
"""One that has Python, and one that has nothing but a shell."""

_LEFT_OUT = {"test", "idlelib", "lib2to3", "ensurepip", "site-packages", "__pycache__", "tkinter", "turtledemo"}
_TOOLS = ("/bin/sh", "/bin/sleep", "/bin/cat")


PACKAGES = Path(sysconfig.get_path("platlib"))
"""Packages of the tests' Python, which the image that has Python finds where they are shown to it."""


def settings(folder: Path, *shown: Path) -> dict[str, str]:
    """Variables by which podman keeps all in a folder, asks for no more than a sandbox allows, and shows these folders
    to every container."""
    runtime = "runc" if shutil.which("runc") else "crun"
    folder.mkdir(parents=True, exist_ok=True)
    volumes = json.dumps([f"{each}:{each}:ro" for each in shown])
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\nvolumes = {volumes}\n'
        f'[engine]\nruntime = "{runtime}"\n'
    )
    roots = f"graphroot = {json.dumps(str(folder / 'store'))}\nrunroot = {json.dumps(str(folder / 'run'))}\n"
    # Without mounts, which would outlive a test that is killed.
    (folder / "storage.conf").write_text(f'[storage]\ndriver = "vfs"\n{roots}')
    return {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


def why_unusable(folder: Path, variables: dict[str, str]) -> str:
    """Bring both images, and run one; why podman can't; empty: it can."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    with tarfile.open(folder / "bare.tar", "w") as archive:
        _add_programs(archive, _TOOLS)
    with tarfile.open(folder / "python.tar", "w") as archive:
        _add_python(archive)
        _add_programs(archive, _TOOLS)
    commands = [
        # The user of an image isn't that of its worker.
        ["import", "--change", "ENV OF_IMAGE=yes", "--change", "USER 1000", str(folder / "python.tar"), PYTHON],
        ["import", str(folder / "bare.tar"), BARE],
        ["run", "--rm", "--network", "host", "--pid", "host", PYTHON, "python3", "-c", "import ssl, ctypes"],
    ]
    for command in commands:
        done = subprocess.run(
            ["podman", *command],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            return f"podman {command[0]}: {done.stderr.strip()}"
    return ""


def _add_python(archive: tarfile.TarFile) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library = Path(sys.base_prefix) / "lib" / version
    program = Path(sys.base_prefix) / "bin" / version
    archive.add(library, str(library)[1:], filter=lambda each: None if _is_left_out(each.name) else each)
    loaded = [str(program), *map(str, library.glob("lib-dynload/*.so")), *map(str, PACKAGES.glob("ray/_raylet.so"))]
    _add_programs(archive, [str(program)])
    _add_libraries(archive, loaded)
    where = f"{PACKAGES}\n".encode()
    path = tarfile.TarInfo(f"{library}/site-packages/shown.pth"[1:])
    path.size = len(where)
    archive.addfile(path, io.BytesIO(where))
    link = tarfile.TarInfo("usr/bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, str(program)
    archive.addfile(link)
    folder = tarfile.TarInfo("tmp")
    folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
    archive.addfile(folder)


def _is_left_out(name: str) -> bool:
    return not _LEFT_OUT.isdisjoint(name.split("/")) or "/config-" in name


def _add_programs(archive: tarfile.TarFile, programs: tuple[str, ...] | list[str]) -> None:
    for each in programs:
        archive.add(Path(each).resolve(), each[1:])
    _add_libraries(archive, list(programs))


def _add_libraries(archive: tarfile.TarFile, files: list[str]) -> None:
    told = subprocess.run(["ldd", *files], capture_output=True, text=True, timeout=60, check=False).stdout
    there = set(archive.getnames())
    for each in sorted({word for word in told.split() if word.startswith("/") and not word.endswith(":")}):
        if each[1:] not in there:
            archive.add(Path(each).resolve(), each[1:])
