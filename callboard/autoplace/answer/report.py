"""The report of an answer: the plan that is proposed (the best that whoever runs it accepts, with the best without
that limit beside it), the section to paste, then why it is the one.

The first lines are RLinf's own: ``Best placement for this task is:`` and the YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any

from callboard.autoplace.answer.applying import section_text
from callboard.autoplace.answer.gantt import bars_of, seconds_text
from callboard.autoplace.problem.plan import PlacementValue, Plan, Status
from callboard.autoplace.problem.problem import Async, Layout, Problem
from callboard.autoplace.rlinf.config import labels_of
from callboard.autoplace.rlinf.job import RLinfJob
from callboard.model.frozen import dataclass
from callboard.placement.source.fields import rank_list

HEADING = "Best placement for this task is:"

_COSTS = {True: "estimated", False: "measured"}


def placement_of(answer: Answer) -> dict[str, PlacementValue]:
    """The mapping to paste below ``cluster.component_placement``.

    Of an RLinf job: inference is left out where it runs inside the actor (collocated), components without a cost keep
    their entry, and get the rollout's GPUs where their own ranks lie outside of them.
    """
    placement, job = answer.plan.component_placement(), answer.job
    if job is None:
        return placement
    if job.group:
        placement = {key: {"node_group": job.group, "placement": _text(value)} for key, value in placement.items()}
    rollout = next(value for key, value in placement.items() if "rollout" in key.split(","))
    placement.update(_uncosted(job, answer.plan, rollout))
    return placement


def section_of(answer: Answer) -> str:
    """The ``cluster`` section as YAML."""
    return section_text(nodes_of(answer), placement_of(answer), groups_of(answer))


def groups_of(answer: Answer) -> list[dict[str, Any]]:
    """The node groups that the placement names, as ``cluster.node_groups`` defines them: without them nobody could
    read it. How workers start there (``env_configs``) is no part of a placement and stays where it is."""
    named = {
        label
        for value in placement_of(answer).values()
        if isinstance(value, Mapping)
        for label in labels_of(value.get("node_group"))
    }
    if answer.job is not None:
        return [
            {key: value for key, value in group.items() if key != "env_configs"}
            for group in answer.job.config.node_groups
            if str(group.get("label")) in named
        ]
    return [
        {
            "label": pool.name,
            "node_ranks": pool.node_ranks[0] if len(pool.node_ranks) == 1 else rank_list(pool.node_ranks),
        }
        for pool in answer.plan.problem.pools
        if pool.name in named
    ]


def nodes_of(answer: Answer) -> int:
    if answer.job is not None:
        return len(answer.job.nodes)
    return sum(len(pool.node_ranks) for pool in answer.plan.problem.pools)


def heading_lines(answer: Answer) -> list[str]:
    """RLinf's own form: the heading, an empty line, the section."""
    return [HEADING, "", *section_of(answer).splitlines()]


def comparison_rows(answer: Answer) -> list[tuple[str, str, str]]:
    """(layout, seconds, how it compares) of the plan and of each alternative, the chosen one first."""
    plan = answer.plan
    rows = [(f"{plan.layout} (chosen)", _seconds(plan.iteration_seconds), proof_of(plan))]
    for layout, seconds in plan.alternatives.items():
        # No hybrid plan means that none was met, which says little.
        if layout != plan.layout and not (layout == "hybrid" and seconds is None):
            rows.append((layout, _seconds(seconds), _against(seconds, plan.iteration_seconds)))
    free = answer.unrestricted
    if free is not None:
        note = "the same" if _same(free.iteration_seconds, plan.iteration_seconds) else _lost(plan, free)
        rows.append(("any layout", _seconds(free.iteration_seconds), note))
    return rows


def span_rows(plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """(component, GPUs, from … to, seconds of work, where they come from) of each component."""
    rows = []
    for span in plan.spans:
        ranks = ",".join(bar.ranks for bar in bars_of(plan) if bar.component == span.component)
        when = f"{seconds_text(span.start_seconds)} – {seconds_text(span.end_seconds)}"
        extra = f" + {seconds_text(span.overhead_seconds)} switching" if span.overhead_seconds else ""
        rows.append((span.component, ranks, when, f"{seconds_text(span.work_seconds)}{extra}", _COSTS[span.estimated]))
    return rows


def staleness_rows(answer: Answer) -> list[tuple[str, str, str, str]]:
    """(staleness, period, latency, who lies where) for each value that was compared."""
    return [
        (
            f"{eta:g}",
            seconds_text(plan.iteration_seconds),
            seconds_text(plan.latency_seconds),
            ", ".join(f"{name} {ranks}" for name, ranks, *_ in span_rows(plan)),
        )
        for eta, plan in answer.staleness.items()
    ]


def proof_of(plan: Plan) -> str:
    """How good it is for sure, e.g. "no plan is faster"."""
    if plan.status is Status.OPTIMAL:
        return "proved: no plan is faster"
    why = "the time limit was reached" if plan.status is Status.TIME_LIMIT else "the search was ended"
    return f"at most {plan.gap:.1%} above the best possible ({_seconds(plan.lower_bound_seconds)} s); {why}"


def summary_line(plan: Plan) -> str:
    """One sentence: how long an iteration takes."""
    gpus = plan.problem.gpus
    if isinstance(plan.problem.objective, Async):
        return (
            f"A batch every {seconds_text(plan.iteration_seconds)} on {gpus} GPUs, "
            f"each {seconds_text(plan.latency_seconds)} on its way"
        )
    return f"One iteration takes {seconds_text(plan.iteration_seconds)} on {gpus} GPUs"


def notes_of(answer: Answer) -> list[str]:
    """What was assumed or lost, one sentence each."""
    plan = answer.plan
    estimated = [span.component for span in plan.spans if span.estimated]
    notes = [*plan.problem.notes, *plan.notes]
    if estimated:
        notes.append(f"not measured but estimated at the chosen size: {', '.join(estimated)}; measure there to be sure")
    return list(dict.fromkeys(note[:1].upper() + note[1:] for note in notes))


def as_plain(answer: Answer) -> dict[str, Any]:
    """Everything, for programs."""
    found = _plan_as_plain(answer.plan)
    free = answer.unrestricted
    return {
        "cluster": {
            "num_nodes": nodes_of(answer),
            **({"node_groups": groups} if (groups := groups_of(answer)) else {}),
            "component_placement": placement_of(answer),
        },
        **found,
        "estimated_counts": {
            component.name: [mode.gpus for mode in component.modes if mode.estimated]
            for component in answer.plan.problem.components
        },
        "by_staleness": {f"{eta:g}": _plan_as_plain(each) for eta, each in answer.staleness.items()},
        "unrestricted": None if free is None else _plan_as_plain(free),
        "notes": notes_of(answer),
    }


def _plan_as_plain(plan: Plan) -> dict[str, Any]:
    return {
        "iteration_seconds": plan.iteration_seconds,
        "lower_bound_seconds": plan.lower_bound_seconds,
        "latency_seconds": plan.latency_seconds,
        "gap": plan.gap,
        "status": str(plan.status),
        "layout": plan.layout,
        "solver": plan.solver,
        "alternatives": dict(plan.alternatives),
        "spans": [
            {
                "component": span.component,
                "start_seconds": span.start_seconds,
                "end_seconds": span.end_seconds,
                "gpu_ranks": list(span.gpu_ranks),
                "estimated": span.estimated,
            }
            for span in plan.spans
        ],
    }


def _uncosted(job: RLinfJob, plan: Plan, rollout: PlacementValue) -> Iterator[tuple[str, PlacementValue]]:
    """Entries of components that have no cost: reward, agents, robots."""
    own = plan.span("rollout").gpu_ranks
    inside = {rank - own[0] + _first_rank(plan) for rank in own} if own else set()
    costed = {span.component for span in plan.spans} | {"inference"}
    for entry in job.config.entries:
        names = [name for name in entry.names if name not in costed]
        if not names:
            continue
        stays = entry.group != job.group or (set(_ranks(entry.text)) or {-1}) <= inside
        yield ",".join(names), entry.value if stays else rollout


def _first_rank(plan: Plan) -> int:
    """The rollout's first rank as its node group counts."""
    span = plan.span("rollout")
    return plan.problem.pool(span.pool).gpu_ranks.index(span.gpu_ranks[0])


def _ranks(text: str) -> Iterable[int]:
    """Resource ranks that a placement names; none for ``all``, which means other GPUs now."""
    for segment in text.split(","):
        first, _, last = segment.partition(":")[0].strip().partition("-")
        if first.strip().isdigit() and (not last or last.strip().isdigit()):
            yield from range(int(first), int(last or first) + 1)


def _text(value: PlacementValue) -> str:
    return value["placement"] if isinstance(value, Mapping) else value


def _seconds(seconds: float | None) -> str:
    return "impossible" if seconds is None else f"{seconds:.4g}" if seconds < 1000 else f"{seconds:.0f}"


def _against(seconds: float | None, chosen: float) -> str:
    if seconds is None:
        return ""
    return "the same" if _same(seconds, chosen) else f"{seconds / chosen - 1:+.1%}"


def _lost(plan: Plan, free: Plan) -> str:
    where = ", ".join(f"{name} {ranks}" for name, ranks, *_ in span_rows(free))
    return f"{free.iteration_seconds / plan.iteration_seconds - 1:+.1%}, with {where}: --mixed proposes it"


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-5 * max(abs(one), abs(other))


def table_lines(rows: Sequence[Sequence[str]], *, headings: Sequence[str]) -> list[str]:
    """Rows in columns, two blanks between them."""
    whole = [list(headings), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in whole) for column in range(len(headings))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in whole]


STALENESS = (0.0, 0.5, 1.0, 2.0)
"""Values that are compared: how old data may be is the user's choice, and this is what it costs."""

Search = Callable[[Problem], Plan]
"""Searches one problem; raises NoPlan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a config gets.

    Attributes:
        job: the RLinf job that it is for; None: a workflow in the general form.
        unrestricted: the best plan of any layout, where ``plan`` was restricted; None: it wasn't, or it could not be
            searched.
        staleness: the best plan for each staleness, where batches overlap; empty: they don't.
    """

    plan: Plan
    job: RLinfJob | None = None
    unrestricted: Plan | None = None
    staleness: Mapping[float, Plan] = field(default_factory=lambda: MappingProxyType({}))


def answer_for_problem(problem: Problem, search: Search) -> Answer:
    """The answer to a workflow in the general form; where batches overlap, for several values of staleness.

    Raises:
        NoPlan: there is none.
    """
    plan = search(problem)
    if not isinstance(problem.objective, Async):
        return Answer(plan=plan)
    tried = sorted({*STALENESS, problem.objective.staleness})
    table = {eta: search(replace(problem, objective=Async(staleness=eta))) for eta in tried}
    return Answer(plan=plan, staleness=MappingProxyType(table))


def answer_for_job(job: RLinfJob, search: Search) -> Answer:
    """The answer to an RLinf job. A reasoning job that isn't ``mixed`` gets one of the two layouts it accepts.

    Raises:
        NoPlan: there is none.
    """
    plan = search(job.problem)
    if job.problem.layout is not Layout.UNIFORM:
        return Answer(plan=plan, job=job)
    return Answer(plan=plan, job=job, unrestricted=search(replace(job.problem, layout=Layout.ANY)))
