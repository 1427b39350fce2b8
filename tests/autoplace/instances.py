"""Which workflows are searched in the tests? Recorded instances with proven times, and drawn ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DATA = Path(__file__).parent.parent / "data" / "autoplace"


def recorded(name: str) -> list[dict[str, Any]]:
    """The instances of a file; ``->`` is a stream, ``=>`` a barrier."""
    rows: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())
    return rows


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A recorded instance as the mapping that a user would write."""
    edges = []
    for text in row["edges"]:
        source, arrow, target = text.split()
        edges.append([source, target, "stream" if arrow == "->" else "barrier"])
    return {key: row[key] for key in ("gpus", "chunks", "components")} | {"edges": edges}


@st.composite
def workflows(draw: st.DrawFn, *, most: int = 4, gpus: int = 4, plain_form: bool = True) -> dict[str, Any]:
    """A small workflow; in the general form with memory, offloading and switching that is paid when shared."""
    size = draw(st.integers(2, most))
    capacity = draw(st.integers(1, gpus))
    names = [f"c{i}" for i in range(size)]
    components: dict[str, Any] = {}
    for name in names:
        counts = draw(st.sets(st.integers(1, capacity), min_size=1, max_size=2))
        component: dict[str, Any] = {
            "seconds_by_gpus": {count: draw(st.integers(1, 40)) / 2 for count in sorted(counts)},
            "switch_seconds": draw(st.sampled_from([0, 0, 1, 3])),
        }
        if not plain_form:
            component["gpus"] = {"measured": True}
            component["memory_gib"] = draw(st.sampled_from([0, 20, 40, 60]))
            if draw(st.booleans()):
                component["offload_seconds"] = draw(st.sampled_from([0.5, 2]))
        components[name] = component
    edges = [
        [names[i], names[j], draw(st.sampled_from(["stream", "barrier"]))]
        for j in range(size)
        for i in range(j)
        if draw(st.integers(0, 2)) == 0
    ]
    chunks = draw(st.sampled_from([1, 2, 8]))
    if plain_form:
        return {"gpus": capacity, "chunks": chunks, "components": components, "edges": edges}
    return {
        "workflow": {"chunks": chunks, "components": components, "edges": edges},
        "cluster": {"nodes": [{"gpus": capacity, "memory_gib": 80}]},
    }
