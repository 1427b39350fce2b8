"""The entries of components: where each may run, in RLinf's form or a job's, checked."""

from __future__ import annotations

from dataclasses import replace

from callboard.model.inputs.located import shown_text
from callboard.model.names import NAME_PATTERN, is_name
from callboard.placement.cluster.cluster import WHOLE_CLUSTER
from callboard.placement.config.config import CLUSTER_KEYS, KEY, Entry, Section
from callboard.placement.config.grammar import Segment, parse_segments
from callboard.placement.source import fields
from callboard.placement.source.diagnostics import Report, Where, nearest_of, parts_of
from callboard.placement.source.document import Document
from callboard.placement.source.tree import Items, Leaf, Table, Value, kind_of, traps

MAX_COMPONENTS = 1000
"""Most components of a config."""

_ENTRY_KEYS = ("node_group", "placement", "share", "visible")


class EntryReader:
    """Reads the entries of one document."""

    def __init__(self, document: Document, section: Section, report: Report) -> None:
        self._document = document
        self._section = section
        self._report = report
        self._seen: dict[str, tuple[Where, str]] = {}

    def entries(self) -> list[Entry]:
        """The placement of each component, however the document carries it."""
        entries: list[Entry] = []
        placements = self._section.value(KEY)
        if placements is not None:
            what = "component names with their placements, e.g. {actor: 0-3, env: all}"
            found = fields.table(placements, what, self._report)
            for key, value in found.entries if found is not None else ():
                entries.extend(self._entries_of(key, value))
        job = self._document.value("components")
        if isinstance(job, Items):
            for item in job.items:
                entries.extend(self._job_entries(item))
        if not entries and not self._told_why_none():
            where = placements.where if placements is not None else self._section.place(KEY)
            said = "no component has a placement; write e.g. component_placement: {actor: 0-3}"
            where, near = self._section.misspelt() or (where, "")
            if near:
                said = f"no component has a placement; is this meant as {near}?"
            elif self._document.value("defaults") is not None:
                said += ", or give the composed config: the files that its defaults name are not read here"
            self._report.fault(where, said)
        if len(entries) > MAX_COMPONENTS:
            self._report.fault(self._section.place(KEY), f"more than {MAX_COMPONENTS} components")
            return []
        return entries

    def _told_why_none(self) -> bool:
        """Whether some fault already says why no component has a placement."""
        if self._section.path and self._section.table is None:
            return True
        keys = [key.text for key, _ in self._section.table.entries] if self._section.table is not None else []
        if KEY in {nearest_of(key, CLUSTER_KEYS) for key in keys if key not in CLUSTER_KEYS}:
            return True
        place = ".".join((*self._section.path, KEY))
        return any(fault.field.startswith((place, "components[")) for fault in self._report.faults)

    def _entries_of(self, key: Leaf, value: Value) -> list[Entry]:
        """The entries of one key: its names share one placement."""
        names = self._names(key)
        # Faults of the value are told once, for all its names.
        entry = self._entry(key.text.strip(), value)
        return [_named(entry, name) for name in names]

    def _names(self, key: Leaf) -> list[str]:
        if key.lost:
            message = f"{key.lost} is what a YAML reader made of a component's name; quote it"
            self._report.fault(key.where, message, read=key.lost)
            return []
        bare = key.bare and "," not in key.text
        return [
            part for part, where in parts_of(key.text, key.where) if self._name(part, where, key=key.text, bare=bare)
        ]

    def _name(self, name: str, where: Where, *, key: str = "", bare: bool = False) -> bool:
        """Whether a component may have this name; ``key`` is all of the key that it stands in."""
        report = self._report
        if not name:
            report.fault(where, "a component's name is empty; is there a comma too many?", read="nothing")
        elif bare and traps(name):
            said = f"{shown_text(name)} without quotes is {traps(name)} for other readers of YAML"
            report.fault(where, f"{said}; quote this name", read=name)
        elif not is_name(name):
            message = f"{shown_text(name)} is no component's name; names match {NAME_PATTERN}"
            if name[0].isdigit():
                message += "; between braces a text with commas needs quotes"
            report.fault(where, message, read=name[:80], allowed=NAME_PATTERN)
        elif name in self._seen:
            first, written = self._seen[name]
            line = f", first in line {first.line}" if first.line else ""
            keys = [shown_text(each) for each in (written, key or name)]
            by = f"in {keys[0]}" if keys[0] == keys[1] else f"by {keys[0]} and by {keys[1]}"
            report.fault(where, f"the component {name} is placed twice{line}: {by}; a name appears once", read=name)
        else:
            self._seen[name] = (where, key or name)
            return True
        return False

    def _job_entries(self, item: Value) -> list[Entry]:
        """The entry of one component of a job; none when it carries no placement."""
        if not isinstance(item, Table):
            return []
        value, name = item.get(KEY), item.get("name")
        if value is None:
            return []
        if not isinstance(name, Leaf) or not self._name(name.text, name.where):
            if not isinstance(name, Leaf):
                self._report.fault(item.where, "a component with a placement needs a name")
            return []
        entry = self._entry(name.text, value)
        amounts = item.get("resources")
        gpu = amounts.get("gpu") if isinstance(amounts, Table) else None
        asks = isinstance(gpu, Leaf) and gpu.text.strip() not in ("0", "0.0")
        return [_named(entry, name.text, needs_gpus=asks or entry.needs_gpus)]

    def _entry(self, component: str, value: Value) -> Entry:
        report = self._report
        if not isinstance(value, Table):
            segments = self._segments(value, component)
            return Entry(component=component, segments=segments or (), where=value.where.of(component))
        fields.known_keys(value, _ENTRY_KEYS, report, component)
        group, text, share, visible = (value.get(key) for key in _ENTRY_KEYS)
        labels: tuple[str, ...] = (WHOLE_CLUSTER,) if group is None else self._group_labels(group, component)
        misspelt = fields.meant_keys(value, _ENTRY_KEYS)
        if group is None and "node_group" in misspelt:
            labels = ()
        if text is None and "placement" not in misspelt:
            report.fault(value.where.of(component), "the placement is missing; write e.g. placement: 0-3")
        segments = self._segments(text, component) if text is not None else None
        share_milli = fields.share_milli(share, report, component) if share is not None else 0
        visible_all = visible is not None and self._visible(visible, component)
        return Entry(
            component=component,
            node_groups=labels,
            segments=segments or (),
            share_milli=share_milli or 0,
            visible_all=visible_all,
            needs_gpus=bool(share_milli),
            where=(text or value).where.of(component),
            group_where=(group or value).where.of(component),
            share_where=(share or value).where.of(component),
        )

    def _segments(self, value: Value, component: str) -> tuple[Segment, ...] | None:
        leaf = fields.placement_text(value, self._report, component)
        if leaf is None:
            return None
        return parse_segments("" if leaf.null else leaf.text, leaf.where.of(component), self._report)

    def _visible(self, value: Value, component: str) -> bool:
        read = value.text.strip().lower() if isinstance(value, Leaf) else ""
        if read not in ("all", "own"):
            message = (
                f"{kind_of(value)} is not allowed; visible: all shows workers every GPU of their node, own is usual"
            )
            self._report.fault(value.where.of(component), message, read=kind_of(value), allowed="all or own")
        return read == "all"

    def _group_labels(self, value: Value, component: str) -> tuple[str, ...]:
        """Rule 8: one label, a comma-separated text or a list; what has faults is left out."""
        if isinstance(value, Items):
            if not value.items:
                self._report.fault(value.where.of(component), "the list of node groups is empty")
            found = [fields.label(item, "label", self._report, component) for item in value.items]
        elif isinstance(value, Leaf) and "," in value.text and not value.lost:
            parts = [Leaf(part, where) for part, where in parts_of(value.text, value.where)]
            found = [fields.label(part, "label", self._report, component) for part in parts]
        else:
            found = [fields.label(value, "label", self._report, component)]
        return tuple(label for label in found if label is not None)


def _named(entry: Entry, component: str, *, needs_gpus: bool | None = None) -> Entry:
    return replace(
        entry,
        component=component,
        needs_gpus=entry.needs_gpus if needs_gpus is None else needs_gpus,
        where=entry.where.of(component),
        group_where=entry.group_where.of(component),
        share_where=entry.share_where.of(component),
    )
