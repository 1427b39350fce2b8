"""Requests in Python: the specs in human units, as the SDK offers them.

``JobSpec(pool="rlhf", priority=9, components=[ComponentSpec("train", "my_pkg.workers:Trainer", workers=4)])``.
Nothing is checked here: :func:`callboard.model.inputs.job_spec` takes these as it takes mappings, with the same
rules and messages. A field that is None is not stated and takes the default of :mod:`callboard.model.specs`.

Units: counts of CPU, GPU and custom resources as numbers (``1.5``, ``"500m"``), memory as ``"2GiB"`` or bytes,
durations as ``"30s"``, ``"5m"`` or a number of seconds, priorities as numbers.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from callboard.model.frozen import dataclass
from callboard.model.names import is_name

Amount = int | float | str
"""A number or a text with a unit."""

Span = int | float | str
"""A duration: seconds, or a text with a unit."""

_NAME_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # nothing that reads like something else


def fresh_name(prefix: str) -> str:
    """``prefix`` with a random end, for a job whose name nobody cares about."""
    end = "".join(secrets.choice(_NAME_ALPHABET) for _ in range(6))
    return f"{prefix[:56]}-{end}" if is_name(prefix) else f"job-{end}"


class _Request:
    """A dataclass that is a mapping in the making."""

    __slots__ = ()

    def to_mapping(self) -> dict[str, Any]:
        """What is stated, as plain data for ``job_spec`` and its neighbours."""
        stated = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return {name: _plain(value) for name, value in stated if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, _Request):
        return value.to_mapping()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True, slots=True)
class ComponentSpec(_Request):
    """The workers of one role in a job.

    Attributes:
        name: name, once per job.
        actor: import path ``pkg.module:Class``, or the class itself, which must be in a module that workers can
            import. Of a class of ``@ray.remote`` the plain class counts, not the options given there.
        workers: number of workers; or ``min_workers`` and ``max_workers`` for an elastic component.
        resources: of each worker: ``{"cpu": 2, "gpu": 1, "memory": "2GiB"}``.
        args: positional arguments of the constructor, JSON values.
        kwargs: keyword arguments of the constructor, JSON values.
        entry: method called on every worker; the job succeeds when all return, and ``job.result()`` returns what they
            returned.
        role: role whose preset fills in resources and concurrency that are not stated.
        env: variables; those the scheduler owns are refused.
        secret_env: variables whose values are secret whatever their names.
        pass_env: names of the agent's variables to pass on; ``NEXRL_*`` is all that begin with ``NEXRL_``.
        node_selector: labels a node must have, besides the job's; ``{"node": "n1"}`` is that node.
        node_selector_soft: prefer such nodes, worker by worker, instead of asking for them.
        colocation_group: components with one group share a process per rank; their counts are equal.
        colocation_total: resources of one such process; not stated: the most of each that a member states.
        scaling: ``[{"signal": "queue_depth", "above": 100, "action": "down", "step": 1, "cooldown": "30s"}]``.
        ray_options: ``name``, ``memory`` or ``max_concurrency``.
        progress_timeout: a worker whose ``progress()`` says the same for so long, calls being in flight, has failed.
        placement: ``"SPREAD"`` or another strategy, for the workers of this component instead of the job's.
        ports: number of free TCP ports that each worker is given in ``CALLBOARD_PORTS``.
        stop_signal: signal that a stop begins with, sent to the worker's processes: ``"SIGTERM"``.
        limit_gpu_memory: PyTorch in its workers allocates no more of a GPU than ``gpu_memory`` of its resources.
        cpu_affinity: its workers run on CPUs of the NUMA nodes that their GPUs are near to.
        component_placement: where its workers run, in RLinf's language: ``"0-3"``, ``"0-1:0-3"``, ``"all"`` or
            ``{"node_group": "a800", "placement": "0-7"}``; it decides the number of workers and their GPUs.
        places: where each worker runs, already decided: ``[{"node": "n1", "devices": [0, 1]}]``.
        command: a program and its arguments, instead of ``actor``: ``["python", "train.py"]`` (docs/programs.md).
        script: the same as text for a shell.
        ray: give the command a Ray cluster of its own, a node per worker.
        tty: give the command of rank 0 a terminal, which `callboard attach` shows.
        working_dir: directory whose files travel with the job: its workers start there and import from it.
        py_modules: directories and ``.py`` files that travel, too, and that its workers can import by their names.
        environment: ``{"requirements": "requirements.txt"}``, ``{"uv": "pyproject.toml"}`` or ``{"conda": "NAME"}``:
            the Python environment that its workers run in; the same may be said in ``env``, beside variables.
        container: image that its workers run in, by podman or apptainer.

    The other fields are those of :class:`callboard.model.specs.ComponentSpec`.
    """

    name: str
    actor: str | type | Any = None  # Ray's type of a decorated class is known to Ray only
    workers: int | None = None
    resources: Mapping[str, Amount] | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    entry: str | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    max_concurrency: int | None = None
    role: str | None = None
    env: Mapping[str, str] | None = None
    secret_env: Mapping[str, str] | None = None
    pass_env: Sequence[str] | None = None
    pool: str | None = None
    node_selector: Mapping[str, str] | None = None
    node_selector_soft: bool | None = None
    colocation_group: str | None = None
    colocation_total: Mapping[str, Amount] | None = None
    scaling: Sequence[Mapping[str, Any]] | None = None
    in_bundle: bool | None = None
    interpreter: str | None = None
    ray_options: Mapping[str, Any] | None = None
    progress_timeout: Span | None = None
    placement: str | None = None
    ports: int | None = None
    stop_signal: str | None = None
    limit_gpu_memory: bool | None = None
    cpu_affinity: bool | None = None
    component_placement: str | int | Mapping[str, Any] | None = None
    places: Sequence[Mapping[str, Any]] | None = None
    command: Sequence[str | os.PathLike[str]] | None = None
    script: str | None = None
    ray: bool | None = None
    tty: bool | None = None
    working_dir: str | os.PathLike[str] | None = None
    py_modules: Sequence[str | os.PathLike[str]] | None = None
    environment: Mapping[str, str] | str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(_Request):
    """The unit of submission; started all or nothing.

    Attributes:
        pool: pool to charge.
        components: at least one.
        name: unique among jobs that neither have ended nor are ending. Not stated: the first component's name with a
            random end, chosen once, so that a repeated submit asks for the same job.
        priority: −1000 … 1000, default 5.
        labels: for preemption rules and people.
        placement: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
        owner: ``"detached"`` or ``{"session": {"lease": "30s"}}``.
        restart: ``{"max_restarts": 3, "backoff_base": "1s", "backoff_max": "60s", "window": "1h"}``;
            with ``"scope": "worker"`` only the lost worker is replaced.
        wait_for_nodes: ``{"timeout": "5m"}`` or just the duration.
        require_checkpoint: once it lost a checkpoint, spare it until it has run for ``min_runtime``.
        cluster: ``num_nodes``, ``node_groups`` and ``component_placement`` as in an RLinf config.
        placement_config: the same as YAML text with a ``cluster`` key; ``placement_source``: the file it is from.

    The other fields are those of :class:`callboard.model.specs.JobSpec`.
    """

    pool: str
    components: Sequence[ComponentSpec | Mapping[str, Any]]
    name: str | None = None
    priority: Amount | None = None
    labels: Mapping[str, str] | None = None
    placement: str | None = None
    gang: bool | None = None
    owner: str | Mapping[str, Any] | None = None
    preemptible: bool | None = None
    min_runtime: Span | None = None
    grace: Span | None = None
    on_preempt: str | None = None
    restart: Mapping[str, Any] | None = None
    ttl_after_finished: Span | None = None
    estimated_duration: Span | None = None
    wait_for_nodes: Span | Mapping[str, Any] | None = None
    fencing: str | None = None
    node_selector: Mapping[str, str] | None = None
    node_selector_soft: bool | None = None
    starvation_after: Span | None = None
    start_timeout: Span | None = None
    never_preempts: bool | None = None
    require_checkpoint: bool | None = None
    cluster: Mapping[str, Any] | None = None
    placement_config: str | None = None
    placement_source: str | None = None
    placement_revision: int | None = None

    def __post_init__(self) -> None:
        if self.name is None:
            first = next(iter(self.components), None)
            named = first.name if isinstance(first, ComponentSpec) else (first or {}).get("name")
            object.__setattr__(self, "name", fresh_name(named if isinstance(named, str) else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class PgPoolSpec(_Request):
    """How a pool keeps placement groups; see :class:`callboard.model.specs.PgPoolSpec` for the fields.

    Attributes:
        reserved: shape of each group kept for high priorities: ``[{"cpu": 2, "gpu": 1}]``.
        reuse_slack: how much larger than the ask a reused group may be, e.g. ``1.5``.
        retries: ``{"attempts": 6, "base": "1s"}``.
    """

    enable: bool | None = None
    reserved: Sequence[Mapping[str, Amount]] | None = None
    dynamic: bool | None = None
    max_dynamic: int | None = None
    reuse: bool | None = None
    reserved_min_priority: Amount | None = None
    reserved_lendable: bool | None = None
    reuse_slack: Amount | None = None
    idle_ttl: Span | None = None
    charge_reserved: bool | None = None
    creation_timeout: Span | None = None
    retries: Mapping[str, Any] | None = None

    def to_mapping(self) -> dict[str, Any]:
        """What is stated; ``PgPoolSpec()`` alone still says that groups are kept."""
        return {"enable": True} | _Request.to_mapping(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy(_Request):
    """When a job must yield; for the cluster, or as a pool's overrides.

    Attributes:
        label_rules: ``{"role": {"train": ["reward", "rollout"]}}``.
        aggressiveness: ``"LOW"``, ``"MEDIUM"`` or ``"HIGH"``.
        max_victims_per_round: a number; 0 or ``"unlimited"``.
        max_preemptions_per_job: a number; 0 or ``"unlimited"``.

    The other fields are those of :class:`callboard.model.policy.PreemptionPolicy`.
    """

    enable_label_preemption: bool | None = None
    label_rules: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    aggressiveness: str | None = None
    enable_cross_pool: bool | None = None
    cross_pool_threshold: Amount | None = None
    protected_pools: Sequence[str] | None = None
    cancel_timeout: Span | None = None
    kill_timeout: Span | None = None
    min_runtime: Span | None = None
    preemption_delay: Span | None = None
    max_victims_per_round: int | str | None = None
    max_preemptions_per_job: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(_Request):
    """A named quota that jobs are charged to; see :class:`callboard.model.specs.PoolSpec` for the fields.

    Attributes:
        nominal: guaranteed quota: ``{"cpu": 6, "memory": "8GiB", "gpu": 6}``; what is not named is not limited.
    """

    name: str
    nominal: Mapping[str, Amount] | None = None
    borrow_limit: Mapping[str, Amount] | None = None
    lend_limit: Mapping[str, Amount] | None = None
    cohort: str | None = None
    labels: Mapping[str, str] | None = None
    node_selector: Mapping[str, str] | None = None
    protected: bool | None = None
    exec: bool | None = None
    preload: Sequence[str] | None = None
    members: Sequence[str] | None = None
    stop_policy: str | None = None
    pg_pool: PgPoolSpec | Mapping[str, Any] | None = None
    preemption: PreemptionPolicy | Mapping[str, Any] | None = None
