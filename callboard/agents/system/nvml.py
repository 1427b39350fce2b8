"""NVML, which NVIDIA's driver is asked through: opened for each question and closed after it, but for its events.

Only agents have the bindings, and only some of their questions need them; so they are imported here, when one is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoDriver(Exception):
    """The driver of the devices can't be asked."""


@contextmanager
def opened() -> Iterator[Any]:
    """The module `pynvml`, initialised as long as the block runs.

    Raises:
        NoDriver: it isn't there, or what the block asked failed.
    """
    nvml = initialised()
    try:
        yield nvml
    except failures(nvml) as error:
        raise NoDriver(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def initialised() -> Any:
    """The same for whoever shuts it down some time.

    Raises:
        NoDriver: it isn't there.
    """
    try:
        import pynvml  # noqa: PLC0415 - see the module's docstring
    except ImportError as error:
        raise NoDriver("the package nvidia-ml-py is missing") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDriver(str(error)) from error
    return pynvml


def unsaid(nvml: Any) -> tuple[type[Exception], ...]:
    """How a device answers what it can't say, or a driver that is older than the bindings."""
    return (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument, nvml.NVMLError_FunctionNotFound)


def failures(nvml: Any) -> tuple[type[Exception], ...]:
    """What a question may raise: also that the driver is older than the bindings, which is no NVMLError of theirs."""
    return (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
