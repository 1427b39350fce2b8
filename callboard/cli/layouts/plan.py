"""What `callboard plan` does. Imports no client: a plan is made here, and at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from callboard.cli.options import wishes
from callboard.cli.show.exits import BAD_INPUT, NO_PLAN, as_json, lines, of_faults
from callboard.cli.show.printing import show_result
from callboard.model.cluster_text import parse_cluster
from callboard.model.faults import Fault, InvalidInput
from callboard.model.inputs.groups import settled, unknown_roles
from callboard.model.inputs.job import job_of_file
from callboard.model.inputs.located import Misfits
from callboard.model.inputs.placement_config import KEY
from callboard.model.inputs.reading import faults_of
from callboard.model.inputs.scalars import plain_number
from callboard.model.inputs.source import SourceMapping, read_yaml, why_unreadable
from callboard.model.quantities import IN_BYTES, NOTHING, Resources, total
from callboard.model.roles import PRESETS, RoleFile, member_names
from callboard.model.specs import ComponentSpec, JobSpec
from callboard.scheduler.account.described_nodes import DescribedNode, JobPlan, ask_of, asks_by_pool, nodes_of, plan_job

if TYPE_CHECKING:
    from rich.console import RenderableType

Result = TypeVar("Result")


def show(file: Path, *, nodes: str, roles: Path | None) -> None:
    """Shows the plan of a file; ends with 3 if it doesn't fit."""
    try:
        source = _read(file)
        if "spec" in source:
            from callboard.cli.show.plain import unprinted_job  # noqa: PLC0415 - most jobs are written by hand

            source = unprinted_job(source)
        spec, said, cluster = _all_read(source, nodes, roles)
        if spec.placement_config:
            spec, cluster = _placed(file, source, spec, cluster, nodes_of(said.nodes))
        else:
            cluster = cluster or nodes_of(said.nodes)
        try:
            spec = settled(spec, said.presets)
        except Misfits as error:
            raise InvalidInput(faults_of(error, source)) from None
        plan = plan_job(spec, cluster, said.pools) if cluster else None
        _tell_unknown_pools(spec, said)
    except InvalidInput as error:
        told = [as_json(of_faults(error), faults=error.faults)] if wishes.for_program else lines(of_faults(error), "")
        for line in told:
            typer.echo(line, err=True)
        raise typer.Exit(BAD_INPUT) from error
    value = as_plain(spec, plan)
    show_result(value, lambda _: _picture(value))
    if plan is not None and not plan.fits:
        raise typer.Exit(NO_PLAN)


def _picture(value: dict[str, Any]) -> RenderableType:
    from callboard.cli.layouts.plan_views import plan_view  # noqa: PLC0415 - what people read needs more

    return plan_view(value)


def _all_read(
    source: SourceMapping, nodes: str, roles: Path | None
) -> tuple[JobSpec, RoleFile, Sequence[DescribedNode]]:
    """The job, the roles and the nodes.

    Raises:
        InvalidInput: every fault of all three.
    """
    faults: list[Fault] = []

    def attempt(read: Callable[[], Result]) -> Result | None:
        try:
            return read()
        except InvalidInput as error:
            faults.extend(error.faults)
            return None

    spec = attempt(lambda: job_of_file(source))
    said = attempt(lambda: _role_file(roles))
    placed = KEY in str(source) if spec is None else bool(spec.placement_config)
    cluster = attempt(lambda: _described(source, nodes, placed=placed))
    if spec is None and said is not None:
        # Of a job that can't be read: what is told of others once they are settled.
        faults += faults_of(Misfits(unknown_roles(_roles_in(source), said.presets)), source)
    if spec is None or said is None or cluster is None:
        raise InvalidInput(sorted(faults, key=lambda fault: (fault.line, fault.column)))
    return spec, said, cluster


def _roles_in(source: SourceMapping) -> list[str]:
    """The role that each component of a file names; empty: none."""
    components = source.get("components")
    listed = components if isinstance(components, list) else []
    found = [each.get("role") if isinstance(each, Mapping) else None for each in listed]
    return [role if isinstance(role, str) else "" for role in found]


def _tell_unknown_pools(spec: JobSpec, said: RoleFile) -> None:
    """A cluster started with the file would refuse the job."""
    unknown = sorted({*spec.pools} - {pool.name for pool in said.pools})
    if said.pools and unknown:
        named = f"no pool {unknown[0]}" if len(unknown) == 1 else f"no pools {', '.join(unknown)}"
        typer.echo(f"note: the file of roles has {named}; planned without a quota.", err=True)


def _placed(
    file: Path,
    job: SourceMapping,
    spec: JobSpec,
    described: Sequence[DescribedNode],
    otherwise: Sequence[DescribedNode],
) -> tuple[JobSpec, Sequence[DescribedNode]]:
    """The job with the places of its text, and the nodes it is planned for. Its faults are shown as those of a
    placement are: each with its line."""
    from callboard.cli.layouts.placed_plan import placed  # noqa: PLC0415 - as above
    from callboard.cli.show.file_faults import name_of, refuse, warn  # noqa: PLC0415 - most jobs have no placement

    try:
        spec, cluster, warnings = placed(spec, described, otherwise)
    except Misfits as error:
        refuse(name_of(file), job.text, faults_of(error, job))
    except InvalidInput as error:
        refuse(name_of(file), job.text, error.faults)
    warn(name_of(file), job.text, warnings)
    return spec, cluster


def _role_file(roles: Path | None) -> RoleFile:
    if roles is None:
        return RoleFile(presets=PRESETS)
    from callboard.model.inputs.role_file import read_role_file  # noqa: PLC0415 - most plans name no such file

    return read_role_file(roles)


def _described(source: SourceMapping, nodes: str, *, placed: bool) -> tuple[DescribedNode, ...]:
    """The nodes as the option describes them, else as the file does in short; none: it doesn't.

    Args:
        nodes: the option; empty: not given.
        placed: the job has a placement, whose language knows longer descriptions.
    """
    if nodes:
        return nodes_of(parse_cluster(nodes, "--nodes"))
    text = source.get("nodes")
    if text is None or (placed and isinstance(text, list)):
        return ()
    line, column = source.position(("nodes",))
    if not isinstance(text, str | int) or isinstance(text, bool):
        raise InvalidInput([Fault("nodes", "is not a text; write e.g. 4x(2gpu,32cpu)", line, column)])
    try:
        return nodes_of(parse_cluster(str(text)))
    except InvalidInput as error:
        # Its places are those in the text; this one stands in a file.
        raise InvalidInput(replace(fault, line=line, column=column) for fault in error.faults) from None


def as_plain(spec: JobSpec, plan: JobPlan | None) -> dict[str, Any]:
    """A plan as plain values: numbers of CPUs and GPUs, bytes of memory.

    Args:
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
        "per_worker": _amounts(_of_each(component)),
        "totals": _amounts(ask_of(component)),
    }
    if component.elastic:
        value["max_workers"] = component.max_workers
    return value


def _of_each(component: ComponentSpec) -> Resources:
    """What each worker holds; of workers whose places differ, the one with the most."""
    if not component.places:
        return component.resources
    return max(map(component.resources_of, range(component.min_workers)), key=lambda each: each.gpu_milli)


def _by_group(plan: JobPlan) -> dict[str, Any]:
    groups: dict[str, Resources] = {}
    for node in plan.nodes:
        groups[node.node_group] = groups.get(node.node_group, NOTHING) + node.used
    return {group: _amounts(used) for group, used in groups.items()}


def _amounts(resources: Resources) -> dict[str, int | float]:
    """cpu and gpu always, the rest where there is some."""
    amounts: Mapping[str, int] = {"cpu": 0, "gpu": 0, **dict(resources.items())}
    return {name: amount if name in IN_BYTES else plain_number(amount) for name, amount in amounts.items()}


def _read(file: Path) -> SourceMapping:
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        name = "the input" if str(file) == "-" else str(file)
        raise InvalidInput([Fault(name, f"can't be read: {why_unreadable(error)}")]) from error
    return read_yaml(text)
