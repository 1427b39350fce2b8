"""Jobs as input: at least one component, workers that can be counted, no variable of the scheduler's."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from callboard.model.faults import InvalidInput
from callboard.model.inputs.component import MAX_WORKERS, ComponentInput
from callboard.model.inputs.compounds import LabelMap, sequence
from callboard.model.inputs.groups import faults_of_groups
from callboard.model.inputs.located import Misfit, Misfits, Refused, as_mapping, shown
from callboard.model.inputs.placement_config import placement_text, with_placement_config
from callboard.model.inputs.reading import Input, faults_of, read
from callboard.model.inputs.scalars import (
    Duration,
    Flag,
    Name,
    PositiveDuration,
    PositiveTimeout,
    Priority,
    Text,
    Timeout,
    choice,
    whole,
)
from callboard.model.inputs.source import SourceMapping
from callboard.model.specs import ComponentSpec, Fencing, JobSpec, OnPreempt, RestartPolicy, RestartScope, Strategy

MAX_COMPONENTS = 64
"""Most components of a job."""


class RestartInput(Input):
    """The keys of ``restart``."""

    max_restarts: Annotated[int, whole(0, 10_000)] | None = None
    backoff_base_ms: PositiveTimeout | None = Field(None, alias="backoff_base")
    backoff_max_ms: PositiveTimeout | None = Field(None, alias="backoff_max")
    window_ms: Duration | None = Field(None, alias="window")
    scope: Annotated[RestartScope, choice(RestartScope)] | None = None

    @model_validator(mode="after")
    def _rising(self) -> RestartInput:
        spec = self.spec()
        if spec.backoff_base_ms > spec.backoff_max_ms:
            raise Misfits([Misfit(("backoff_base",), "is longer than backoff_max")])
        return self

    def spec(self) -> RestartPolicy:
        """The frozen form."""
        return RestartPolicy(**self.stated())


class SessionInput(Input):
    """The keys of ``owner.session``."""

    lease: PositiveDuration


class OwnerInput(Input):
    """The keys of ``owner``, where it isn't the word ``detached``."""

    session: SessionInput


class WaitInput(Input):
    """The keys of ``wait_for_nodes``."""

    timeout: Duration


def _owner(value: object) -> object:
    """``detached`` is "not stated"."""
    if isinstance(value, str):
        if value.strip().lower() == "detached":
            return None
        raise Refused(f"{shown(value)} is unknown; use detached or {{session: {{lease: 30s}}}}")
    return value


def _wait(value: object) -> object:
    """``wait_for_nodes: 5m`` is short for ``{timeout: 5m}``."""
    return {"timeout": value} if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def _components(value: object) -> object:
    found = sequence(value, "a list of components, each with name and actor", MAX_COMPONENTS)
    if not found:
        raise Refused("a job needs at least one component")
    return found


class JobInput(Input):
    """The keys of a job."""

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("queue", "queue_name", "queueName"), "pool"),
            **dict.fromkeys(("workers", "tasks", "roles", "replicaSpecs", "replica_specs"), "components"),
            **dict.fromkeys(("priority_class", "priorityClassName"), "priority, a number"),
            **dict.fromkeys(("max_retries", "retries", "backoffLimit", "max_restarts"), "restart: {max_restarts: …}"),
            **dict.fromkeys(("ttlSecondsAfterFinished", "ttl"), "ttl_after_finished"),
            **dict.fromkeys(("scheduling_strategy", "strategy"), "placement"),
            "nodeSelector": "node_selector",
        }
    )
    internal = frozenset({"placement_config", "placement_source", "placement_revision"})

    name: Name
    pool: Name
    priority_milli: Priority | None = Field(None, alias="priority")
    labels: LabelMap | None = None
    components: Annotated[tuple[ComponentInput, ...], BeforeValidator(_components)]
    placement: Annotated[Strategy, choice(Strategy)] | None = None
    gang: Flag | None = None
    owner: Annotated[OwnerInput | None, BeforeValidator(_owner)] = None
    preemptible: Flag | None = None
    min_runtime_ms: Timeout | None = Field(None, alias="min_runtime")
    grace_ms: Timeout | None = Field(None, alias="grace")
    on_preempt: Annotated[OnPreempt, choice(OnPreempt)] | None = None
    restart: RestartInput | None = None
    ttl_after_finished_ms: Duration | None = Field(None, alias="ttl_after_finished")
    estimated_duration_ms: Duration | None = Field(None, alias="estimated_duration")
    wait_for_nodes: Annotated[WaitInput | None, BeforeValidator(_wait)] = None
    fencing: Annotated[Fencing, choice(Fencing)] | None = None
    node_selector: LabelMap | None = None
    node_selector_soft: Flag | None = None
    starvation_after_ms: Duration | None = Field(None, alias="starvation_after")
    start_timeout_ms: PositiveTimeout | None = Field(None, alias="start_timeout")
    never_preempts: Flag | None = None
    require_checkpoint: Flag | None = None
    cluster: Any = None  # became the placement_config
    placement_config: Annotated[str, PlainValidator(placement_text)] | None = None
    placement_source: Text | None = None
    placement_revision: Annotated[int, whole(0, 1 << 62)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> JobInput:
        components = [component.spec() for component in self.components]
        misfits = [*_repeated(components), *faults_of_groups(components)]
        workers = sum(component.max_workers for component in components)
        if workers > MAX_WORKERS:
            misfits.append(Misfit(("components",), f"{workers} workers are too many; {MAX_WORKERS} are allowed"))
        if misfits:
            raise Misfits(misfits)
        return self

    def spec(self) -> JobSpec:
        """The frozen form."""
        stated = self.stated("components", "owner", "restart", "wait_for_nodes", "cluster")
        components = tuple(component.spec() for component in self.components)
        stated["components"] = components if self.gang is not False else tuple(map(self._one_by_one, components))
        if self.owner is not None:
            stated["session_lease_ms"] = self.owner.session.lease
        if self.restart is not None:
            stated["restart"] = self.restart.spec()
        if self.wait_for_nodes is not None:
            stated["wait_for_nodes_ms"] = self.wait_for_nodes.timeout
        return JobSpec(**stated)

    def _one_by_one(self, component: ComponentSpec) -> ComponentSpec:
        """A component of a job that need not start whole: elastic from one worker on. One whose workers have their
        places is as it is."""
        fixed = component.min_workers == component.max_workers and not component.places and not self.placement_config
        return replace(component, min_workers=1) if fixed else component


def _repeated(components: list[ComponentSpec]) -> list[Misfit]:
    counts = Counter(component.name for component in components)
    first = {component.name: index for index, component in reversed(list(enumerate(components)))}
    return [
        Misfit(
            ("components", index, "name"), f"{component.name} is the name of components[{first[component.name]}] too"
        )
        for index, component in enumerate(components)
        if counts[component.name] > 1 and index != first[component.name]
    ]


def job_spec(mapping: object) -> JobSpec:
    """A job from a mapping such as ``{"name": "train-00", "pool": "rlhf", "priority": 9, "components": […]}``.

    A ``cluster`` (as in an RLinf config) and the components' ``component_placement`` become its ``placement_config``.

    Raises:
        InvalidInput: every fault. Faults between fields (a name twice) are looked for once each field is right.
    """
    try:
        source = with_placement_config(as_mapping(mapping))
    except Misfits as error:
        raise InvalidInput(faults_of(error, mapping)) from None
    return read(JobInput, source).spec()


def is_job_file(source: Mapping[str, Any]) -> bool:
    """Whether a file is a job and no config of a trainer: it lists components, however the key is spelt."""
    return any(
        isinstance(value, list) and difflib.get_close_matches(str(key)[:80].lower(), ("components",), n=1)
        for key, value in source.items()
    )


def job_of_file(source: SourceMapping) -> JobSpec:
    """The job that a file describes, for the verbs that plan it. Its ``nodes`` are no part of the job.

    Raises:
        InvalidInput: every fault.
    """
    return job_spec(SourceMapping.like(source, {key: value for key, value in source.items() if key != "nodes"}))
