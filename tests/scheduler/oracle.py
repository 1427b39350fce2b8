"""An oracle for small clusters: the same questions that the core answers, put to a constraint solver (OR-Tools CP-SAT).

It shares nothing with the core but the words: room, quota and the rules of yielding are written down again from
docs/scheduling.md, as constraints over all placements and all sets of victims at once. It is slow and only for tests.

What it takes as given: running workers don't move, and a device share never straddles two devices (I1). An idle
dynamic group counts as free room, because it may be trimmed; a reserved group's room is its own for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from ortools.sat.python import cp_model

MILLI = 1000

_Expr = cp_model.LinearExpr | int

Amounts = Mapping[str, int]
"""Amount by resource name: milli-units, or bytes of memory."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node; ``usable`` False: nothing new may be placed there; ``cards``: memory and model of each device."""

    name: str
    capacity: Amounts
    devices: int
    labels: Mapping[str, str] = field(default_factory=dict)
    usable: bool = True
    cards: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool. ``max_dynamic`` None: it keeps no placement groups."""

    name: str
    nominal: Amounts = field(default_factory=dict)
    cohort: str = ""
    borrow_limit: Amounts = field(default_factory=dict)
    lend_limit: Amounts = field(default_factory=dict)
    protected: bool = False
    max_dynamic: int | None = None
    reserved_from: int = 8 * MILLI
    lendable: bool = False


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Room on one node; ``devices``: milli by index, of whose memory ``gpu_memory`` lies in equal parts on each."""

    node: str
    amounts: Amounts
    devices: Mapping[int, int] = field(default_factory=dict)

    def memory_of(self, index: int) -> int:
        """What it takes of the memory of a device."""
        return self.amounts.get("gpu_memory", 0) // len(self.devices) if index in self.devices else 0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A worker that wants room, and the pool it is charged to; ``model``, ``least_memory``: of each of its devices."""

    pool: str
    ask: Amounts
    model: str = ""
    least_memory: int = 0

    @property
    def pieces(self) -> int:
        """Devices that it has all of or a share of."""
        gpu = self.ask.get("gpu", 0)
        return gpu // MILLI if gpu >= MILLI else int(gpu > 0)

    @property
    def memory_on_each(self) -> int:
        """Memory that it takes of each of them."""
        return self.ask.get("gpu_memory", 0) // max(1, self.pieces)

    def suits(self, card: tuple[int, str]) -> bool:
        """Whether it may have a device."""
        return card[0] >= self.least_memory and self.model in card[1]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: one that runs, or the one that wants to.

    Attributes:
        pool: its own pool, whose policy applies; workers may be charged to others.
        young: it has not run for its minimal runtime.
        lost_ms: for how long it ran since its start or its last checkpoint.
        pieces: room that comes back when it yields.
        dynamic: number of dynamic groups it holds, by pool.
    """

    name: str
    pool: str
    priority: int
    workers: tuple[Worker, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    preemptible: bool = True
    young: bool = False
    lost_ms: int = 0
    strategy: str = "PACK"
    selector: Mapping[str, str] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()
    dynamic: Mapping[str, int] = field(default_factory=dict)

    @property
    def pools(self) -> tuple[str, ...]:
        """Pools it is charged to."""
        return tuple(dict.fromkeys(worker.pool for worker in self.workers))

    def holds(self, resource: str) -> int:
        """What its workers hold together."""
        return sum(worker.ask.get(resource, 0) for worker in self.workers)

    def charge(self, pool: str, resource: str) -> int:
        """What it charges to a pool."""
        return sum(worker.ask.get(resource, 0) for worker in self.workers if worker.pool == pool)


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A reserved group of one bundle; ``holder`` empty: idle."""

    pool: str
    piece: Piece
    holder: str = ""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The cluster's rules; thresholds in milli."""

    beats: Mapping[str, Mapping[str, Collection[str]]] = field(default_factory=dict)
    label_gap: int = 500
    same_pool_gap: int = 1000
    cross_pool: bool = True
    cross_pool_gap: int = 5000


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything there is before the preemptor comes."""

    nodes: tuple[Node, ...]
    pools: Mapping[str, Pool]
    running: tuple[Job, ...] = ()
    reserved: tuple[Reserved, ...] = ()
    policy: Policy = Policy()

    def used(self, pool: str, resource: str, without: Collection[str] = ()) -> int:
        """What is charged to a pool by all but some jobs."""
        return sum(job.charge(pool, resource) for job in self.running if job.name not in without)

    def beyond(self, pool: str, without: Collection[str] = ()) -> set[str]:
        """Resources in which a pool uses more than its own."""
        nominal = self.pools[pool].nominal
        return {resource for resource, limit in nominal.items() if self.used(pool, resource, without) > limit}

    def cohort(self, pool: str) -> list[Pool]:
        """Other pools that lend to a pool."""
        own = self.pools[pool].cohort
        return [other for other in self.pools.values() if own and other.cohort == own and other.name != pool]


# ---- the rules between two jobs ----


def yields(cluster: Cluster, victim: Job, preemptor: Job) -> str:
    """The rule by which a running job must yield: "reclaim", "reserved", "label", "gap"; empty if it need not."""
    if not victim.preemptible or victim.young:
        return ""
    outside = [pool for pool in victim.pools if pool not in preemptor.pools]
    if outside and all(_reclaims(cluster, pool, preemptor) for pool in outside):
        return "reclaim"
    if _borrows_reserved(cluster, victim, preemptor):
        return "reserved"
    return _yields_by_priority(cluster, victim, preemptor, outside)


def _yields_by_priority(cluster: Cluster, victim: Job, preemptor: Job, outside: Collection[str]) -> str:
    policy = cluster.policy
    safe = (
        _beats(policy, victim, preemptor)
        or any(cluster.pools[pool].protected for pool in outside)
        or any(_is_owner(cluster, pool, preemptor) for pool in outside)
        or (bool(outside) and not policy.cross_pool)
    )
    gap = preemptor.priority - victim.priority
    if safe:
        return ""
    if _beats(policy, preemptor, victim) and gap >= policy.label_gap:
        return "label"
    return "gap" if gap >= (policy.cross_pool_gap if outside else policy.same_pool_gap) else ""


def _beats(policy: Policy, winner: Job, loser: Job) -> bool:
    return any(
        loser.labels.get(key) in losers
        for key, rules in policy.beats.items()
        for value, losers in rules.items()
        if winner.labels.get(key) == value
    )


def _borrows_reserved(cluster: Cluster, victim: Job, preemptor: Job) -> bool:
    """Whether the victim sits on a reserved group that was lent to it and is meant for jobs like the preemptor."""
    pool = cluster.pools[preemptor.pool]
    lent = any(reserved.holder == victim.name and reserved.pool == pool.name for reserved in cluster.reserved)
    return pool.lendable and lent and victim.priority < pool.reserved_from <= preemptor.priority


def _would_borrow(cluster: Cluster, pool: str, preemptor: Job) -> bool:
    """Whether the preemptor takes one of its pools beyond what is the pool's own."""
    return any(
        preemptor.charge(pool, resource) and cluster.used(pool, resource) + preemptor.charge(pool, resource) > limit
        for resource, limit in cluster.pools[pool].nominal.items()
    )


def _reclaims(cluster: Cluster, pool: str, preemptor: Job) -> bool:
    """Whether a pool uses what is owed to the preemptor."""
    for own in preemptor.pools:
        if pool not in {other.name for other in cluster.cohort(own)} or _would_borrow(cluster, own, preemptor):
            continue
        needs = {resource for resource in cluster.pools[own].nominal if preemptor.charge(own, resource)}
        if needs & cluster.beyond(pool):
            return True
    return False


def _is_owner(cluster: Cluster, pool: str, preemptor: Job) -> bool:
    """Whether the preemptor would borrow while a pool uses no more than is its own."""
    return any(
        pool in {other.name for other in cluster.cohort(own)}
        and _would_borrow(cluster, own, preemptor)
        and not cluster.beyond(pool)
        for own in preemptor.pools
    )


def owed(cluster: Cluster, victims: Iterable[str]) -> bool:
    """Whether a lender takes back no more than it lent: before the last victim of a pool goes, the pool is beyond its
    own quota (QL-08)."""
    names = set(victims)
    by_pools: dict[tuple[str, ...], set[str]] = {}
    for job in cluster.running:
        if job.name in names:
            by_pools.setdefault(job.pools, set()).add(job.name)
    return all(
        any(cluster.beyond(pool, names - {last}) for last in together for pool in pools)
        for pools, together in by_pools.items()
    )


# ---- room and quota ----


class Model:
    """Can the preemptor start, and who must yield? One model over all placements and sets of victims."""

    def __init__(self, cluster: Cluster, preemptor: Job) -> None:
        self._cluster = cluster
        self._preemptor = preemptor
        self._model = cp_model.CpModel()
        self.rules = {job.name: yields(cluster, job, preemptor) for job in cluster.running}
        self._gone = {job.name: self._model.new_bool_var(f"gone {job.name}") for job in cluster.running}
        self._sits: dict[tuple[int, str], cp_model.IntVar] = {}
        self._has: dict[tuple[int, str, int], cp_model.IntVar] = {}
        self._in_reserved: dict[tuple[int, int], cp_model.IntVar] = {}
        self._place()
        self._keep_room()
        self._keep_quota()
        self._keep_strategy()
        self._keep_groups()

    def fits(self, gone: Collection[str] = ()) -> bool:
        """Whether the preemptor can start when exactly these jobs are gone."""
        return self._solve({name: name in gone for name in self._gone}) is not None

    def lowest_level(self) -> int | None:
        """The lowest possible maximum priority of victims that may yield; None: nobody's yielding helps."""
        levels = sorted({job.priority for job in self._cluster.running if self.rules[job.name]})
        for level in levels:
            fixed = {
                job.name: False for job in self._cluster.running if not self.rules[job.name] or job.priority > level
            }
            # Whoever may go is gone: more room never hurts.
            fixed |= {name: True for name in self._gone if name not in fixed}
            if self._solve(fixed) is not None:
                return level
        return None

    def least(self, level: int) -> tuple[int, int, int, int] | None:
        """The least that is taken away when nobody above a level yields and lenders take back no more than is owed:
        devices, then the largest share (in millionths) of any other resource, then GPU time, then time lost. None: no
        such set is enough."""
        jobs = self._cluster.running
        model = self._model.clone()
        for job in jobs:
            if not self.rules[job.name] or job.priority > level:
                model.add(self._gone[job.name] == 0)
        share = model.new_int_var(0, 1_000_000, "largest share")
        for name in sorted({name for job in jobs for worker in job.workers for name in worker.ask} - {"gpu"}):
            capacity = max(1, sum(node.capacity.get(name, 0) for node in self._cluster.nodes))
            held = sum(job.holds(name) * self._gone[job.name] for job in jobs)
            model.add(1_000_000 * held < capacity * (share + 1))
        aims = (
            sum(job.holds("gpu") * self._gone[job.name] for job in jobs),
            share,
            sum(job.holds("gpu") * job.lost_ms * self._gone[job.name] for job in jobs),
            sum(job.lost_ms * self._gone[job.name] for job in jobs),
        )
        while True:
            found = self._least_of(model.clone(), aims)
            if found is None:
                return None
            costs, names = found
            if owed(self._cluster, [name for name in names if self.rules[name] == "reclaim"]):
                return costs
            # Neither these nor more than these.
            model.add(sum(self._gone[name] for name in names) < len(names))

    def _least_of(
        self, model: cp_model.CpModel, aims: Iterable[_Expr]
    ) -> tuple[tuple[int, int, int, int], set[str]] | None:
        costs: list[int] = []
        solver = _solver()
        for aim in aims:
            model.minimize(aim)
            solver = _solver()
            status = solver.solve(model)
            if status == cp_model.INFEASIBLE:
                return None
            assert status == cp_model.OPTIMAL, solver.status_name()
            costs.append(round(solver.objective_value))
            model.add(aim == costs[-1])
        gpu, share, gpu_ms, ms = costs
        return (gpu, share, gpu_ms, ms), {name for name, gone in self._gone.items() if solver.value(gone)}

    def taken(self, names: Collection[str]) -> tuple[int, int, int, int]:
        """What is taken away when these yield, in the same words."""
        jobs = [job for job in self._cluster.running if job.name in names]
        others = sorted({name for job in jobs for worker in job.workers for name in worker.ask} - {"gpu"})
        capacity = {name: max(1, sum(node.capacity.get(name, 0) for node in self._cluster.nodes)) for name in others}
        return (
            sum(job.holds("gpu") for job in jobs),
            max((sum(job.holds(name) for job in jobs) * 1_000_000 // capacity[name] for name in others), default=0),
            sum(job.holds("gpu") * job.lost_ms for job in jobs),
            sum(job.lost_ms for job in jobs),
        )

    def sets(self) -> Iterator[set[str]]:
        """Every irreducible set of jobs that may yield and let the preemptor start."""
        model = self._model.clone()
        for name, rule in self.rules.items():
            if not rule:
                model.add(self._gone[name] == 0)
        model.minimize(sum(self._gone.values()))
        while True:
            solver = _solver()
            if solver.solve(model) != cp_model.OPTIMAL:
                return
            found = {name for name, gone in self._gone.items() if solver.value(gone)}
            yield found
            model.add(sum(self._gone[name] for name in found) < len(found))

    def _solve(self, fixed: Mapping[str, bool]) -> cp_model.CpSolver | None:
        model = self._model.clone()
        for name, value in fixed.items():
            model.add(self._gone[name] == int(value))
        solver = _solver()
        status = solver.solve(model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE), solver.status_name()
        return None if status == cp_model.INFEASIBLE else solver

    def _place(self) -> None:
        """Every worker sits on one node that is open to it, or alone in one reserved group."""
        new = self._model.new_bool_var
        for w, worker in enumerate(self._preemptor.workers):
            for node in self._cluster.nodes:
                self._sits[w, node.name] = new(f"worker {w} on {node.name}")
                if not self._is_open(node):
                    self._model.add(self._sits[w, node.name] == 0)
                for d in range(node.devices):
                    self._has[w, node.name, d] = new(f"worker {w} has {node.name}:{d}")
                    if node.cards and not worker.suits(node.cards[d]):
                        self._model.add(self._has[w, node.name, d] == 0)
            for r, reserved in enumerate(self._cluster.reserved):
                if self._may_use(reserved, worker):
                    self._in_reserved[w, r] = new(f"worker {w} in reserved {r}")
            kept = [var for (other, _), var in self._in_reserved.items() if other == w]
            self._model.add(sum(self._sits[w, node.name] for node in self._cluster.nodes) + sum(kept) == 1)
            for node in self._cluster.nodes:
                devices = sum(self._has[w, node.name, d] for d in range(node.devices))
                self._model.add(devices == worker.pieces * self._sits[w, node.name])

    def _is_open(self, node: Node) -> bool:
        return node.usable and all(node.labels.get(key) == value for key, value in self._preemptor.selector.items())

    def _may_use(self, reserved: Reserved, worker: Worker) -> bool:
        """A reserved group has one bundle, so it serves a pool's only worker of a job."""
        pool = self._cluster.pools[reserved.pool]
        alone = sum(1 for other in self._preemptor.workers if other.pool == worker.pool) == 1
        node = next(node for node in self._cluster.nodes if node.name == reserved.piece.node)
        gpu = worker.ask.get("gpu", 0)
        devices = {
            index: milli
            for index, milli in reserved.piece.devices.items()
            if not node.cards or worker.suits(node.cards[index])
        }
        whole = sum(1 for milli in devices.values() if milli == MILLI)
        has_devices = (
            whole * MILLI >= gpu if gpu >= MILLI else gpu == 0 or any(milli >= gpu for milli in devices.values())
        )
        return (
            alone
            and worker.pool == reserved.pool
            and (self._preemptor.priority >= pool.reserved_from or pool.lendable)
            and self._is_open(node)
            and has_devices
            and bool(gpu or not reserved.piece.devices)
            and all(amount <= reserved.piece.amounts.get(name, 0) for name, amount in worker.ask.items())
        )

    def _keep_room(self) -> None:
        """No node and no device is used beyond what it has (I1, I10)."""
        workers = list(enumerate(self._preemptor.workers))
        for node in self._cluster.nodes:
            names = {name for _, worker in workers for name in worker.ask if name != "gpu"}
            for name in sorted(names):
                ours = sum(worker.ask.get(name, 0) * self._sits[w, node.name] for w, worker in workers)
                theirs = self._theirs(node, partial(_amount, name=name))
                self._model.add(ours + theirs <= node.capacity.get(name, 0))
            for d in range(node.devices):
                ours = sum(min(MILLI, worker.ask.get("gpu", 0)) * self._has[w, node.name, d] for w, worker in workers)
                theirs = self._theirs(node, partial(_share, index=d))
                self._model.add(ours + theirs <= MILLI)
                if node.cards:
                    ours = sum(worker.memory_on_each * self._has[w, node.name, d] for w, worker in workers)
                    theirs = self._theirs(node, partial(Piece.memory_of, index=d))
                    self._model.add(ours + theirs <= node.cards[d][0])
        for r, reserved in enumerate(self._cluster.reserved):
            users = [var for (_, other), var in self._in_reserved.items() if other == r]
            self._model.add(sum(users) <= 1)
            if reserved.holder:
                for user in users:
                    self._model.add_implication(user, self._gone[reserved.holder])

    def _theirs(self, node: Node, amount: Callable[[Piece], int]) -> _Expr:
        """What others take on a node: reserved groups always, running jobs unless they are gone."""
        fixed = sum(amount(reserved.piece) for reserved in self._cluster.reserved if reserved.piece.node == node.name)
        return fixed + sum(
            amount(piece) * (1 - self._gone[job.name])
            for job in self._cluster.running
            for piece in job.pieces
            if piece.node == node.name
        )

    def _keep_quota(self) -> None:
        """Only what is asked for counts (PC-16). In a cohort, whatever a pool uses beyond its guaranteed part comes out
        of one pot of all that is lent."""
        for name in self._preemptor.pools:
            pool = self._cluster.pools[name]
            for resource, nominal in pool.nominal.items():
                asked = self._preemptor.charge(name, resource)
                if not asked:
                    continue
                own = asked + self._used(name, resource)
                if not pool.cohort:
                    self._model.add(own <= nominal)
                    continue
                if resource in pool.borrow_limit:
                    self._model.add(own <= nominal + pool.borrow_limit[resource])
                pot: list[_Expr] = []
                lent = 0
                for other in [pool, *self._cluster.cohort(name)]:
                    if resource not in other.nominal:
                        continue
                    lends = min(other.nominal[resource], other.lend_limit.get(resource, other.nominal[resource]))
                    lent += lends
                    used = self._used(other.name, resource) + self._preemptor.charge(other.name, resource)
                    taken = self._model.new_int_var(0, 1 << 40, f"{other.name} takes {resource}")
                    self._model.add(taken >= used - (other.nominal[resource] - lends))
                    pot.append(taken)
                own_lends = min(nominal, pool.lend_limit.get(resource, nominal))
                within = self._model.new_bool_var(f"{name} needs nothing of the pot")
                self._model.add(own <= nominal - own_lends).only_enforce_if(within)
                self._model.add(sum(pot) <= lent).only_enforce_if(~within)

    def _used(self, pool: str, resource: str) -> _Expr:
        return sum(job.charge(pool, resource) * (1 - self._gone[job.name]) for job in self._cluster.running)

    def _keep_strategy(self) -> None:
        """STRICT_PACK: one node for all; STRICT_SPREAD: a node for each. The others only prefer."""
        at: dict[str, list[cp_model.IntVar]] = {node.name: [] for node in self._cluster.nodes}
        for (_, node_name), var in self._sits.items():
            at[node_name].append(var)
        for (_, r), var in self._in_reserved.items():
            at[self._cluster.reserved[r].piece.node].append(var)
        count = len(self._preemptor.workers)
        for node_name, vars_ in at.items():
            if self._preemptor.strategy == "STRICT_SPREAD":
                self._model.add(sum(vars_) <= 1)
            elif self._preemptor.strategy == "STRICT_PACK":
                here = self._model.new_bool_var(f"all on {node_name}")
                self._model.add(sum(vars_) == count * here)

    def _keep_groups(self) -> None:
        """At most ``max_dynamic`` groups made on demand; a worker that sits on a node needs one."""
        for name in self._preemptor.pools:
            pool = self._cluster.pools[name]
            if pool.max_dynamic is None:
                continue
            fresh = self._model.new_bool_var(f"new group in {name}")
            for (w, _), var in self._sits.items():
                if self._preemptor.workers[w].pool == name:
                    self._model.add_implication(var, fresh)
            held = sum(job.dynamic.get(name, 0) * (1 - self._gone[job.name]) for job in self._cluster.running)
            self._model.add(held + fresh <= pool.max_dynamic)


def _amount(piece: Piece, *, name: str) -> int:
    return piece.amounts.get(name, 0)


def _share(piece: Piece, *, index: int) -> int:
    return piece.devices.get(index, 0)


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    return solver
