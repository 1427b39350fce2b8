"""Jobs as input: at least one component, workers that can be counted, no variable of the scheduler's."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from callboard.model.faults import InvalidInput
from callboard.model.inputs.code import as_if_sent
from callboard.model.inputs.component import ComponentInput
from callboard.model.inputs.compounds import sequence
from callboard.model.inputs.groups import faults_of_groups
from callboard.model.inputs.located import Misfit, Misfits, Refused, as_mapping, shown
from callboard.model.inputs.placement_config import with_placement_config
from callboard.model.inputs.reading import Input, faults_of, read
from callboard.model.inputs.scalars import MAX_WORKERS
from callboard.model.inputs.source import SourceMapping
from callboard.model.schema import ANY
from callboard.model.specs import ComponentSpec, JobSpec, RestartPolicy

MAX_COMPONENTS = 64
"""Most components of a job."""

__all__ = ["ComponentInput", "JobInput", "is_job_file", "job_of_file", "job_spec"]


class RestartInput(Input, of=RestartPolicy):
    """The keys of ``restart``."""

    def consistent(self) -> list[Misfit]:
        """A backoff that rises."""
        spec = self.spec()
        return (
            [Misfit(("backoff_base",), "is longer than backoff_max")]
            if spec.backoff_base_ms > spec.backoff_max_ms
            else []
        )


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


class JobInput(Input, of=JobSpec):
    """The keys of a job besides those that its spec declares, and what they say together."""

    elsewhere = MappingProxyType(
        {
            **dict.fromkeys(("queue", "queue_name", "queueName"), "pool"),
            **dict.fromkeys(("tasks", "roles", "replicaSpecs", "replica_specs"), "components"),
            **dict.fromkeys(("priority_class", "priorityClassName"), "priority, a number"),
            **dict.fromkeys(("max_retries", "retries", "backoffLimit", "max_restarts"), "restart: {max_restarts: …}"),
            **dict.fromkeys(("ttlSecondsAfterFinished", "ttl"), "ttl_after_finished"),
            **dict.fromkeys(("scheduling_strategy", "strategy"), "placement"),
            **dict.fromkeys(("cancel_timeout", "terminationGracePeriodSeconds"), "grace"),
            "nodeSelector": "node_selector",
        }
    )
    neighbours = MappingProxyType({ComponentInput: "a component, in the list of components", RestartPolicy: "restart"})
    internal = frozenset({"placement_config", "placement_source", "placement_revision"})

    before = MappingProxyType({"owner": _owner, "wait_for_nodes": _wait, "components": _components})

    cluster: Annotated[Any, ANY] = None  # became the placement_config

    def consistent(self) -> list[Misfit]:
        """Components that can be told apart, counted, and share their processes."""
        misfits = [*_repeated(self.components), *faults_of_groups(self.components)]
        workers = sum(component.max_workers for component in self.components)
        if workers > MAX_WORKERS:
            misfits.append(Misfit(("components",), f"{workers} workers are too many; {MAX_WORKERS} are allowed"))
        return misfits

    def spec(self) -> JobSpec:
        stated = self.stated("cluster")
        if self.gang is False:
            stated["components"] = tuple(map(self._one_by_one, self.components))
        return JobSpec(**stated)

    def _one_by_one(self, component: ComponentSpec) -> ComponentSpec:
        """A component of a job that need not start whole: elastic from one worker on. One whose workers have their
        places is as it is."""
        fixed = component.min_workers == component.max_workers and not component.places and not self.placement_config
        return replace(component, min_workers=1) if fixed else component


def _repeated(components: Sequence[ComponentSpec]) -> list[Misfit]:
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
    """The job that a file describes, for the verbs that plan it and send nothing. Its ``nodes`` are no part of the job.

    Raises:
        InvalidInput: every fault.
    """
    source = as_if_sent(source)
    return job_spec(SourceMapping.like(source, {key: value for key, value in source.items() if key != "nodes"}))
