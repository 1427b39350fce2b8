"""Preloading: a host that nobody has yet imports modules, so that the start which takes it need not.

What makes a process that imported them unfit for a worker is found here, by looking and not by a list of modules: that
a device was touched, which variables the imports read, and how much memory they take. Standard library only.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANY = "*"
"""Stands for every variable: something went through the whole environment."""

_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/davinci")
"""Opened by what computes on devices of NVIDIA, AMD and Huawei; NVML, which only asks, opens others."""

_CUDA = "/libcuda.so"
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what every call of CUDA's driver answers before cuInit, but for its version."""

_MAX_WHY_CHARACTERS = 300


def preload(modules: Sequence[str]) -> dict[str, Any]:
    """Import these modules.

    Returns:
        {"ok": True, "read", "bytes"}: names of the variables that were read meanwhile and memory of this process that
        nothing shares; or {"ok": False, "why"}: one sentence.
    """
    with _reads() as read:
        for module in modules:
            try:
                importlib.import_module(module)
            except BaseException as error:  # noqa: BLE001 - SystemExit of a module is a failed import, too
                told = "".join(traceback.format_exception_only(error)).strip()
                return {"ok": False, "why": f"`import {module}` failed: {told}"[:_MAX_WHY_CHARACTERS]}
            if touched := touched_device():
                return {"ok": False, "why": f"`import {module}` {touched}, which ties the process to these devices"}
    return {"ok": True, "read": sorted(read), "bytes": _private_bytes()}


def touched_device(proc: Path = Path("/proc/self")) -> str:
    """How this process has begun to compute on a device; empty: it hasn't."""
    for descriptor in (proc / "fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue  # the one that the listing itself had open
        if target.startswith(_DEVICE_FILES):
            return f"opened {target}"
    libraries = {line.split()[-1] for line in (proc / "maps").read_text().splitlines() if _CUDA in line}
    for path in sorted(libraries):
        if ctypes.CDLL(path).cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED:
            return "initialized CUDA"
    return ""


@contextmanager
def _reads() -> Iterator[set[str]]:
    """Names of the variables that Python code reads while the block runs."""
    read: set[str] = set()
    environ: Any = type(os.environ)
    get, go_through = environ.__getitem__, environ.__iter__

    def noted_get(self: Any, name: Any) -> Any:
        read.add(os.fsdecode(name) if isinstance(name, str | bytes) else ANY)
        return get(self, name)

    def noted_go_through(self: Any) -> Any:
        read.add(ANY)
        return go_through(self)

    environ.__getitem__, environ.__iter__ = noted_get, noted_go_through
    try:
        yield read
    finally:
        environ.__getitem__, environ.__iter__ = get, go_through


def _private_bytes() -> int:
    rolled_up = Path("/proc/self/smaps_rollup").read_text()
    private = (line for line in rolled_up.splitlines() if line.startswith("Private_"))
    return sum(int(line.split()[1]) for line in private) * 1024
