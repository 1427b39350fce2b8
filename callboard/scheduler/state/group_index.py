"""The index of placement groups: by node, pool and state, and by the agent that acts on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from callboard.scheduler.records.pool_records import GroupRecord
from callboard.scheduler.records.states import GROUP_CREATING, GROUP_REMOVING, KIND_DYNAMIC, GroupState
from callboard.scheduler.state.indexes import InOrder, Members, add, mark, remove


class GroupIndex:
    """The indexes over placement groups, in the order of their numbers.

    Attributes:
        by_executor: groups that are being made or removed, by the node whose agent does it.
        by_ray_id: groups by the id that Ray gave them.
        orphans: groups that are being removed, and whose agent is gone.
        returning: groups that are being removed, and of which a part lies on a node that is there: a plan for later
            looks at them all, and after an outage most of those that are removed are of nodes that are gone.
        idle: dynamic groups that no job has.
        doomed: groups that are removed as soon as nobody holds them.
    """

    def __init__(self, groups: Mapping[str, GroupRecord], is_there: Callable[[str], bool]) -> None:
        """
        Args:
            groups: the records.
            is_there: whether there is a node of this id and it is not gone; see :meth:`node_came_or_went`.
        """
        self._groups = groups
        self._is_there = is_there
        self.of_pool: dict[str, Members[str]] = {}
        self.on_node: dict[str, Members[str]] = {}
        self.by_state: dict[GroupState, InOrder[str, int]] = {state: InOrder() for state in GroupState}
        self.by_executor: dict[str, Members[str]] = {}
        self.by_ray_id: dict[str, Members[str]] = {}
        self.orphans: InOrder[str, int] = InOrder()
        self.returning: InOrder[str, int] = InOrder()
        self.idle: InOrder[str, int] = InOrder()
        self.doomed: InOrder[str, int] = InOrder()

    def update(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        """Follows a group after its record changed."""
        if old is None and new is not None:
            add(self.of_pool, new.pool, new.group_id, new.number)
        elif old is not None and new is None:
            remove(self.of_pool, old.pool, old.group_id)
        if old is None or new is None or old.state is not new.state:
            if old is not None:
                del self.by_state[old.state][old.group_id]
            if new is not None:
                self.by_state[new.state].put(new.group_id, new.number)
        self._follow_bundles(old, new)
        self._follow_executor(old, new)
        self._follow_ray_id(old, new)
        group = new or cast("GroupRecord", old)
        if group.state is GROUP_REMOVING or (old is not None and old.state is GROUP_REMOVING):
            self._follow_return(group, known=new is not None)
        if group.group_kind is KIND_DYNAMIC:
            mark(self.idle, group.group_id, group.number, wanted=new is not None and not new.job)
        if group.destroy or (old is not None and old.destroy):
            mark(self.doomed, group.group_id, group.number, wanted=new is not None and new.destroy)

    def node_came_or_went(self, node_id: str) -> None:
        """A node is there that was not, or the other way round."""
        gone = not self._is_there(node_id)
        for group_id, number in self.by_executor.get(node_id, {}).items():
            mark(self.orphans, group_id, number, wanted=gone and group_id in self.by_state[GROUP_REMOVING])
        for group_id in self.on_node.get(node_id, ()):
            self._follow_return(self._groups[group_id])

    def _follow_bundles(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        if old is not None and new is not None and old.bundles is new.bundles:
            return
        if old is not None:
            for node_id in dict.fromkeys(bundle.node_id for bundle in old.bundles):
                remove(self.on_node, node_id, old.group_id)
        if new is not None:
            for bundle in new.bundles:
                add(self.on_node, bundle.node_id, new.group_id, new.number)

    def _follow_executor(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        if old is not None and new is not None and old.state is new.state and old.executor == new.executor:
            return
        if old is not None and _is_under_way(old):
            remove(self.by_executor, old.executor, old.group_id)
            self.orphans.pop(old.group_id, None)
        if new is not None and _is_under_way(new):
            add(self.by_executor, new.executor, new.group_id, new.number)
            gone = new.state is GROUP_REMOVING and not self._is_there(new.executor)
            mark(self.orphans, new.group_id, new.number, wanted=gone)

    def _follow_return(self, group: GroupRecord, *, known: bool = True) -> None:
        there = any(self._is_there(bundle.node_id) for bundle in group.bundles)
        mark(self.returning, group.group_id, group.number, wanted=known and there and group.state is GROUP_REMOVING)

    def _follow_ray_id(self, old: GroupRecord | None, new: GroupRecord | None) -> None:
        was, now = old.ray_id if old is not None else "", new.ray_id if new is not None else ""
        if was == now:
            return
        if old is not None and was:
            remove(self.by_ray_id, was, old.group_id)
        if new is not None and now:
            add(self.by_ray_id, now, new.group_id, new.number)


def _is_under_way(group: GroupRecord) -> bool:
    return group.state is GROUP_CREATING or group.state is GROUP_REMOVING
