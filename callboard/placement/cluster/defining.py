"""Node groups that a config defines: their nodes, their hardware and how workers start there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from callboard.model.describe import MASK
from callboard.model.inputs.located import shown_text
from callboard.model.names import ENV_NAME_PATTERN, is_env_name, why_refused
from callboard.model.specs import Labels
from callboard.placement.cluster.cluster import (
    RESERVED_LABELS,
    Cluster,
    EnvConfig,
    HardwareUnit,
    NodeGroup,
    declared_hardware,
)
from callboard.placement.cluster.describing import described_nodes, interpreter_path, settings_json
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report, Where
from callboard.placement.source.document import open_document
from callboard.placement.source.tree import Items, Leaf, Table, Value, kind_of

MAX_GROUPS = 1000
"""Most node groups of a config."""

_GROUP_KEYS = ("label", "node_ranks", "hardware", "env_configs", "ignore_hardware")
_UNREAD = "?"  # no label: of a group that states none
_HARDWARE_KEYS = ("type", "configs")
_ENV_KEYS = ("node_ranks", "python_interpreter_path", "env_vars")


def read_cluster(source: object) -> Cluster:
    """The cluster that ``nodes`` and ``node_groups`` of a config describe, at its top or under ``cluster``.

    Raises:
        InvalidInput: every fault.
    """
    report = Report()
    document = open_document(source, report)
    section = () if document.value("nodes") is not None else ("cluster",)
    nodes = document.value(*section, "nodes")
    if nodes is None:
        report.fault(Where("nodes"), "no nodes are described; write e.g. nodes: 8+8")
    cluster = described_nodes(nodes, report) if nodes is not None else None
    groups = document.value(*section, "node_groups")
    if cluster is not None and groups is not None:
        cluster = cluster.with_groups(node_groups(groups, cluster, report, set()))
    report.raise_any()
    assert cluster is not None
    return cluster


def node_groups(value: Value, cluster: Cluster, report: Report, defective: set[str]) -> tuple[NodeGroup, ...]:
    """The groups that ``node_groups`` defines; those with faults are left out, and their labels go to ``defective``."""
    if not isinstance(value, Items):
        what = "a list of groups, each with label and node_ranks"
        report.fault(value.where, f"{kind_of(value)} is not {what}", read=kind_of(value), allowed=what)
        return ()
    if len(value.items) > MAX_GROUPS:
        report.fault(value.where, f"{len(value.items)} node groups are too many; {MAX_GROUPS} are allowed")
        return ()
    groups: dict[str, NodeGroup] = {}
    taken: dict[tuple[int, str], str] = {}
    for item in value.items:
        found = fields.table(item, "e.g. {label: a800, node_ranks: 0-7}", report)
        if found is None:
            continue
        reader = _Group(found, cluster, report)
        group = reader.read()
        if group is None:
            if reader.label != _UNREAD:
                defective.add(reader.label)
            continue
        label_value = found.get("label") or found
        if group.label in groups:
            message = f"the label {shown_text(group.label)} occurs twice; labels are unique"
            report.fault(label_value.where, message, read=group.label)
            continue
        groups[group.label] = group
        for rank in dict.fromkeys(rank for rank, _ in group.hardware):
            first = taken.setdefault((rank, group.hardware_type), group.label)
            if first != group.label:
                report.fault(
                    label_value.where,
                    f"the groups {first} and {group.label} both number the {group.hardware_type}s of node {rank}; "
                    "hardware of one type of a node is in one group",
                    read=group.label,
                )
    return tuple(groups.values())


class _Group:
    """Reads one node group."""

    def __init__(self, found: Table, cluster: Cluster, report: Report) -> None:
        self._found = found
        self._cluster = cluster
        self._report = report
        self.label = _UNREAD
        self._ranks: tuple[int, ...] | None = None

    def read(self) -> NodeGroup | None:
        """The group, or None with faults."""
        report = self._report
        faults_before = len(report.faults)
        fields.known_keys(self._found, _GROUP_KEYS, report)
        label = self._read_label()
        self._ranks = self._node_ranks(label)
        ignore = self._found.get("ignore_hardware")
        ignored = ignore is not None and bool(fields.flag(ignore, "ignore_hardware", report))
        hardware_value = self._found.get("hardware")
        hardware_type, hardware = self._hardware(hardware_value) if hardware_value is not None else ("", ())
        if ignored and hardware_value is not None:
            message = "ignore_hardware makes plain nodes of the group, so it excludes hardware; leave one of them out"
            report.fault(hardware_value.where, message)
        env_value = self._found.get("env_configs")
        env = self._env_configs(env_value) if env_value is not None else ()
        if label is None or self._ranks is None or len(report.faults) > faults_before:
            return None
        return NodeGroup(
            label=label,
            node_ranks=self._ranks,
            hardware_type=hardware_type,
            hardware=hardware,
            env_configs=env,
            ignore_hardware=ignored,
        )

    def _read_label(self) -> str | None:
        value = self._found.get("label")
        if value is None:
            self._missing("label", "a node group needs a label", "label: a800")
            return None
        if isinstance(value, Leaf):
            self.label = value.text.strip()
        label = fields.label(value, "label", self._report)
        if label in RESERVED_LABELS:
            every = "every node" if label == "cluster" else "every node without its hardware"
            self._report.fault(value.where, f"the label {label!r} is reserved: it means {every}", read=label)
            return None
        return label

    def _node_ranks(self, label: str | None) -> tuple[int, ...] | None:
        value = self._found.get("node_ranks")
        if value is not None:
            return fields.node_ranks(value, [node.rank for node in self._cluster.nodes], self._report)
        joined = tuple(node.rank for node in self._cluster.nodes if label and node.node_group == label)
        if joined:
            return joined
        if label:
            message = f"the node group {label} needs node_ranks, as no node joined with this group"
            self._missing("node_ranks", message, "node_ranks: 0-3")
        return None

    def _missing(self, key: str, message: str, example: str) -> None:
        if key not in fields.meant_keys(self._found, _GROUP_KEYS):
            self._report.fault(self._found.where, f"{message}; write e.g. {example}", allowed=example)

    def _hardware(self, value: Value) -> tuple[str, tuple[tuple[int, HardwareUnit], ...]]:
        report = self._report
        found = fields.table(value, "e.g. {type: Franka, configs: [{node_rank: 0}]}", report)
        if found is None:
            return "", ()
        fields.known_keys(found, _HARDWARE_KEYS, report)
        kind_value, configs = found.get("type"), found.get("configs")
        if kind_value is None:
            if "type" not in fields.meant_keys(found, _HARDWARE_KEYS):
                report.fault(found.where, "hardware needs a type; write e.g. type: Franka", allowed="type: Franka")
            return "", ()
        kind = fields.label(kind_value, "hardware type", report) or ""
        members = [self._cluster.by_rank[rank] for rank in self._ranks or ()]
        declared = declared_hardware(members, kind)
        if configs is None:
            if self._ranks is not None and kind and not declared:
                report.fault(
                    found.where,
                    f"no node of the group {self.label} declared a {kind}, so its configs must be stated",
                    allowed="configs: [{node_rank: 0}]",
                )
            return kind, declared
        units = self._units(configs, kind)
        self._compare(declared, units, configs.where)
        return kind, units

    def _units(self, configs: Value, kind: str) -> tuple[tuple[int, HardwareUnit], ...]:
        report = self._report
        if not isinstance(configs, Items) or not configs.items:
            empty = isinstance(configs, Items)
            said = "the list of configs is empty" if empty else f"{kind_of(configs)} is not a list of configs"
            report.fault(configs.where, f"{said}; write e.g. [{{node_rank: 0}}]", allowed="[{node_rank: 0}]")
            return ()
        units: list[tuple[int, HardwareUnit]] = []
        seen: set[tuple[int, str]] = set()
        for item in configs.items:
            found = fields.table(item, "e.g. {node_rank: 0}", report)
            if found is None:
                continue
            rank_value = found.get("node_rank")
            if rank_value is None:
                report.fault(found.where, f"a config of the {kind} needs its node_rank", allowed="node_rank: 0")
                continue
            rank = fields.whole(rank_value, 0, 10**6, "node rank", report)
            settings = settings_json(found, "node_rank", report)
            if rank is None or not self._inside(rank, rank_value.where, f"hardware {kind}"):
                continue
            if (rank, settings) in seen:
                report.fault(found.where, f"this {kind} of node {rank} is stated twice, with equal settings")
            seen.add((rank, settings))
            units.append((rank, HardwareUnit(kind, settings)))
        units.sort(key=lambda unit: unit[0])  # stable: units of one node keep their order
        return tuple(units)

    def _compare(
        self, declared: Sequence[tuple[int, HardwareUnit]], units: Sequence[tuple[int, HardwareUnit]], where: Where
    ) -> None:
        """A config can't exceed what a node declared when it joined; of a node that declared nothing it is believed."""
        have = Counter(rank for rank, _ in declared)
        for rank, count in Counter(rank for rank, _ in units).items():
            if rank in have and count > have[rank]:
                self._report.fault(
                    where,
                    f"node {rank} declared {have[rank]} of this hardware when it joined, and the config of the "
                    f"group {self.label} states {count}",
                    read=str(count),
                    allowed=str(have[rank]),
                )

    def _inside(self, rank: int, where: Where, what: str) -> bool:
        """Rule 9: nothing of a group is outside its nodes (PS-14)."""
        if self._ranks is None or rank in self._ranks:
            return True
        own = fields.rank_list(self._ranks)
        self._report.fault(
            where,
            f"the {what} names node rank {rank}, but the group {self.label} has the nodes {own}",
            read=str(rank),
            allowed=own,
        )
        return False

    def _env_configs(self, value: Value) -> tuple[EnvConfig, ...]:
        report = self._report
        if not isinstance(value, Items):
            what = "a list of env_configs, e.g. [{node_ranks: 0-3, python_interpreter_path: …}]"
            report.fault(value.where, f"{kind_of(value)} is not {what}", read=kind_of(value), allowed=what)
            return ()
        configs: list[EnvConfig] = []
        taken: set[int] = set()
        for item in value.items:
            found = fields.table(item, "e.g. {node_ranks: 0, env_vars: [{A: b}]}", report)
            if found is None:
                continue
            fields.known_keys(found, _ENV_KEYS, report)
            ranks = self._env_ranks(found)
            path_value, vars_value = found.get("python_interpreter_path"), found.get("env_vars")
            path = interpreter_path(path_value, report) if path_value is not None else ""
            if path and path_value is not None:
                self._check_allowed(path, ranks, path_value.where)
            env = _env_vars(vars_value, report) if vars_value is not None else ()
            twice = sorted(taken.intersection(ranks))
            if twice:
                report.fault(found.where, f"two env_configs name node rank {twice[0]}; each node has one of a group")
            taken.update(ranks)
            configs.append(EnvConfig(ranks, path, env))
        return tuple(configs)

    def _env_ranks(self, found: Table) -> tuple[int, ...]:
        value = found.get("node_ranks")
        if value is None or self._ranks is None:
            return self._ranks or ()
        if isinstance(value, Leaf) and value.text.strip().lower() == "all":
            return self._ranks
        ranks = fields.node_ranks(value, [node.rank for node in self._cluster.nodes], self._report) or ()
        return tuple(rank for rank in ranks if self._inside(rank, value.where, "env_configs"))

    def _check_allowed(self, path: str, ranks: Iterable[int], where: Where) -> None:
        """An interpreter is one that the node itself allows (SE-06)."""
        for rank in ranks:
            node = self._cluster.by_rank[rank]
            if node.interpreters is not None and path not in node.interpreters:
                allowed = ", ".join(node.interpreters[:8]) or "only its own"
                self._report.fault(
                    where, f"node {rank} ({node.node_id}) does not allow {path}; it allows {allowed}", read=path
                )
                return


def _env_vars(value: Value, report: Report) -> Labels:
    """``env_vars``: a list of mappings of one variable each. Values may be secrets: no fault shows one (SE-04)."""
    hint = "write a list with one variable per item: - NAME: value"
    if not isinstance(value, Items):
        report.fault(value.where, f"a list was expected; {hint}", allowed=hint)
        return ()
    env: dict[str, str] = {}
    for item in value.items:
        if not isinstance(item, Table) or len(item.entries) != 1:
            many = f"{len(item.entries)} variables" if isinstance(item, Table) else "no mapping"
            report.fault(item.where, f"this item has {many}; {hint}", allowed=hint)
            continue
        key, inner = item.entries[0]
        _variable(key, inner, env, report)
    return tuple(sorted(env.items()))


def _variable(key: Leaf, inner: Value, env: dict[str, str], report: Report) -> None:
    name = key.text
    why = why_refused(name)
    if not is_env_name(name):
        report.fault(key.where, f"{shown_text(name)} is not a variable; names match {ENV_NAME_PATTERN}", read=name[:80])
    elif why:
        report.fault(key.where, f"{name} can't be set from a config: {why}", read=name)
    elif name in env:
        report.fault(key.where, f"{name} is set twice", read=name)
    elif isinstance(inner, Leaf) and inner.problem:
        report.fault(inner.where, f"the value of {name} {inner.problem}", read=name)
    elif not isinstance(inner, Leaf) or inner.lost or inner.null:
        report.fault(inner.where, f"the value of {name} is not a text; quote it", read=name)
    elif inner.text == MASK:
        report.fault(inner.where, f"the value of {name} is the mask of a secret, not its value; state it", read=name)
    elif "\x00" in inner.text or any("\ud800" <= char <= "\udfff" for char in inner.text):
        report.fault(inner.where, f"the value of {name} has a character that no variable can carry", read=name)
    elif len(name) + len(inner.text.encode()) > 128 * 1024 - 2:
        report.fault(inner.where, f"the value of {name} is too long for a variable", read=name)
    else:
        env[name] = inner.text
