"""Placement groups in Ray that hold exactly the devices that the ledger names.

What groups of ours hold of each node is written in Ray's own store, so that every driver, and the next one, knows what
is free in Ray, and with it what Ray will choose (`ray_choice`). Where Ray's sums agree with that, a group that it will
give its devices is simply made. Where they don't (somebody else took a GPU, or something is just being given back), a
task inside each bundle tells which devices it got, and what came out otherwise is made again.

Everything here blocks: the driver calls it from threads.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node, total_resources_per_node
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from callboard.agents.ray.ray_choice import DeviceTaken, Filler, NoOrder, Shares, amount, fillers
from callboard.model.quantities import MILLI

NAMESPACE = "callboard"

_HELD = "callboard/gpus/"
"""Before a node's Ray id and a group's: what the group holds of the node; and, for as long as a driver makes a group
there, before the node's and the driver's."""
_MAKING = "making-"
_ORDER = "callboard/order/"
"""Before a group's Ray id: which of Ray's bundles is which of ours, where their order differs."""

_SLICE_S = 0.5
"""Between looks at whether a group that is being made is still wanted."""

_TURN_S = 5.0
"""For one try, while which others wait for the same node's devices; beyond, they have their turn."""

_SETTLED_S = 0.5
"""For Ray's sums to hear that something was given back: a report of the node, every 0.1 s."""

_POLL_S = 0.02
"""Between looks at what Ray has no call to wait for."""

_PAUSE_S = (0.1, 0.6)
"""Between tries, by chance, so that two drivers that hinder each other don't do so again."""

_NO_ROOM = "Ray has no room for it"


class NotBooked(Exception):
    """A placement group can't be made as asked; nothing of it is left."""


@dataclass
class _Bundle:
    """One bundle as it is asked of Ray.

    Attributes:
        ours: its index among the bundles of the ledger's group.
        devices: what it must have, or what Ray gave it where that will do.
    """

    ours: int
    node: str
    resources: dict[str, float]
    devices: Shares


@dataclass
class _Room:
    """What is free of a node's devices in Ray, as far as is known.

    Attributes:
        certain: Ray's own sum agrees, and nobody else is making a group there.
        names: entries in Ray's store that it was read from.
    """

    free: list[int]
    certain: bool
    names: frozenset[str]
    held: list[tuple[PlacementGroup, Filler]] = field(default_factory=list)


class Bookings:
    """Makes and removes the groups of one driver."""

    def __init__(self) -> None:
        self._id = f"{_MAKING}{uuid.uuid4().hex}"
        self._unwanted: set[str] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._locks_lock = threading.Lock()
        self._gpus: dict[str, int] = {}

    def book(self, name: str, bundles: list[dict[str, Any]], timeout_s: float, certain: bool) -> dict[str, Any]:
        """Make a group, wait until it is ready, and see to it that it is what was asked.

        Args:
            bundles: {"ray_node_id", "resources", "devices": [[index, thousandths], …]} of each.
            certain: it must have these devices; otherwise it may be given others where Ray has more users than ours.

        Returns:
            {"ray_id", "devices": indexes of each bundle's where they are others than were asked, else nothing}.

        Raises:
            NotBooked: it can't be made so.
        """
        self._unwanted.discard(name)
        asked = [
            _Bundle(i, each["ray_node_id"], each["resources"], tuple((at, milli) for at, milli in each["devices"]))
            for i, each in enumerate(bundles)
        ]
        asked.sort(key=lambda each: (each.node, sorted(each.devices)) if each.devices else ("", []))
        certain = certain or any(milli % MILLI for each in asked for _, milli in each.devices)
        deadline = time.monotonic() + timeout_s
        nodes = sorted({each.node for each in asked if each.devices})
        problem = _NO_ROOM
        while True:
            with self._turn(nodes):
                group, found = self._try(name, asked, nodes, deadline, certain)
            # The last try may have had no time to find out as much as one before it.
            problem = found if problem == _NO_ROOM else problem
            if group is not None:
                got = {each.ours: [index for index, _ in each.devices] for each in asked}
                other = any(got[i] != [index for index, _ in each["devices"]] for i, each in enumerate(bundles))
                return {"ray_id": group.id.hex(), "devices": [got[i] for i in sorted(got)] if other else []}
            pause_s = random.uniform(*_PAUSE_S)  # noqa: S311 - two drivers shall differ, that is all
            if time.monotonic() + pause_s >= deadline:
                raise NotBooked(f"not ready after {timeout_s:g} s: {problem}")
            time.sleep(pause_s)

    def remove(self, name: str, ray_id: str) -> None:
        """Remove a group, by id or else by name; returns once Ray says that it is gone."""
        self._unwanted.add(name)
        group = group_of(ray_id) if ray_id else _find(name)
        if group is not None:
            self._remove(group)

    @staticmethod
    def index_of(ray_id: str, bundle_index: int) -> int:
        """Ray's index of a bundle of a group."""
        order: bytes | None = _internal_kv_get(_ORDER + ray_id, namespace=NAMESPACE)
        return bundle_index if order is None else int(json.loads(order).index(bundle_index))

    # One try.

    @contextmanager
    def _turn(self, nodes: Sequence[str]) -> Iterator[None]:
        """One group at a time takes devices of a node; in the order of the nodes, so that nobody waits in a circle."""
        with self._locks_lock:
            locks = [self._locks.setdefault(node, threading.Lock()) for node in nodes]
        for lock in locks:
            lock.acquire()
        for node in nodes:
            _internal_kv_put(f"{_HELD}{node}/{self._id}", b"", overwrite=True, namespace=NAMESPACE)
        try:
            yield
        finally:
            for node in nodes:
                _internal_kv_del(f"{_HELD}{node}/{self._id}", namespace=NAMESPACE)
            for lock in locks:
                lock.release()

    def _try(
        self, name: str, asked: Sequence[_Bundle], nodes: Sequence[str], deadline: float, certain: bool
    ) -> tuple[PlacementGroup | None, str]:
        """The group, or what was in the way; then nothing of it is left.

        Raises:
            NotBooked: another try would come to the same.
        """
        rooms: dict[str, _Room] = {}
        group = _find(name)  # a driver before us may have made it
        done = False
        try:
            while not done:
                if group is None:
                    rooms = rooms or {node: self._room(node, certain) for node in nodes}
                    for node in nodes if certain or all(room.certain for room in rooms.values()) else ():
                        self._fill(rooms[node], _on(asked, node), node, deadline)
                    group = _make(name, asked)
                if not self._is_ready(group, name, min(deadline, time.monotonic() + _TURN_S) if nodes else deadline):
                    return None, _NO_ROOM
                if problem := difference(asked, placement_group_table(group)):
                    raise NotBooked(problem)
                done = not nodes or self._holds(group, asked, rooms, deadline, certain)
                if not done:
                    self._remove(group)
                    group = None
            assert group is not None, "done is said of a group"
            self._record(group, asked, nodes)
        except (DeviceTaken, TimeoutError, RayError) as error:
            return None, _why(error)
        except NoOrder as error:
            raise NotBooked(_why(error)) from error
        finally:
            if group is not None and not done:
                # At once: a pending group would take the next node that joins.
                self._remove(group)
            for filler, _ in [held for room in rooms.values() for held in room.held]:
                remove_placement_group(filler)
        return group, ""

    def _holds(
        self,
        group: PlacementGroup,
        asked: Sequence[_Bundle],
        rooms: Mapping[str, _Room],
        deadline: float,
        certain: bool,
    ) -> bool:
        """Whether a group holds the devices that were asked: by what is known of Ray, or by its own word. One that may
        hold others is asked for those that it has from now on."""
        if rooms and all(self._was_certain(node, room, _on(asked, node)) for node, room in rooms.items()):
            return True
        named = [(i, each) for i, each in enumerate(asked) if each.devices]
        got = _ask(group, [(i, amount(each.devices)) for i, each in named], deadline)
        wrong = False
        for (_, each), indexes in zip(named, got, strict=True):
            expected = sorted(index for index, _ in each.devices)
            if indexes == expected:
                continue
            if not certain:
                each.devices = tuple((index, MILLI) for index in indexes)
                continue
            wrong = True
            if each.node in rooms:
                _learn(rooms[each.node], expected, indexes, amount(each.devices))
        return not wrong

    @staticmethod
    def _record(group: PlacementGroup, asked: Sequence[_Bundle], nodes: Sequence[str]) -> None:
        """Say in Ray's store what a group holds, and which of its bundles is which of ours."""
        ray_id = group.id.hex()
        for node in nodes:
            held = {index: milli for bundle in _on(asked, node) for index, milli in bundle}
            _internal_kv_put(_HELD + f"{node}/{ray_id}", json.dumps(held).encode(), overwrite=True, namespace=NAMESPACE)
        order = [each.ours for each in asked]
        if order != sorted(order):
            _internal_kv_put(_ORDER + ray_id, json.dumps(order).encode(), overwrite=True, namespace=NAMESPACE)

    # What is free.

    def _room(self, node: str, patient: bool) -> _Room:
        """What is free on a node by what is recorded; certain where Ray's sum agrees, which it may take a moment to."""
        deadline = time.monotonic() + (_SETTLED_S if patient else 0.0)
        while True:
            room = self._look(node)
            if room.certain or time.monotonic() > deadline:
                return room
            time.sleep(_POLL_S)

    def _look(self, node: str) -> _Room:
        if node not in self._gpus:
            totals: dict[str, dict[str, float]] = total_resources_per_node()  # type: ignore[no-untyped-call]
            self._gpus[node] = int(totals.get(node, {}).get("GPU", 0))
        names = _names(node)
        free = [MILLI] * self._gpus[node]
        others = 0
        for name in names:
            if name.startswith(_MAKING):
                others += name != self._id
                continue
            held: bytes | None = _internal_kv_get(f"{_HELD}{node}/{name}", namespace=NAMESPACE)
            for index, milli in json.loads(held or b"{}").items():
                if int(index) < len(free):
                    free[int(index)] -= milli
        certain = not others and self._free_milli(node) == sum(free)
        if not certain:
            # The group may be gone, without us or before its record.
            for name in names:
                if not name.startswith(_MAKING) and _state(group_of(name)) in {"", "REMOVED"}:
                    _internal_kv_del(f"{_HELD}{node}/{name}", namespace=NAMESPACE)
        return _Room(free, certain, names)

    def _was_certain(self, node: str, room: _Room, shares: Sequence[Shares]) -> bool:
        """Whether nothing happened beside the making of a group."""
        left = sum(room.free) - sum(map(amount, shares))
        return room.certain and _names(node) == room.names and self._free_milli(node) == left

    @staticmethod
    def _free_milli(node: str) -> int:
        """Ray's own sum of what is free of a node's devices."""
        left: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return round(left.get(node, {}).get("GPU", 0.0) * MILLI)

    # Fillers.

    def _fill(self, room: _Room, shares: Sequence[Shares], node: str, deadline: float) -> None:
        """Book what Ray would choose instead of the devices that a group must have.

        Raises:
            DeviceTaken: one of those isn't free.
            NoOrder: Ray can't be led to them.
            TimeoutError: not all is there in time.
        """
        as_planned = False
        while not as_planned:
            as_planned = True
            for step in fillers(room.free, shares):
                group = _make_filler(node, step.milli)
                room.held.append((group, step))
                if not group.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                if not room.certain:
                    ((got,),) = _ask(group, [(0, step.milli)], deadline)
                    if got != step.index:
                        room.held[-1] = (group, Filler(got, step.milli, passing=True))
                        _learn(room, [step.index], [got], step.milli)
                        room.free[got] -= step.milli
                        as_planned = False
                        break
                room.free[step.index] -= step.milli
            self._give_back(room)

    @staticmethod
    def _give_back(room: _Room) -> None:
        """Remove the fillers that only led others past a device."""
        passing = [(group, step) for group, step in room.held if step.passing]
        room.held = [(group, step) for group, step in room.held if not step.passing]
        for group, step in passing:
            _remove_and_wait(group)
            room.free[step.index] += step.milli
            room.certain = False  # Ray's sums hear of it later.

    # Groups.

    def _is_ready(self, group: PlacementGroup, name: str, deadline: float) -> bool:
        """Whether the group gets ready in time.

        Raises:
            NotBooked: nobody wants it any more.
        """
        while (left_s := deadline - time.monotonic()) > 0:
            if name in self._unwanted:
                raise NotBooked("it was removed while it was being made")
            if group.wait(min(left_s, _SLICE_S)):
                return True
        return False

    @staticmethod
    def _remove(group: PlacementGroup) -> None:
        ray_id = group.id.hex()
        nodes = {node for node in placement_group_table(group).get("bundles_to_node_id", {}).values() if node}
        _remove_and_wait(group)
        for node in sorted(nodes):
            _internal_kv_del(f"{_HELD}{node}/{ray_id}", namespace=NAMESPACE)
        _internal_kv_del(_ORDER + ray_id, namespace=NAMESPACE)


def difference(asked: Sequence[_Bundle], table: dict[str, Any]) -> str:
    """What Ray booked otherwise than asked; empty when nothing."""
    if table.get("state") != "CREATED":
        return f"Ray says {table.get('state')}"
    for index, bundle in enumerate(asked):
        node = table["bundles_to_node_id"].get(index)
        if node != bundle.node:
            return f"bundle {bundle.ours} is on Ray node {node}, not on {bundle.node}"
        booked = {name: float(amount) for name, amount in table["bundles"][index].items()}
        if booked != {name: float(amount) for name, amount in bundle.resources.items()}:
            return f"bundle {bundle.ours} books {booked}, not {bundle.resources}"
    return ""


def group_of(ray_id: str) -> PlacementGroup:
    """Ray's handle of a group."""
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(ray_id)))


def _on(asked: Sequence[_Bundle], node: str) -> list[Shares]:
    """The devices that bundles must have on a node, in Ray's order."""
    return [each.devices for each in asked if each.node == node and each.devices]


def _why(error: Exception) -> str:
    """What was in the way, as people are told."""
    if isinstance(error, DeviceTaken):
        return f"Ray has given GPU {error.index} to something that callboard doesn't know of"
    if isinstance(error, TimeoutError):
        return "Ray is slow to tell which GPUs it gives"
    if isinstance(error, NoOrder):
        return "Ray would give its bundles other GPUs, in whatever order"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _learn(room: _Room, expected: Sequence[int], got: Sequence[int], milli: int) -> None:
    """Correct what was thought of a node, by what Ray chose there."""
    free = min(milli, MILLI)
    mistaken = [index for index in got if index not in expected and room.free[index] < free]
    for index in mistaken:
        room.free[index] = free
    room.certain = False
    if not mistaken:
        for index in expected:
            if index not in got:
                room.free[index] = min(room.free[index], free - 1)


def _ask(group: PlacementGroup, bundles: Sequence[tuple[int, int]], deadline: float) -> list[list[int]]:
    """The indexes of the devices that bundles hold, by a task in each that asks for all of it.

    Args:
        bundles: (Ray's index, thousandths of a GPU that it books).

    Raises:
        TimeoutError: they didn't tell in time.
    """
    tasks = [
        _held.options(
            num_gpus=milli / MILLI,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index, milli in bundles
    ]
    got: list[list[int]] = ray.get(tasks, timeout=max(0.0, deadline - time.monotonic()))
    return got


@ray.remote(num_cpus=0, max_retries=0)
def _held() -> list[int]:
    """Inside a bundle: the devices it got, counted as the node's Ray counts them, whatever they are called."""
    worker: Any = ray._private.worker.global_worker  # noqa: SLF001 - the public call names devices, not positions
    slots: dict[str, list[tuple[int, float]]] = worker.core_worker.resource_ids()
    return sorted({index for name, each in slots.items() if name.startswith("GPU_group_") for index, _ in each})


def _make(name: str, asked: Sequence[_Bundle]) -> PlacementGroup:
    """Ask Ray for a group; returns at once.

    Always PACK: the nodes are ours to choose, and STRICT_SPREAD with two bundles for one node never gets ready (m).
    Pinned by Ray's own node id: by a label of ours the group would come back on the node's next raylet as a ghost (m).
    """
    group: PlacementGroup = placement_group(
        [each.resources for each in asked],
        strategy="PACK",
        name=name,
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": each.node} for each in asked],
    )
    return group


def _make_filler(node: str, milli: int) -> PlacementGroup:
    """Not detached: those of a driver that died go with it. Without a name, for a name can be given once."""
    group: PlacementGroup = placement_group([{"GPU": milli / MILLI}], bundle_label_selector=[{"ray.io/node-id": node}])
    return group


def _find(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = get_placement_group(name)
    except ValueError:  # Ray's way to say that there is none.
        return None
    return group


def _remove_and_wait(group: PlacementGroup) -> None:
    remove_placement_group(group)
    while _state(group) not in {"", "REMOVED"}:
        time.sleep(_POLL_S)


def _state(group: PlacementGroup) -> str:
    return str(placement_group_table(group).get("state", ""))


def _names(node: str) -> frozenset[str]:
    """What is recorded of a node: ids of groups, and drivers that are making one there."""
    prefix = f"{_HELD}{node}/"
    keys: list[bytes] = _internal_kv_list(prefix, namespace=NAMESPACE)
    return frozenset(key.decode().removeprefix(prefix) for key in keys)
