"""One simulation: trouble, then healing, then the end; every decision on the way is checked."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from callboard.controller.loop.collector import sparing_a_run
from callboard.scheduler import Outcome, Scheduler
from callboard.scheduler.records.events import Event
from callboard.scheduler.records.job_records import Change, Drop, JobRecord, Put
from callboard.scheduler.records.states import ENDED
from callboard.simulation.checks.acknowledged import Acknowledged
from callboard.simulation.checks.audit import Audit
from callboard.simulation.checks.ending import check_nothing_left, check_settled
from callboard.simulation.checks.report import SimulationFailure, SimulationReport
from callboard.simulation.checks.witness import LOOK_MS, is_unproved
from callboard.simulation.options import Fault, SimulationOptions
from callboard.simulation.programs.agent import Supervisor
from callboard.simulation.programs.controller import Controller
from callboard.simulation.trouble.calls import Calls
from callboard.simulation.trouble.chaos import Chaos
from callboard.simulation.trouble.operators import Operators
from callboard.simulation.trouble.shapes import machines
from callboard.simulation.trouble.workload import Workload
from callboard.simulation.world.disk import Disk
from callboard.simulation.world.machines import Machines
from callboard.simulation.world.network import Network
from callboard.simulation.world.rayworld import RayWorld
from callboard.simulation.world.rules import RuleBroken, watched_logs
from callboard.simulation.world.site import Chance, Site
from callboard.simulation.world.virtual_time import Timeline

LAST_EVENTS = 30
PROGRESS_EVERY = 5_000

STILL_MS = 3_600_000
"""Clients call all the time, and nothing that is wrong lasts for longer than minutes."""

HEARD_MS = 10_000
"""For a report to be acknowledged when nothing ails anybody."""

Progress = Callable[[int, int], None]
"""Told the events decided and the virtual milliseconds passed."""


def simulate(options: SimulationOptions, progress: Progress | None = None) -> SimulationReport:
    """Runs one simulation and says what came out; a broken rule is in the report, not raised."""
    return Simulator(options, progress).run()


class Simulator:
    """One simulation: the watcher of its own controller."""

    def __init__(self, options: SimulationOptions, progress: Progress | None = None) -> None:
        self.options = options
        self.steps = 0
        self.healed_at_ms = 0
        """When all trouble ended; 0: it has not."""
        self._progress = progress
        chance = Chance(options.seed, options.schedule)
        self.timeline = Timeline(chance.schedule if Fault.SCHEDULE in options.faults else None)
        places = machines(options.nodes)
        self.disk = Disk()
        counts: Counter[str] = Counter()
        network = Network(self.timeline, chance.network, options.faults, counts)
        self.site = Site(
            options=options,
            timeline=self.timeline,
            chance=chance,
            machines=Machines(self.timeline, places),
            ray=RayWorld(),
            network=network,
            faults=options.faults,
            counts=counts,
        )
        network.happens = self.site.happens
        self.audit = Audit(self.site)
        self.acknowledged = Acknowledged()
        self.controller = Controller(self.site, self.disk, self)
        self.site.controller = self.controller
        self.supervisors = [Supervisor(self.site, place, is_head=place is places[0]) for place in places]
        gpus = sum(place.gpus for place in places)
        self.calls = Calls(self.site, self.controller)
        self.workload = Workload(self.calls, self.acknowledged, gpus)
        self.operators = Operators(self.calls, self.acknowledged, gpus)
        self.chaos = Chaos(self.site, self.controller, self.supervisors)
        self._last: deque[Event] = deque(maxlen=LAST_EVENTS)
        self._ended: Counter[str] = Counter()
        self._counted: dict[str, None] = {}
        self._acknowledged_due = 0
        self._decided_at_ms = 0

    def run(self) -> SimulationReport:
        started_s = time.perf_counter()
        failure = None
        with sparing_a_run(), watched_logs(self.timeline):
            try:
                self._trouble()
                self._heal()
                self._end()
            except Exception as error:  # noqa: BLE001 - whatever it is, the seed that leads there is wanted
                failure = self._failure(error)
            self.timeline.close_down()
            self.disk.close()
        return self._report(time.perf_counter() - started_s, failure)

    # ---- phases ----

    def _trouble(self) -> None:
        self.controller.start()
        for number, supervisor in enumerate(self.supervisors):
            self.timeline.after(number * 200, supervisor.start)
        self.operators.start(self.workload.gap_ms)
        self.workload.start()
        self._look()
        # Chaos needs something to break.
        self.timeline.after(5_000, self.chaos.start)
        hours, events = self.options.hours, self.options.events
        until_ms = None if hours is None else round(hours * 3_600_000)
        few_jobs = self.options.jobs is not None
        while not (events is not None and self.steps >= events):
            if self.timeline.now_ms - self._decided_at_ms > STILL_MS:
                raise RuleBroken("R1", f"nothing was decided for {STILL_MS} ms, whatever was asked")
            if not self.timeline.step(until_ms) or (few_jobs and self.workload.finished and self._all_ended()):
                break

    def _heal(self) -> None:
        self.healed_at_ms = self.timeline.now_ms
        self.calls.open = False
        self.chaos.heal()
        for wait_ms in (30_000, 90_000, 180_000):
            self._pass(wait_ms)
            self._reconnect()
        self._pass(60_000)
        self._check_all()
        check_settled(self.site, self.controller.scheduler, self.controller.now_ms())
        self._check_processes()
        self._check_heard()

    def _end(self) -> None:
        for supervisor in self.supervisors:
            self.operators.set_cordon(supervisor.node_id, cordoned=False)
        self.workload.cancel_all()
        self._pass(60_000)
        self.operators.delete_pools()
        self._pass(60_000)
        self._reconnect()
        self._pass(120_000)
        self._check_all()
        check_nothing_left(self.site, self.controller.scheduler)

    def _look(self) -> None:
        self.controller.look()
        self.timeline.after(LOOK_MS, self._look)

    def _check_processes(self) -> None:
        """Whether what counts as running does; what just died may still be told."""
        workers = self.controller.scheduler.state.workers
        suspects = [worker.generation for worker in workers.values() if is_unproved(self.site, worker)]
        self._pass(10_000)
        for generation in suspects:
            worker = self.controller.scheduler.state.workers.get(generation)
            if worker is not None and is_unproved(self.site, worker):
                raise RuleBroken("R4", f"g{worker.generation} is {worker.state} and nothing of it lives", worker.job)

    def _check_heard(self) -> None:
        """Whether everything that an agent said for long was taken in."""
        for supervisor in self.supervisors:
            for report_id, said_ms in supervisor.agent.said_ms.items() if supervisor.agent is not None else ():
                if self.timeline.now_ms - said_ms > HEARD_MS:
                    raise RuleBroken("R1", f"report {report_id} of {supervisor.node_id} was never acknowledged")

    def _pass(self, wait_ms: int) -> None:
        until_ms = self.timeline.now_ms + wait_ms
        while self.timeline.step(until_ms):
            pass

    def _reconnect(self) -> None:
        for supervisor in self.supervisors:
            if supervisor.agent is not None:
                supervisor.agent.reconnect()

    def _all_ended(self) -> bool:
        state = self.controller.scheduler.state
        return all(job.state in ENDED for job in state.jobs.values())

    # ---- what the controller tells its watcher ----

    def started(self, scheduler: Scheduler) -> None:
        """A state was rebuilt from the journal."""
        self.audit.started(scheduler.state)
        self.acknowledged.check(scheduler.state)

    def before(self, scheduler: Scheduler, event: Event) -> None:
        """An event is about to be decided."""
        self._last.append(event)
        self.audit.before(scheduler.state, event)

    def decided(self, scheduler: Scheduler, event: Event, outcome: Outcome) -> None:  # noqa: ARG002
        """It was: its changes are checked, and everything now and then."""
        self.steps += 1
        self._decided_at_ms = self.timeline.now_ms
        self.audit.decided(scheduler.state, outcome)
        if self.steps % self.options.full_check_every == 0:
            self._check_all()
        if self._progress is not None and self.steps % PROGRESS_EVERY == 0:
            self._progress(self.steps, self.timeline.now_ms)

    def committed(self, changes: Sequence[Change]) -> None:
        for change in changes:
            job = change.record if isinstance(change, Put) else None
            if isinstance(job, JobRecord) and job.state in ENDED and job.uid not in self._counted:
                self._counted[job.uid] = None
                self._ended[job.state.value] += 1
            elif isinstance(change, Drop) and change.kind == "job":
                self._counted.pop(str(change.key), None)
        self.acknowledged.committed(changes)
        if self.steps >= self._acknowledged_due:
            # Only now: between a decision and its commit the state is ahead of what was promised.
            self._acknowledged_due = self.steps + self.options.full_check_every
            self.acknowledged.check(self.controller.scheduler.state)

    def _check_all(self) -> None:
        up_ms = self.timeline.now_ms - self.controller.started_at_ms
        self.audit.full(self.controller.scheduler, self.controller.now_ms(), up_ms)

    # ---- what came out ----

    def _report(self, wall_s: float, failure: SimulationFailure | None) -> SimulationReport:
        state = self.controller.scheduler.state
        return SimulationReport(
            seed=self.options.seed,
            command=self.options.command,
            nodes=self.options.nodes,
            events=self.steps,
            virtual_ms=self.timeline.now_ms,
            wall_s=wall_s,
            handle_s=self.controller.handle_ns / 1e9,
            jobs=tuple(sorted(self._ended.items())),
            preemptions=state.meta.total_preemptions,
            faults=tuple(sorted(self.site.counts.items())),
            promises=self.acknowledged.kept,
            processes=self.site.machines.spawned,
            full_checks=self.audit.full_checks,
            choices=self.timeline.choices,
            order=self.timeline.order,
            journal_digest=self.disk.digest,
            journal_changes=self.disk.changes,
            failure=failure,
        )

    def _failure(self, error: Exception) -> SimulationFailure:
        last = tuple(shorten(repr(event), 400) for event in self._last)
        uid = error.job if isinstance(error, RuleBroken) else ""
        return SimulationFailure(
            step=self.steps,
            at_ms=self.timeline.now_ms,
            rule=error.rule if isinstance(error, RuleBroken) else type(error).__name__,
            message=str(error) if isinstance(error, AssertionError) else f"{error!r} {_where(error)}",
            story=tuple(self._story(uid)),
            last_events=last,
            command=self.options.command,
        )

    def _story(self, uid: str) -> list[str]:
        """What is known of a job: the one concerned, else the one of the last event."""
        state = self.controller.scheduler.state
        if not uid and self._last:
            last = self._last[-1]
            worker = state.workers.get(getattr(last, "generation", 0))
            uid = getattr(last, "uid", "") or (worker.job if worker is not None else "")
        job = state.jobs.get(uid)
        if job is None:
            return []
        lines = [f"{line.at_ms} {line.state}: {line.reason} ({line.cause})" for line in job.story]
        lines += [
            f"g{worker.generation} {worker.component}/{worker.rank} attempt {worker.attempt} on {worker.node_id}: "
            f"{worker.state} ({worker.reason})"
            for worker in state.workers_of(uid)
        ]
        return [f"{job.name} ({uid})", *lines]


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _where(error: Exception) -> str:
    trace = error.__traceback__
    place = ""
    while trace is not None:
        place = f"at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
