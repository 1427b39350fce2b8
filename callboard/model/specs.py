"""Specs: pools, jobs and their components as frozen data, defaults filled in.

Built by :mod:`callboard.model.inputs` from what people write, or by :mod:`callboard.wire` from messages.
Amounts are integers (milli-units, bytes, milliseconds); docs/scheduling.md says what people write for them.

The type of a field is its declaration (:mod:`callboard.model.schema`): a new one needs this and the proto, no more.
What several fields say together is in the readers (``inputs/component.py``, ``job.py``, ``pool.py``).
"""

from __future__ import annotations

import json
from dataclasses import field, replace
from enum import StrEnum
from typing import Annotated

from callboard.model import names
from callboard.model.frozen import dataclass
from callboard.model.inputs.compounds import (
    ArgsJson,
    Devices,
    Env,
    HardwareJson,
    KwargsJson,
    LabelMap,
    Modules,
    PassEnv,
    Pieces,
    Quota,
    SecretEnv,
    Shapes,
    StatedAmounts,
    Total,
    list_of,
)
from callboard.model.inputs.scalars import (
    MAX_WORKERS,
    PACKAGE,
    Actor,
    Concurrency,
    Duration,
    Environment,
    Flag,
    Gauge,
    Image,
    Interpreter,
    Method,
    Name,
    Package,
    PlacementText,
    PositiveDuration,
    PositiveTimeout,
    Priority,
    Ratio,
    StopSignal,
    Text,
    Timeout,
    Workers,
    choice,
    name,
    package,
    whole,
)
from callboard.model.policy import PolicyOverrides
from callboard.model.quantities import NOTHING, Resources, total
from callboard.model.schema import Written, part, parts

Labels = names.Labels
Members = Annotated[tuple[str, ...], list_of(name, "e.g. [alice]", 1_000, distinct=True), Written(unsaid=())]

COLOCATED_CONCURRENCY = 10
"""Calls at once of a member of a colocation group that neither says so nor has a role (docs/roles.md, Presets)."""


PROGRAM = "callboard:Program"
"""The actor of a component that runs a command. By its public name, which never moves: it is in journals."""

RAY_PROGRAM = "callboard:RayProgram"
"""The same with a Ray cluster of its own."""

PROGRAM_SIGNAL = "SIGTERM"
"""Signal that the stop of a command begins with, unless it says another: it is what `cancel()` is to an actor."""


ENVIRONMENT_MS = 1_800_000
"""Bound of the build of a Python environment, or of bringing an image: it comes before a start and doesn't count as
one."""


class StopPolicy(StrEnum):
    """What a pool does with new and running jobs."""

    NONE = "NONE"
    HOLD = "HOLD"
    HOLD_AND_DRAIN = "HOLD_AND_DRAIN"


class Strategy(StrEnum):
    """Where the workers of a job lie to each other."""

    PACK = "PACK"
    SPREAD = "SPREAD"
    STRICT_PACK = "STRICT_PACK"
    STRICT_SPREAD = "STRICT_SPREAD"


class RestartScope(StrEnum):
    """What is started again after a failure."""

    JOB = "JOB"
    WORKER = "WORKER"


class OnPreempt(StrEnum):
    """What happens to a job that yielded."""

    REQUEUE = "REQUEUE"
    CANCEL = "CANCEL"


class ScalingAction(StrEnum):
    """What a scaling rule does to the number of workers."""

    UP = "UP"
    DOWN = "DOWN"


class Fencing(StrEnum):
    """How a cut-off copy is kept from running beside its successor."""

    RELAXED = "RELAXED"
    STRICT = "STRICT"


@dataclass(frozen=True, slots=True, kw_only=True)
class PgPoolSpec:
    """How a pool keeps placement groups.

    Attributes:
        enable: False: each job gets groups of its own, removed at its end.
        reserved: shape of each group kept for high priorities, one bundle each.
        dynamic: make groups on demand.
        max_dynamic: most groups made on demand at one time.
        reuse: use idle groups again.
        reserved_min_priority_milli: lowest priority that uses reserved groups first.
        reserved_lendable: lower priorities may borrow idle reserved groups.
        reuse_slack_milli: how much larger than the ask a reused group may be, in thousandths.
        idle_ttl_ms: an idle dynamic group is removed after this long.
        charge_reserved: charge reserved groups to the pool even while idle.
        creation_timeout_ms: bound of one creation.
        retry_attempts: creations tried before waiting for a change of the cluster.
        retry_base_ms: wait before the first retry, doubled each time.
    """

    enable: Annotated[Flag, Written(always=True)] = True
    reserved: Shapes = ()
    dynamic: Flag = True
    max_dynamic: Annotated[int, whole(0, 10_000)] = 20
    reuse: Flag = True
    reserved_min_priority_milli: Priority = 8000
    reserved_lendable: Flag = False
    reuse_slack_milli: Ratio = 1500
    idle_ttl_ms: Duration = 300_000
    charge_reserved: Flag = False
    creation_timeout_ms: PositiveTimeout = 60_000
    retry_attempts: Annotated[int, whole(1, 1000), Written("retries.attempts")] = 6
    retry_base_ms: Annotated[PositiveTimeout, Written("retries.base")] = 1_000


NO_PG_POOL = PgPoolSpec(enable=False, reuse=False)
"""The groups of a pool that keeps none: private to each job, removed at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A named quota that jobs are charged to.

    Attributes:
        nominal: guaranteed amount per resource; a resource without an entry is not limited (PC-16).
        borrow_limit: most that may be borrowed from the cohort per resource; without an entry: unlimited.
        lend_limit: most that may be lent to the cohort per resource; without an entry: unlimited.
        cohort: pools with one cohort lend to each other; empty: none.
        labels: labels, for people.
        node_selector: labels that a node must have to be used.
        protected: nobody outside may preempt here.
        stop_policy: what happens to new and running jobs.
        members: clients with the role trainer that may act in it.
        preload: modules that spare worker processes import before a start takes one.
        exec: whether people may run programs in the environments of its workers.
    """

    name: Name
    nominal: Annotated[Quota, Written(limited="limited")] = ()
    borrow_limit: Annotated[Quota, Written(limited="borrow_limited")] = ()
    lend_limit: Annotated[Quota, Written(limited="lend_limited")] = ()
    cohort: Name = ""
    labels: LabelMap = ()
    node_selector: LabelMap = ()
    protected: Flag = False
    stop_policy: Annotated[StopPolicy, choice(StopPolicy)] = StopPolicy.NONE
    pg_pool: Annotated[PgPoolSpec, part(PgPoolSpec, unsaid=NO_PG_POOL)] = NO_PG_POOL
    preemption: Annotated[PolicyOverrides, part(PolicyOverrides, unsaid=PolicyOverrides())] = PolicyOverrides()
    members: Members = ()
    preload: Annotated[Modules, Written(unsaid=())] = ()
    exec: Flag = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often a job is started again after a failure.

    Attributes:
        max_restarts: most restarts; 0: a failure fails the job.
        backoff_base_ms: wait before the first, doubled each time.
        backoff_max_ms: longest wait.
        window_ms: failures older than this are forgotten; 0: never.
        scope: the whole job, or only the lost worker while the others keep running.
    """

    max_restarts: Annotated[int, whole(0, 10_000)] = 0
    backoff_base_ms: PositiveTimeout = 1_000
    backoff_max_ms: PositiveTimeout = 60_000
    window_ms: Duration = 0
    scope: Annotated[RestartScope, choice(RestartScope, lower=True)] = RestartScope.JOB


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where one worker must run (docs/scheduling.md, Workers with a place).

    Attributes:
        devices: (index in the node's visible list, share in milli) of each device it holds, in that order.
        observes: it sees every device of the node and holds none.
        env: (name, value) of the variables of the node's ``env_configs``, sorted; the component's win.
        interpreter: Python interpreter of the node's ``env_configs``; empty: the component's.
        node_group: label of the node group that its placement counts ranks in; empty: none.
        hardware_json: settings of the declared hardware it was given, a JSON array; empty: none.
        hardware: (piece, share in milli) of each piece of its node's declared hardware that it holds, sorted; see
            :mod:`callboard.model.quantities`.
    """

    node_id: Annotated[Name, Written("node")]
    devices: Devices = ()
    observes: Flag = False
    env: Env = field(default=(), repr=False)  # values may be secrets (SE-04)
    interpreter: Interpreter = ""
    node_group: Name = ""
    hardware_json: HardwareJson = ""
    hardware: Annotated[Pieces, Written(field="hardware_milli")] = ()

    @property
    def gpu_milli(self) -> int:
        """What it holds of all its devices together."""
        return sum(milli for _, milli in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """One rule of an elastic component: what a reported signal means for its number of workers (docs/roles.md).

    Attributes:
        signal: name of the gauge, as workers or trainers report it.
        action: more workers, or fewer.
        above_milli: holds while the gauge is greater, in thousandths; None: see ``below_milli``.
        below_milli: holds while the gauge is less; exactly one of the two is stated.
        step: workers added or taken away at a time.
        cooldown_ms: once the rule acted, it doesn't act again for this long.
    """

    signal: Name
    action: Annotated[ScalingAction, choice(ScalingAction, lower=True)]
    above_milli: Gauge | None = None
    below_milli: Gauge | None = None
    step: Workers = 1
    cooldown_ms: Duration = 30_000

    def holds(self, value_milli: int) -> bool:
        """Whether the rule matches this value of its gauge."""
        if self.above_milli is not None:
            return value_milli > self.above_milli
        return self.below_milli is not None and value_milli < self.below_milli


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSpec:
    """The workers of one role in a job.

    Attributes:
        name: name, once per job.
        actor: import path ``pkg.module:Class``.
        role: role whose preset fills in what is not stated; empty: none.
        args_json: positional arguments of the constructor, a JSON array.
        kwargs_json: keyword arguments of the constructor, a JSON object.
        entry: method called on every worker; the job succeeds when all return. Empty: none.
        min_workers: fewest workers; equal to ``max_workers`` unless elastic.
        zero_resources: resources stated as none, so that no preset fills them in; empty without a role.
        max_concurrency: calls that may run at once in one worker; 0: as the preset of its role says.
        env: (name, value) of variables, sorted.
        secret_env: (name, value) of variables whose values are secret whatever their names.
        pass_env: names of the agent's variables to pass on; ``NEXRL_*`` is all that begin with ``NEXRL_``.
        pool: pool the component is charged to; empty: the job's.
        node_selector: labels a node must have, besides the job's.
        node_selector_soft: prefer such nodes, worker by worker, instead of asking for them.
        colocation_group: components with one group share a process per rank; empty: none.
        colocation_total: resources of one such process, whatever its members state; nothing: the most of each
            resource that a member states.
        scaling: when an elastic component grows and shrinks by itself; the first rule that matches decides.
        in_bundle: run as an actor inside the bundle.
        interpreter: Python interpreter; empty: the agent's.
        alias: name under which the Ray actor can be looked up too (``ray_options.name``); empty: none.
        placement: where its workers lie to each other; None: as the job says.
        ports: TCP ports of its node that each worker is given.
        progress_timeout_ms: a worker whose ``progress()`` says the same for so long, while calls are in flight, counts
            as failed; 0: never.
        stop_signal: signal that a stop begins with, sent to the worker's process tree; empty: none.
        limit_gpu_memory: PyTorch in its workers allocates no more of a GPU than ``resources`` asks for.
        cpu_affinity: its workers run on CPUs of the NUMA nodes that their GPUs are near to.
        working_dir: package of the code that its workers run in; empty: none.
        py_modules: packages of modules that its workers can import, each of one module, in order of precedence.
        environment: Python environment that its workers run in: ``requirements:`` or ``uv:`` and a package of the files
            that it is built of, or ``conda:`` and a name; empty: the node's own.
        container: image that its workers run in; empty: none.
        places: where each worker must run, by rank, ``max_workers`` of them; empty: wherever there is room. What a
            worker holds of its devices is what its place says.
        members: the components of a colocation group that this one stands for, each as it was asked for; see
            :mod:`callboard.model.roles`. Empty: it stands for itself.
    """

    name: Name
    actor: Actor
    role: Name = ""
    args_json: ArgsJson = "[]"
    kwargs_json: KwargsJson = "{}"
    entry: Method = ""
    min_workers: Workers = 1
    max_workers: Workers = 1
    resources: StatedAmounts = NOTHING
    zero_resources: tuple[str, ...] = ()
    max_concurrency: Annotated[Concurrency, Written(unsaid=0)] = 100
    env: Env = field(default=(), repr=False)  # values may be secrets (SE-04)
    secret_env: SecretEnv = field(default=(), repr=False)
    pass_env: PassEnv = ()
    pool: Name = ""
    node_selector: LabelMap = ()
    node_selector_soft: Flag = False
    colocation_group: Name = ""
    colocation_total: Total = NOTHING
    scaling: Annotated[
        tuple[ScalingRule, ...], parts(ScalingRule, 64, "e.g. [{signal: queue_depth, above: 100, action: down}]")
    ] = ()
    in_bundle: Flag = False
    interpreter: Interpreter = ""
    alias: str = ""
    progress_timeout_ms: Duration = 0
    placement: Annotated[Strategy, choice(Strategy)] | None = None
    ports: Annotated[int, whole(0, 64)] = 0
    stop_signal: StopSignal = ""
    limit_gpu_memory: Flag = False
    cpu_affinity: Flag = False
    working_dir: Package = ""
    py_modules: Annotated[
        tuple[str, ...], list_of(package, "e.g. [../lib/my_pkg, tools.py]", 32), Written(unsaid=())
    ] = ()
    environment: Environment = ""
    container: Image = ""
    places: Annotated[
        tuple[WorkerPlace, ...], parts(WorkerPlace, MAX_WORKERS, "a list of places, each with node and devices")
    ] = ()
    members: tuple[ComponentSpec, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments, of a component that runs one instead of an actor; else empty."""
        return tuple(json.loads(self.args_json)[0]) if self.actor in (PROGRAM, RAY_PROGRAM) else ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Everything that travels to its workers."""
        if not (self.working_dir or self.py_modules or self.environment):
            return ()
        named = (self.working_dir, *self.py_modules, self.environment.partition(":")[2])
        return tuple(each for each in named if PACKAGE.fullmatch(each))

    def field_of(self, package: str) -> str:
        """The field that names a package."""
        if package in self.py_modules:
            return f"py_modules[{self.py_modules.index(package)}]"
        return "working_dir" if package == self.working_dir else "environment"

    @property
    def ray(self) -> bool:
        """Whether its command has a Ray cluster of its own."""
        return self.actor == RAY_PROGRAM

    @property
    def tty(self) -> bool:
        """Whether its command has a terminal."""
        return bool(self.command) and bool(json.loads(self.kwargs_json).get("tty"))

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change while it runs."""
        return self.min_workers != self.max_workers

    def place_of(self, rank: int) -> WorkerPlace | None:
        """Where the worker of a rank must run; None: wherever there is room."""
        return self.places[rank] if rank < len(self.places) else None

    def resources_of(self, rank: int) -> Resources:
        """Resources of the worker of a rank."""
        place = self.place_of(rank)
        if place is None:
            return self.resources
        held = replace(self.resources, gpu_milli=place.gpu_milli)
        if not place.gpu_milli and (held.gpu_memory_bytes or held.selects):
            held = replace(held, gpu_memory_bytes=0).on_gpus_of()
        return (held + Resources.of(custom=dict(place.hardware))).on_gpus_of(held) if place.hardware else held

    def resources_of_first(self, workers: int) -> Resources:
        """Sum over the workers of the lowest ranks."""
        if not self.places:
            return self.resources.scaled(workers)
        return total(self.resources_of(rank) for rank in range(workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The unit of submission; started all or nothing (I3).

    Attributes:
        name: name, unique among jobs that neither have ended nor are ending.
        components: at least one.
        labels: labels for preemption rules and people.
        placement: where workers lie to each other.
        gang: all or nothing. Without, a component of a fixed number of workers is elastic from one worker on.
        session_lease_ms: cancelled when its client is gone this long; 0: detached.
        min_runtime_ms: runs this long before it may be preempted.
        grace_ms: bound of its hooks when stopped; only shortens the policy's. None: the policy's.
        ttl_after_finished_ms: how long it stays listed once ended. None: until the history is full.
        estimated_duration_ms: how long it is thought to run; 0: unknown.
        wait_for_nodes_ms: how long to wait for nodes that could hold it. None: refused at once.
        fencing: how a cut-off copy is kept from running on.
        node_selector: labels a node must have.
        node_selector_soft: prefer such nodes instead of asking for them.
        starvation_after_ms: after this long a blocked job holds the room it needs; 0: never.
        start_timeout_ms: bound of one worker's start.
        never_preempts: waits rather than preempting others.
        require_checkpoint: once it lost a checkpoint, it isn't chosen as a victim again before it has run for
            ``min_runtime_ms``.
        placement_config: placement text in RLinf's language (docs/placement.md), YAML with a ``cluster`` key. What is
            submitted is as the user wrote it; a job keeps the resolved placement in its normal form. Empty: none.
        placement_digest: fingerprint of the text as it was submitted, so that a repeat of the request is known as one,
            though the nodes may have changed; empty: none, or not resolved.
        placement_revision: revision of the inventory that the placement was planned for; 0: not compared.
        placement_nodes: number of nodes that it waits for to be placed, while its places are on nodes that are still to
            come; 0: it is placed.
        placement_source: file that ``placement_config`` was read from, for messages; empty: none.
    """

    name: Name
    pool: Name
    components: Annotated[
        tuple[ComponentSpec, ...], parts(ComponentSpec, 64, "a list of components, each with name and actor")
    ]
    priority_milli: Priority = 5000
    labels: LabelMap = ()
    placement: Annotated[Strategy, choice(Strategy)] = Strategy.PACK
    gang: Flag = True
    session_lease_ms: Annotated[PositiveDuration, Written("owner.session.lease", unsaid=0, needed=True)] = 0
    preemptible: Flag = True
    min_runtime_ms: Timeout = 0
    grace_ms: Timeout | None = None
    on_preempt: Annotated[OnPreempt, choice(OnPreempt)] = OnPreempt.REQUEUE
    restart: Annotated[RestartPolicy, part(RestartPolicy, whole=True)] = RestartPolicy()
    ttl_after_finished_ms: Duration | None = None
    estimated_duration_ms: Duration = 0
    wait_for_nodes_ms: Annotated[Duration | None, Written("wait_for_nodes.timeout", needed=True)] = None
    fencing: Annotated[Fencing, choice(Fencing)] = Fencing.RELAXED
    node_selector: LabelMap = ()
    node_selector_soft: Flag = False
    starvation_after_ms: Duration = 0
    start_timeout_ms: PositiveTimeout = 120_000
    never_preempts: Flag = False
    require_checkpoint: Flag = False
    placement_config: PlacementText = ""
    placement_source: Text = ""
    placement_digest: str = ""
    placement_revision: Annotated[int, whole(0, 1 << 62), Written(unsaid=0)] = 0
    placement_nodes: int = 0

    @property
    def replaces(self) -> bool:
        """Whether a lost worker is replaced while the others keep running."""
        return self.restart.scope is RestartScope.WORKER

    @property
    def longest_start_ms(self) -> int:
        """How long a worker's start may take, with what is built or brought for it before."""
        supplied = any(each.environment or (each.container and not each.command) for each in self.components)
        return self.start_timeout_ms + (ENVIRONMENT_MS if supplied else 0)

    @property
    def placed(self) -> bool:
        """Whether some workers must run at certain places."""
        return any(component.places for component in self.components)

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of all pools that its components are charged to."""
        if len(self.components) == 1:
            return (self.pool_of(self.components[0]),)
        return tuple(dict.fromkeys(self.pool_of(component) for component in self.components))

    def pool_of(self, component: ComponentSpec) -> str:
        """Name of the pool that ``component`` is charged to."""
        return component.pool or self.pool

    def ask(self) -> Resources:
        """What the job needs to start: the fewest workers of every component."""
        return total(component.resources_of_first(component.min_workers) for component in self.components)
