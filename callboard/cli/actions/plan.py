"""What `callboard plan` does. Imports no client: a plan is made here, and at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from callboard.cli.failing import BAD_INPUT, NO_PLAN, lines, of_faults
from callboard.cli.options import Output
from callboard.cli.printing import print_json, print_yaml
from callboard.model.cluster_text import parse_cluster
from callboard.model.colocation import member_names
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.job import job_spec
from callboard.model.inputs.located import Misfits
from callboard.model.inputs.reading import faults_of
from callboard.model.inputs.roles import read_role_file
from callboard.model.inputs.settling import settled
from callboard.model.inputs.source import SourceMapping, read_yaml
from callboard.model.quantities import NOTHING, Resources, total
from callboard.model.roles import PRESETS
from callboard.model.specs import ComponentSpec, JobSpec
from callboard.scheduler.described import JobPlan, ask_of, asks_by_pool, plan_job


def show(file: Path, *, nodes: str, roles: Path | None, output: Output) -> None:
    """Shows the plan of a file; ends with 3 if it doesn't fit."""
    try:
        source = _read(file)
        spec = _spec(source, roles)
        text = _cluster_text(source, nodes)
        plan = plan_job(spec, parse_cluster(text)) if text else None
    except InvalidInput as error:
        for line in lines(of_faults(error), ""):
            typer.echo(line, err=True)
        raise typer.Exit(BAD_INPUT) from error
    value = as_plain(spec, plan)
    if output is Output.JSON:
        print_json(value)
    elif output is Output.YAML:
        print_yaml(value)
    else:
        from callboard.cli.plan_views import plan_view  # noqa: PLC0415 - what people read needs more
        from callboard.cli.screen import stdout  # noqa: PLC0415 - as above

        stdout(wide=output is Output.WIDE).print(plan_view(value))
    if plan is not None and not plan.fits:
        raise typer.Exit(NO_PLAN)


def _spec(source: SourceMapping, roles: Path | None) -> JobSpec:
    job = SourceMapping.like(source, {key: value for key, value in source.items() if key != "nodes"})
    spec = job_spec(job)
    if spec.placement_config:
        raise InvalidInput([Fault("placement", "fixes where workers run; `callboard placement show` draws that")])
    try:
        return settled(spec, PRESETS if roles is None else read_role_file(roles))
    except Misfits as error:
        raise InvalidInput(faults_of(error, job)) from None


def _cluster_text(source: SourceMapping, nodes: str) -> str:
    """The cluster as the option says it, else as the file does; empty: neither."""
    text = nodes or source.get("nodes") or ""
    if not isinstance(text, str | int) or isinstance(text, bool):
        line, column = source.position(("nodes",))
        raise InvalidInput([Fault("nodes", "is not a text; write e.g. 4x(2gpu,32cpu)", line, column)])
    return str(text)


def as_plain(spec: JobSpec, plan: JobPlan | None) -> dict[str, Any]:
    """A plan as plain values: numbers of CPUs and GPUs, bytes of memory.

    Args:
        spec: the job, settled.
        plan: where it goes; None without a cluster.
    """
    whole = total(ask_of(component) for component in spec.components)
    value: dict[str, Any] = {
        "job": spec.name,
        "totals": _amounts(whole),
        "fits": None if plan is None else plan.fits,
        "unplaced": []
        if plan is None
        else [{"component": each.component, "workers": each.workers, "why": list(each.why)} for each in plan.unplaced],
        "components": [_component(spec, component) for component in spec.components],
        "pools": {pool: _amounts(ask) for pool, ask in asks_by_pool(spec).items()},
    }
    if plan is not None:
        value["node_groups"] = _by_group(plan)
        value["nodes"] = [
            {
                "node": node.node_id,
                "node_group": node.node_group,
                "workers": dict(node.workers),
                "used": _amounts(node.used),
                "left": _amounts(node.left),
            }
            for node in plan.nodes
        ]
    return value


def _component(spec: JobSpec, component: ComponentSpec) -> dict[str, Any]:
    value: dict[str, Any] = {
        "component": component.name,
        "members": list(member_names(component)),
        "pool": spec.pool_of(component),
        "workers": component.min_workers,
        "per_worker": _amounts(component.resources),
        "totals": _amounts(ask_of(component)),
    }
    if component.elastic:
        value["max_workers"] = component.max_workers
    return value


def _by_group(plan: JobPlan) -> dict[str, Any]:
    groups: dict[str, Resources] = {}
    for node in plan.nodes:
        groups[node.node_group] = groups.get(node.node_group, NOTHING) + node.used
    return {group: _amounts(used) for group, used in groups.items()}


def _amounts(resources: Resources) -> dict[str, int | float]:
    """cpu and gpu always, the rest where there is some."""
    amounts: Mapping[str, int] = {"cpu": 0, "gpu": 0, **dict(resources.items())}
    return {name: amount if name == "memory" else _number(amount) for name, amount in amounts.items()}


def _number(milli: int) -> int | float:
    return milli // 1000 if milli % 1000 == 0 else milli / 1000


def _read(file: Path) -> SourceMapping:
    if str(file) == "-":
        return read_yaml(typer.get_text_stream("stdin").read())
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidInput([Fault(str(file), f"can't be read: {why}")]) from error
    return read_yaml(text)
