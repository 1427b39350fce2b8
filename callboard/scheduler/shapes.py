"""Which jobs are alike? Jobs of one shape are blocked for the same reasons, so only the first of them is looked at."""

from __future__ import annotations

from callboard.model.specs import JobSpec

Shape = tuple[object, ...]


def shape_of(spec: JobSpec) -> Shape:
    """Everything of a job that decides whether and where it can start. Who it yielded to is not in it: the few jobs
    that did are looked at one by one."""
    return (
        spec.pool,
        spec.priority_milli,
        spec.labels,
        spec.placement,
        spec.node_selector,
        spec.node_selector_soft,
        spec.never_preempts,
        spec.estimated_duration_ms,
        tuple([(c.name, c.pool, c.resources, c.min_workers, c.places) for c in spec.components]),
    )
