"""What is known of one worker while it comes up, lives and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from callboard.agents.files.checkpoints import NOTHING_LEFT, Yielded
from callboard.agents.host.worker_secrets import hiding
from callboard.agents.runtime import Hosted
from callboard.agents.system.memory_watch import Held
from callboard.agents.system.process_tree import ProcessId
from callboard.agents.worker.exit_verdict import ExitVerdict, exit_verdict, how_it_ended, usual_causes
from callboard.agents.worker.stop_ladder import StopOrder
from callboard.agents.worker.worker_host_up import Bringing
from callboard.agents.worker.worker_order import Site, WorkerOrder
from callboard.agents.worker.worker_record import Stage, WorkerRecord, write_record
from callboard.agents.worker.worker_reports import NotStarted, WorkerReports
from callboard.agents.worker.worker_signals import First, Signals
from callboard.v1 import agent_pb2


class WorkerFacts:
    """Shared by the parts of a worker: its start, its end, and what is told of it.

    Attributes:
        site: what the node's workers share.
        reports: speaks for it; holds its newest order.
        signals: what may cut its work short.
        bringing: how it comes by its host.
        state: as Hello shows it.
        process: its process, once that is known.
        hosted: its host, once that can be asked.
        hooks: hooks that its class has, once it is ready.
        told: fields of WorkerReady that are known only once.
        stopping: the stop that was asked for.
        tree: the process tree as last seen, for the day it dies alone.
        peak_bytes: most memory that the tree was seen to hold.
        beside_bytes: memory of the tree beside its own process, when the tree was last seen.
        secrets: what is masked in what it wrote, of one that was taken over; None: not known.
        oom_kills: processes that the kernel had ended here for lack of memory when the worker began.
    """

    def __init__(self, order: WorkerOrder, site: Site) -> None:
        self.site = site
        self.reports = WorkerReports(order, site.outbox)
        self.signals = Signals(site.processes)
        self.bringing = Bringing(site)
        self.state: agent_pb2.AgentWorkerState.ValueType = agent_pb2.AGENT_WORKER_STATE_STARTING
        self.process: ProcessId | None = None
        self.hosted: Hosted | None = None
        self.hooks: frozenset[str] = frozenset()
        self.told: Mapping[str, Any] = {}
        self.stopping: StopOrder | None = None
        self.tree: frozenset[ProcessId] = frozenset()
        self.peak_bytes = 0
        self.beside_bytes = 0
        self.oom_kills = site.processes.oom_kills()
        self.secrets: list[str] | None = None

    @property
    def order(self) -> WorkerOrder:
        """The newest start command for it."""
        return self.reports.order

    @property
    def name(self) -> str:
        """`{job}/{component}/{rank}/g{generation}`."""
        return self.order.launch.name

    @property
    def told_name(self) -> str:
        """What people call it: job, component and rank."""
        worker = self.order.command.worker
        return f"{self.order.command.job_name or worker.job_id}/{worker.component}/{worker.rank}"

    def see_tree(self, tree: frozenset[ProcessId]) -> None:
        """Its process tree as it is now; an empty one means that it died just now, and the last one is what counts."""
        self.tree = tree or self.tree
        used = self.site.processes.usage_of(tree)
        own = self.site.processes.usage_of([self.process]).memory_bytes if self.process in tree else 0
        self.beside_bytes = used.memory_bytes - min(own, used.memory_bytes)
        self.peak_bytes = max(self.peak_bytes, used.peak_bytes)

    def see_memory(self) -> None:
        """Remember what its own process holds now, and held at most so far."""
        if self.process is None:
            return
        used = self.site.processes.usage_of([self.process])
        self.peak_bytes = max(self.peak_bytes, used.peak_bytes)
        if used.memory_bytes:
            asked = self.order.command.allocation.resources.memory_bytes
            now_s = asyncio.get_running_loop().time()
            self.site.memory.see(Held(self.told_name, used.memory_bytes + self.beside_bytes, asked, now_s))

    def adopt(self, record: WorkerRecord) -> None:
        """Know what an earlier agent knew."""
        self.process = record.process
        self.hooks = record.hooks
        self.told = record.told
        self.bringing.begun_before = True
        if record.stage is Stage.READY:
            self.state = agent_pb2.AGENT_WORKER_STATE_READY
        elif record.stage is Stage.ENDING:
            self.state = agent_pb2.AGENT_WORKER_STATE_STOPPING

    def learn_host(self, hosted: Hosted) -> None:
        """Its host is there."""
        self.hosted = hosted
        self.process = hosted.process
        self.signals.watch_process(hosted.process)

    def write(self, stage: Stage) -> None:
        """Record it for the next agent."""
        record = WorkerRecord(
            command_id=self.order.command_id,
            command=self.order.command,
            stage=stage,
            process=self.process,
            address=self.hosted.address if self.hosted is not None else "",
            hooks=self.hooks,
            told=self.told,
            ports=self.site.ports.facts(self.order.launch.name),
            marker=self.order.marker,
        )
        self.site.run_dir.put(write_record(self.order.launch.name, record))
        self.bringing.settle_spare()

    def exit_message(self) -> str:
        """Why or how its process ended."""
        if self.signals.over.done() and self.signals.over.result():
            return self.signals.over.result()
        told = "ended" if self.hosted is None else self.hosted.exit_message()
        return how_it_ended(self.signals.code) if self.signals.code is not None else told

    def verdict(self, message: str, code: int | None, *, oom_kills_then: int, ray_says: str = "") -> ExitVerdict:
        """Why it, or the command that it runs, ended as `message` says."""
        return exit_verdict(
            message,
            oom_kills=oom_kills_then - self.oom_kills,
            ray_says=ray_says,
            code=code,
            peak_bytes=self.peak_bytes,
            asked_bytes=self.order.command.allocation.resources.memory_bytes,
            larger=self.site.memory.larger_than(self.told_name, asyncio.get_running_loop().time()),
        )

    def stderr_tail(self) -> str:
        """The end of what it wrote to stderr, its secrets masked, also where a child of it wrote them. Empty where they
        aren't known: of a worker that ended before the agent which took it over could ask."""
        plan = self.order.plan
        secrets = [plan["env"][name] for name in plan.get("secrets", ())] if plan else self.secrets
        return "" if secrets is None else self.site.outputs.stderr_tail(self.order.output, hiding(secrets))

    def cut_short(self, first: First, during: str) -> NotStarted:
        """What it means that something else came first while it was starting."""
        match first:
            case First.STOP:
                return NotStarted(agent_pb2.START_FAILURE_STOPPED, f"stopped before {during}")
            case First.DEADLINE:
                limit = self.order.command.start_timeout_ms / 1000
                return NotStarted(agent_pb2.START_FAILURE_DEADLINE, f"not ready after {limit:g} s, before {during}")
            case _:
                causes = usual_causes(self.signals.code)
                message = f"{self.exit_message()} before {during}" + (f"; {causes}" if causes else "")
                return NotStarted(agent_pb2.START_FAILURE_DIED, message)

    def answer_stops(
        self,
        outcome: agent_pb2.StopOutcome.ValueType,
        yielded: Yielded = NOTHING_LEFT,
        detail: str = "",
    ) -> None:
        """Answer every stop command that waits."""
        if self.stopping is None:
            return
        now = asyncio.get_running_loop().time()
        for report in self.reports.stopped(self.stopping, now, outcome, yielded, detail):
            if yielded.checkpoint is not None:
                self.site.outbox.when_acknowledged(report, lambda: self.site.checkpoints.drop(self.name))
