"""The lease file: when this node last heard from its controller, for its fence and for the next agent.

Times are of CLOCK_BOOTTIME: one clock for every process of the machine, which nobody can set and which counts on while
the machine sleeps. (The clock of the event loop doesn't, so an agent of a machine that slept for an hour would believe
that no time had passed, while its strict jobs run elsewhere for long.)
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

LEASE_FILE = "lease"

_LAYOUT = struct.Struct("<qqqq")
"""heard_ns, lease_ns, orphan_grace_ns, and the three of them XORed: a torn read is told from a whole one."""

_READS = 3
"""A torn read is repeated: the write that it met takes microseconds and comes twice a second at most."""


def boot_s() -> float:
    """Seconds since the machine was started, those it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class LeaseTerms:
    """As Welcome gave them, in seconds."""

    lease_s: float
    orphan_grace_s: float


@dataclass(frozen=True)
class HeardLease:
    """The lease as it was written last."""

    heard_s: float
    """On the clock of `boot_s`."""
    terms: LeaseTerms

    @property
    def until_s(self) -> float:
        """When it runs out, on the clock of `boot_s`."""
        return self.heard_s + self.terms.lease_s


class LeaseFile:
    """The agent's end of the file."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        # Written in place: a lease must be renewed on a full disk too (R10).
        self._descriptor = os.open(run_dir / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, heard: HeardLease) -> None:
        """Write it for the fence and for the next agent."""
        values = [round(seconds * 1e9) for seconds in (heard.heard_s, heard.terms.lease_s, heard.terms.orphan_grace_s)]
        os.pwrite(self._descriptor, _LAYOUT.pack(*values, values[0] ^ values[1] ^ values[2]), 0)

    def read(self) -> HeardLease | None:
        """What was written last; see `read_lease`."""
        return read_lease(self._folder)

    def close(self) -> None:
        """Write no more."""
        os.close(self._descriptor)


def read_lease(run_dir: Path) -> HeardLease | None:
    """What was written last; None when no session has begun since the machine was started."""
    try:
        descriptor = os.open(run_dir / LEASE_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        for _ in range(_READS):
            text = os.pread(descriptor, _LAYOUT.size, 0)
            if len(text) < _LAYOUT.size:
                return None
            heard_ns, lease_ns, grace_ns, check = _LAYOUT.unpack(text)
            if check == heard_ns ^ lease_ns ^ grace_ns:
                heard = HeardLease(heard_ns / 1e9, LeaseTerms(lease_ns / 1e9, grace_ns / 1e9))
                # Of an earlier life of the machine.
                return heard if heard.heard_s <= boot_s() else None
        return None
    finally:
        os.close(descriptor)
