"""Wheels made on the spot, so that environments are built without an index."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str, **modules: str) -> Path:
    """A wheel with some modules, and a console script `{name}-says` that prints its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    says = f"VERSION = {version!r}\ndef main(): print({name!r}, VERSION)\n"
    files = {
        f"{name}.py": says,
        **{f"{module}.py": text for module, text in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-says = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path
