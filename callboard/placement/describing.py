"""What does a config say of nodes and node groups? Described nodes, groups, their hardware and their environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from callboard.model.environment import why_refused
from callboard.model.faults import InvalidInput
from callboard.model.inputs.located import Refused, shown_text
from callboard.model.inputs.scalars import interpreter as read_interpreter
from callboard.model.names import ENV_NAME_PATTERN, is_env_name, is_label, is_name
from callboard.model.quantities import QuantityError, parse_memory, parse_milli
from callboard.model.specs import Labels
from callboard.placement import fields
from callboard.placement.cluster import (
    RESERVED_LABELS,
    Accelerator,
    Cluster,
    EnvConfig,
    HardwareUnit,
    Node,
    NodeGroup,
    declared_hardware,
)
from callboard.placement.diagnostics import Report, Where
from callboard.placement.source import Items, Leaf, Table, Value, kind_of, open_document

MAX_GROUPS = 1000
"""Most node groups of a config."""

MAX_ACCELERATORS = 1024
"""Most accelerators of a described node."""

_NODE_KEYS = (
    "node_id",
    "rank",
    "accelerators",
    "accelerator_type",
    "labels",
    "node_group",
    "hardware",
    "interpreters",
    "cpu",
    "memory",
    "lost_accelerators",
)
_GROUP_KEYS = ("label", "node_ranks", "hardware", "env_configs", "ignore_hardware")
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


def described_nodes(value: Value, report: Report) -> Cluster | None:
    """The nodes that ``nodes: 8+8`` or a list of mappings describes; None with faults."""
    if isinstance(value, Leaf):
        try:
            return Cluster.from_nodes(value.text, value.where.field)
        except InvalidInput as error:
            for fault in error.faults:
                report.fault(value.where.at(max(0, fault.column - 1)), fault.message, read=value.text[:80])
            return None
    if isinstance(value, Table) or not value.items:
        report.fault(value.where, f"{kind_of(value)} describes no nodes; write 8+8, or a list of nodes")
        return None
    if len(value.items) > fields.MAX_ITEMS:
        report.fault(value.where, f"{len(value.items)} nodes are too many; {fields.MAX_ITEMS} are allowed")
        return None
    faults_before = len(report.faults)
    nodes = [_node(item, index, report) for index, item in enumerate(value.items)]
    if len(report.faults) > faults_before:
        return None
    try:
        return Cluster(tuple(node for node in nodes if node is not None))
    except InvalidInput as error:
        for fault in error.faults:
            report.fault(value.where, fault.message)
        return None


def _node(value: Value, index: int, report: Report) -> Node | None:
    found = fields.table(value, "e.g. {node_id: node-0, accelerators: 8}", report)
    if found is None:
        return None
    fields.known_keys(found, _NODE_KEYS, report)
    rank = index
    if (asked := found.get("rank")) is not None:
        rank = fields.whole(asked, 0, 10**6, "rank of a node", report) or 0
    return Node(
        node_id=_word(found.get("node_id"), f"node-{rank}", "a node's id", report),
        rank=rank,
        accelerators=_accelerators(found, report),
        labels=_labels(found.get("labels"), report),
        node_group=_group_label(found.get("node_group"), report),
        hardware=_declared(found.get("hardware"), report),
        interpreters=_interpreters(found.get("interpreters"), report),
        cpu_milli=_amount(found.get("cpu"), report, memory=False),
        memory_bytes=_amount(found.get("memory"), report, memory=True),
        lost_accelerators=_lost(found.get("lost_accelerators"), report),
    )


def _word(value: Value | None, default: str, what: str, report: Report) -> str:
    if value is None:
        return default
    found = fields.text(value, what, report)
    if found is None:
        return default
    if not is_name(found.text):
        report.fault(found.where, f"{shown_text(found.text)} is not {what}, which is a name", read=found.text)
    return found.text


def _group_label(value: Value | None, report: Report) -> str:
    return "" if value is None else fields.label(value, "label", report) or ""


def _accelerators(found: Table, report: Report) -> tuple[Accelerator, ...]:
    kind_value = found.get("accelerator_type")
    kind = "gpu" if kind_value is None else _device_word(kind_value, "an accelerator's type", report) or "gpu"
    value = found.get("accelerators")
    if value is None:
        return ()
    if isinstance(value, Leaf):
        count = fields.whole(value, 0, MAX_ACCELERATORS, "number of accelerators", report)
        return tuple(Accelerator(str(index), kind) for index in range(count or 0))
    if isinstance(value, Table) or len(value.items) > MAX_ACCELERATORS:
        report.fault(value.where, f"{kind_of(value)} of this size is no list of accelerators; write 8 or a list of ids")
        return ()
    devices: dict[str, Accelerator] = {}
    for item in value.items:
        device = _accelerator(item, kind, report)
        if device is not None and device.id in devices:
            report.fault(item.where, f"the accelerator {shown_text(device.id)} occurs twice", read=device.id)
        elif device is not None:
            devices[device.id] = device
    return tuple(devices.values())


def _accelerator(value: Value, kind: str, report: Report) -> Accelerator | None:
    if isinstance(value, Table):
        fields.known_keys(value, ("id", "type"), report)
        own = value.get("type")
        kind = kind if own is None else _device_word(own, "an accelerator's type", report) or kind
        inner = value.get("id")
        if inner is None:
            report.fault(value.where, "an accelerator needs an id", allowed="{id: …, type: …}")
            return None
        value = inner
    name = _device_word(value, "an accelerator's id", report)
    return None if name is None else Accelerator(name, kind)


def _device_word(value: Value, what: str, report: Report) -> str | None:
    """A device's id or type as an inventory gives it, which may hold spaces."""
    found = fields.text(value, what, report)
    if found is None:
        return None
    if not found.text or len(found.text) > 128 or not found.text.isprintable() or "," in found.text:
        report.fault(found.where, f"{shown_text(found.text)} is not {what}", read=found.text[:80])
        return None
    return found.text


def _labels(value: Value | None, report: Report) -> Labels:
    if value is None:
        return ()
    found = fields.table(value, "e.g. {zone: a}", report)
    pairs: list[tuple[str, str]] = []
    for key, inner in found.entries if found is not None else ():
        leaf = fields.text(inner, "a label's value", report)
        if leaf is not None and is_label(key.text) and is_label(leaf.text):
            pairs.append((key.text, leaf.text))
        elif leaf is not None:
            report.fault(key.where, f"{shown_text(key.text)}: {shown_text(leaf.text)} is no label", read=key.text)
    return tuple(sorted(pairs))


def _interpreters(value: Value | None, report: Report) -> tuple[str, ...] | None:
    if value is None:
        return None
    items = value.items if isinstance(value, Items) else (value,)
    return tuple(path for item in items if (path := _interpreter(item, report)))


def _amount(value: Value | None, report: Report, *, memory: bool) -> int | None:
    if value is None:
        return None
    if not isinstance(value, Leaf) or len(value.text) > 64:
        report.fault(value.where, f"{kind_of(value)} is no amount")
        return None
    try:
        return parse_memory(value.text) if memory else parse_milli(value.text)
    except QuantityError as error:
        report.fault(value.where, str(error), read=value.text)
        return None


def _lost(value: Value | None, report: Report) -> int:
    return 0 if value is None else fields.whole(value, 0, MAX_ACCELERATORS, "number of accelerators", report) or 0


def _declared(value: Value | None, report: Report) -> tuple[HardwareUnit, ...]:
    """``hardware`` of a described node: a list of ``{type: …, …}``."""
    if value is None:
        return ()
    if not isinstance(value, Items):
        report.fault(value.where, f"{kind_of(value)} is no list of hardware; write e.g. [{{type: Franka}}]")
        return ()
    units = []
    for item in value.items:
        found = fields.table(item, "e.g. {type: Franka}", report)
        kind = found.get("type") if found is not None else None
        if found is not None and kind is None:
            report.fault(found.where, "declared hardware needs a type", allowed="{type: Franka, …}")
        name = fields.label(kind, "hardware type", report) if kind is not None else None
        if found is not None and name is not None:
            units.append(HardwareUnit(name, _settings(found, "type", report)))
    return tuple(units)


def _settings(found: Table, but: str, report: Report) -> str:
    return fields.as_json(Table(tuple(e for e in found.entries if e[0].text != but), found.where), report)


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
        self.label = "?"  # until it is read
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
            self._report.fault(self._found.where, "a node group needs a label", allowed="label: a800")
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
        message = f"the node group {self.label} needs node_ranks, as no node joined with this group"
        self._report.fault(self._found.where, message, allowed="node_ranks: 0-3")
        return None

    def _hardware(self, value: Value) -> tuple[str, tuple[tuple[int, HardwareUnit], ...]]:
        report = self._report
        found = fields.table(value, "e.g. {type: Franka, configs: [{node_rank: 0}]}", report)
        if found is None:
            return "", ()
        fields.known_keys(found, ("type", "configs"), report)
        kind_value, configs = found.get("type"), found.get("configs")
        if kind_value is None:
            report.fault(found.where, "hardware needs a type", allowed="type: Franka")
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
            report.fault(configs.where, f"{kind_of(configs)} is no list of configs", allowed="[{node_rank: 0}]")
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
            settings = _settings(found, "node_rank", report)
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
        have = _counts(declared)
        for rank, count in _counts(units).items():
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
            report.fault(value.where, f"{kind_of(value)} is no list of env_configs", allowed="[{node_ranks: 0-3, …}]")
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
            path = _interpreter(path_value, report) if path_value is not None else ""
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


def _interpreter(value: Value, report: Report) -> str:
    found = fields.text(value, "an interpreter's path", report)
    if found is None:
        return ""
    try:
        return read_interpreter(found.text)
    except Refused as error:
        report.fault(found.where, str(error), read=found.text[:80])
        return ""


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
        report.fault(key.where, f"{shown_text(name)} is no variable; names match {ENV_NAME_PATTERN}", read=name[:80])
    elif why:
        report.fault(key.where, f"{name} can't be set from a config: {why}", read=name)
    elif name in env:
        report.fault(key.where, f"{name} is set twice", read=name)
    elif not isinstance(inner, Leaf) or inner.lost or inner.null:
        report.fault(inner.where, f"the value of {name} is not a text; quote it", read=name)
    elif "\x00" in inner.text or any("\ud800" <= char <= "\udfff" for char in inner.text):
        report.fault(inner.where, f"the value of {name} has a character that no variable can carry", read=name)
    elif len(name) + len(inner.text.encode()) > 128 * 1024 - 2:
        report.fault(inner.where, f"the value of {name} is too long for a variable", read=name)
    else:
        env[name] = inner.text


def _counts(units: Iterable[tuple[int, HardwareUnit]]) -> Mapping[int, int]:
    counts: dict[int, int] = {}
    for rank, _ in units:
        counts[rank] = counts.get(rank, 0) + 1
    return counts
