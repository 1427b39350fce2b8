"""What sits on the node's devices besides its own work, and which of them must not be given more: looked at all the
time, through NVML.

A device takes no new work while another's process holds much of its memory (unless the node is to warn or to ignore
it), while memory of a worker that is gone isn't back, and when its driver has lost it or reports memory that broke.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from callboard.agents.options import AgentOptions
from callboard.agents.system.gpu_faults import XID_NAMES, Health, XidWatch
from callboard.agents.system.gpu_users import DevicesSeen, DeviceUse, seen_devices
from callboard.agents.system.nvml import NoDriver
from callboard.agents.system.processes import Processes
from callboard.agents.system.tasks import answer_within
from callboard.security.processes import PROC, ProcessId, read_entry
from callboard.v1 import common_pb2

_LOOK_S = 5.0
"""Between two looks: some milliseconds of the driver's time each."""

_AGAIN_S = 1.0
"""Before a second look at what a first one found: a process that just ends is no finding."""

MAX_SHOWN = 8
"""Processes that are told of one device."""

_RESERVED_PART = 50
"""Of a device's memory, one part in so many that a driver may keep for itself, where it doesn't say how much."""

_STEP_BYTES = 64 << 20
"""Amounts of memory are told in steps, so that small changes aren't changes."""


_BESIDE = ", or start the agent with --foreign-gpu-use warn to place work beside it"


class DeviceWatch:
    """Watches the devices of one node."""

    def __init__(
        self,
        devices: Sequence[common_pb2.Device],
        options: AgentOptions,
        processes: Processes,
        *,
        holders: Callable[[], Mapping[str, str]],
        on_change: Callable[[], None],
        look: Callable[[Iterable[common_pb2.Device]], DevicesSeen] = seen_devices,
    ) -> None:
        """
        Args:
            devices: the node's; those without a driver that answers are left out.
            options: of the agent: what is done about others' processes.
            holders: by id of each device that workers of this node hold now, how one of them is called.
            on_change: called when a device opens or closes.
        """
        self.states: list[common_pb2.DeviceState] = []
        self._devices = [device for device in devices if device.uuid]
        self._options = options
        self._processes = processes
        self._holders = holders
        self._on_change = on_change
        self._look = look
        self._first_health: dict[int, Health] = {}
        self._xids = XidWatch(self._devices)
        self._ailing: set[int] = set()
        self._now = asyncio.Event()

    def look_soon(self) -> None:
        """Look now: a worker is gone."""
        self._now.set()

    async def run(self) -> None:
        """Watch until cancelled; where there is nothing to watch, wait."""
        try:
            while True:
                self._now.clear()
                await self.look()
                await answer_within(self._now.wait(), _LOOK_S if self._devices else None)
        finally:
            self._xids.close()

    async def look(self) -> None:
        """Look once, and a second time at what is new."""
        if not self._devices:
            return
        states = await self._seen()
        if _closed(states) - _closed(self.states):
            await asyncio.sleep(_AGAIN_S)
            states = await self._seen()
        changed = _closed(states) ^ _closed(self.states)
        self.states = states
        if changed:
            self._on_change()

    async def _seen(self) -> list[common_pb2.DeviceState]:
        try:
            seen = await asyncio.to_thread(self._look, self._devices)
            await asyncio.to_thread(self._xids.poll)
        except NoDriver as error:
            why = f"NVIDIA's driver does not answer: {error}"
            return [common_pb2.DeviceState(index=device.index, closed=why) for device in self._devices]
        strangers = {user.pid for user in seen.users}
        own = await self._processes.ours() if strangers else frozenset[ProcessId]()
        strangers -= {process.pid for process in own}
        return [self._state(device, seen, strangers) for device in self._devices]

    def _state(self, device: common_pb2.Device, seen: DevicesSeen, strangers: set[int]) -> common_pb2.DeviceState:
        index = device.index
        state = common_pb2.DeviceState(index=index)
        health = seen.healths.get(index, Health())
        xid = self._xid_of(index, ailing=index in seen.lost or bool(health.needs_reset))
        told = f"Xid {xid} ({XID_NAMES.get(xid, 'see the catalog of Xids by NVIDIA')})"
        if index in seen.lost:
            state.closed = (
                f"its driver has lost it: {seen.lost[index]}{f', after {told}' if xid else ''}; a reset of it or a "
                "restart of the machine may help"
            )
            return state
        worse = health.worse_than(self._first_health.setdefault(index, health))
        load = next((each for each in seen.loads if each.index == index), None)
        if load is None:
            return state
        state.used_memory_bytes = load.used_memory_bytes // _STEP_BYTES * _STEP_BYTES
        held = self._holders().get(device.id, "")
        # The driver may name processes by numbers of another pid namespace: such a one may be ours while one of ours
        # is there.
        users = [user for user in seen.users if user.index == index]
        foreign = [user for user in users if user.pid in strangers and (not held or read_entry(user.pid) is not None)]
        foreign = [user for user in foreign if not _is_ending(user.pid)]
        foreign.sort(key=lambda user: -user.memory_bytes)
        state.foreign.extend(_process(user) for user in foreign[:MAX_SHOWN])
        amount = sum(user.memory_bytes for user in foreign)
        kept = load.reserved_memory_bytes or load.memory_bytes // _RESERVED_PART
        unnamed = 0 if held or foreign else load.used_memory_bytes - kept
        if health.needs_reset:
            state.closed = f"{health.needs_reset}; reset it (`nvidia-smi -r -i {device.id}`) or replace it"
        elif xid:
            state.closed = (
                f"its driver reported {told}; reset it (`nvidia-smi -r -i {device.id}`) or replace it, and then open "
                f"it again (`callboard node uncordon NODE --gpu {index}`)"
            )
        elif worse:
            state.closed = f"{worse} since this agent started; reset it (`nvidia-smi -r -i {device.id}`)"
        elif foreign and (amount > self._options.foreign_gpu_bytes or any(not user.memory_bytes for user in foreign)):
            pids = " ".join(str(user.pid) for user in foreign[:MAX_SHOWN] if user.pid)
            ending = f"end it if nobody needs it (`kill {pids}`)" if pids else "end it if nobody needs it"
            self._judge(state, f"{_described(state.foreign, amount, len(foreign))}; {ending}{_BESIDE}")
        elif unnamed > self._options.foreign_gpu_bytes:
            what = f"{_gib(unnamed)} of its memory are in use, by no process that the driver names"
            self._judge(state, f"{what}; end what runs there{_BESIDE}")
        if health.warning and not state.warning:
            state.warning = health.warning
        return state

    def _xid_of(self, index: int, *, ailing: bool) -> int:
        """The Xid that a device suffers from; 0: none. One after which the driver lost it or asked for its reset is
        over when the driver does so no more. Of any other only people know when it is."""
        xid = self._xids.faults.get(index, 0)
        if xid and ailing:
            self._ailing.add(index)
        elif index in self._ailing:
            self._ailing.discard(index)
            self._xids.forget(index)
            return 0
        return xid

    def _judge(self, state: common_pb2.DeviceState, what: str) -> None:
        match self._options.foreign_gpu_use:
            case "avoid":
                state.closed = what
            case "warn":
                state.warning = what.removesuffix(_BESIDE)
            case _:
                pass


def _closed(states: Iterable[common_pb2.DeviceState]) -> set[int]:
    return {state.index for state in states if state.closed}


def _described(foreign: Sequence[common_pb2.DeviceProcess], amount: int, count: int) -> str:
    """ "python of alice (pid 4711) holds 70GiB of its memory"."""
    first = foreign[0]
    who = f"{first.command or 'a process'}{f' of {first.user}' if first.user else ''} (pid {first.pid})"
    who += f" and {count - 1} more" if count > 1 else ""
    holds = "hold" if count > 1 else "holds"
    held = f"{_gib(amount)} of its memory" if amount else "memory of it, of which the driver does not say how much"
    return f"{who}, which is not this cluster's, {holds} {held}"


def _gib(amount_bytes: int) -> str:
    return f"{amount_bytes / (1 << 30):.1f} GiB"


def _process(user: DeviceUse) -> common_pb2.DeviceProcess:
    folder = PROC / str(user.pid)
    return common_pb2.DeviceProcess(
        pid=user.pid, user=_owner(folder), command=_command(folder), memory_bytes=user.memory_bytes
    )


def _owner(folder: Path) -> str:
    try:
        number = folder.stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _command(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _is_ending(pid: int) -> bool:
    """Whether a process is over and only its parent hasn't looked yet."""
    entry = read_entry(pid)
    return pid == os.getpid() or (entry is not None and entry.gone)
