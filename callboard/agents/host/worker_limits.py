"""The limits of a worker, where its component asks for them: the memory of its GPUs that PyTorch's own allocator keeps
to, and the CPUs that it runs on.

PyTorch takes a limit only once a process uses its GPUs, and a worker may import it at any time or never. So the limit
is left with `torch.cuda` when that is imported, to be set as soon as CUDA is initialised; nothing is imported, and no
device touched, for its sake. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def run_on(cpus: Collection[int]) -> None:
    """From now on, every thread of this process and whatever it starts runs on these CPUs only; none: as before."""
    if not cpus:
        return
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:
            continue  # it has ended meanwhile
        except OSError as error:
            sys.stderr.write(f"callboard: this worker runs on any CPU, not on {sorted(cpus)}: {error}\n")
            return


_TORCH = "torch.cuda"


def limit_gpu_memory(limit_bytes: int) -> None:
    """From now on, PyTorch allocates at most so much on each GPU that this process sees; 0: as much as there is."""
    if limit_bytes <= 0:
        return
    there = sys.modules.get(_TORCH)
    if there is None:
        sys.meta_path.insert(0, _OnImport(limit_bytes))
    else:
        _leave(there, limit_bytes)


class _OnImport(MetaPathFinder):
    """Waits for the import of `torch.cuda`, once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module's own spec, of which this takes note; None for every other module."""
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _leave(module, self._limit_bytes)

        loader.exec_module = exec_module
        return spec


def _leave(cuda: Any, limit_bytes: int) -> None:
    def limit() -> None:
        for index in range(cuda.device_count()):
            whole = cuda.get_device_properties(index).total_memory
            cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), index)

    cuda._lazy_call(limit)  # noqa: SLF001 - what PyTorch itself puts off until CUDA is initialised goes this way
