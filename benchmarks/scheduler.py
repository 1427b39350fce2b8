"""How fast does the scheduler decide? ``handle`` alone: no journal, no explain, no check of the invariants.

    python benchmarks/scheduler.py [--nodes 100 1000 10000] [--json]
    python benchmarks/scheduler.py --worst 128 512 10000          # the longest event of each kind, gang by gang
    python benchmarks/scheduler.py --beside TREE                  # another checkout, a few events in turn

Each row is one kind of decision at one size of the cluster (8 devices a node): how many a second, and the median and
99th percentile of one ``handle``. Answers of agents are handled too, but not counted, except where a job ends: there
the seven events until the next one runs count as one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from callboard.controller.loop.collector import spare_what_is_there
from callboard.model.quantities import Resources
from callboard.model.specs import ComponentSpec, JobSpec, PoolSpec
from callboard.scheduler import Outcome, Refusal, Scheduler
from callboard.scheduler.records import commands as cmd
from callboard.scheduler.records import events as ev
from callboard.scheduler.records.node_record import DeviceInfo, RayInfo
from callboard.scheduler.records.states import StopOutcome, WorkerState

DEVICES = 8
CAPACITY = Resources.parse({"cpu": 64, "memory": "512GiB", "gpu": DEVICES})
PACED = "--paced" in sys.argv
"""A measurement of two trees says when this one may go on (:func:`beside`)."""
IN_TURN = 5
"""Events after which it is the other tree's turn."""
FILLING = 512
"""Workers of the gangs that fill up what a benchmark doesn't look at."""


@dataclass(frozen=True)
class Figure:
    """One row: a kind of decision at one size."""

    what: str
    nodes: int
    per_second: float
    p50_ms: float
    p99_ms: float
    count: int


class Cluster:
    """A scheduler and agents that answer at once."""

    def __init__(self, nodes: int, scheduler: Scheduler | None = None) -> None:
        self.scheduler = scheduler or Scheduler()
        self.now_ms = 1
        self.nodes = nodes
        self.jobs = 0
        for n in range(nodes):
            self.handle(self.hello(n))
        self.handle(ev.PoolCreated(now_ms=1, spec=PoolSpec(name="pool")))

    def hello(self, number: int) -> ev.NodeJoined:
        """A node joins, for the first time or again. It asks for no rank; its devices are real ones."""
        return ev.NodeJoined(
            now_ms=self.now_ms,
            node_id=f"n{number}",
            instance="i",
            capacity=CAPACITY,
            devices=tuple(DeviceInfo(id=str(i), uuid=f"GPU-{number}-{i}") for i in range(DEVICES)),
            ray=RayInfo(gcs_address="h:1", session="s", ray_node_id=f"r{number}"),
        )

    def handle(self, event: ev.Event) -> Outcome:
        """One event."""
        return self.scheduler.handle(event)

    def answer(self, outcome: Outcome) -> None:
        """Handles what agents answer to an outcome's commands, and so on."""
        waiting = deque(outcome.commands)
        while waiting:
            command = waiting.popleft()
            event: ev.Event
            if isinstance(command, cmd.CreateGroup):
                event = ev.GroupReady(now_ms=self.now_ms, group_id=command.group_id, attempt=command.attempt)
            elif isinstance(command, cmd.RemoveGroup):
                event = ev.GroupRemoved(now_ms=self.now_ms, group_id=command.group_id)
            elif isinstance(command, cmd.StartWorker):
                event = ev.WorkerStarted(
                    now_ms=self.now_ms, node_id=command.node_id, generation=command.worker.generation
                )
            elif isinstance(command, cmd.ReservePort):
                event = ev.PortReserved(
                    now_ms=self.now_ms, node_id=command.node_id, generation=command.worker.generation, port=20_000
                )
            else:
                event = ev.WorkerStopped(
                    now_ms=self.now_ms,
                    node_id=command.node_id,
                    generation=command.generation,
                    outcome=StopOutcome.COOPERATIVE,
                )
            waiting.extend(self.handle(event).commands)

    def fill(self) -> None:
        """Takes every device that is left with gangs that nobody may preempt."""
        left = self.nodes * DEVICES - self.jobs
        while left > 0:
            workers = min(left, FILLING)
            self.answer(self.handle(self.submission(workers=workers, priority=100)))
            left -= workers

    def submission(self, *, workers: int = 1, priority: float = 5.0, gpu: float = 1.0) -> ev.JobSubmitted:
        """A new job of one component."""
        self.jobs += 1
        self.now_ms += 1
        component = ComponentSpec(
            name="main",
            actor="a:B",
            min_workers=workers,
            max_workers=workers,
            resources=Resources.parse({"cpu": 1, "gpu": gpu}),
        )
        spec = JobSpec(
            name=f"j{self.jobs}", pool="pool", priority_milli=round(priority * 1000), components=(component,)
        )
        return ev.JobSubmitted(now_ms=self.now_ms, uid=f"u{self.jobs}", spec=spec)


def timed(
    what: str, cluster: Cluster, events: Iterator[ev.Event], *, whole: bool = False, answered: bool = True
) -> Figure:
    """Handles events one by one and measures each.

    Args:
        whole: the answers of agents, and what they lead to, are part of what is measured.
        answered: agents answer the commands.
    """
    times: list[int] = []
    gc.collect()
    spare_what_is_there()  # as a controller does after its replay
    for number, event in enumerate(events):
        if PACED and number % IN_TURN == 0:
            print(json.dumps((times[-IN_TURN:], False)), flush=True)
            sys.stdin.readline()
        started = time.perf_counter_ns()
        try:
            outcome = cluster.handle(event)
        except Refusal:
            outcome = Outcome((), (), ())
        if not whole:
            times.append(time.perf_counter_ns() - started)
        if answered:
            cluster.answer(outcome)
        if whole:
            times.append(time.perf_counter_ns() - started)
    if PACED:
        print(json.dumps((times[-((len(times) - 1) % IN_TURN + 1) :], True)), flush=True)
    times.sort()
    return Figure(
        what,
        cluster.nodes,
        len(times) / (sum(times) / 1e9),
        times[len(times) // 2] / 1e6,
        times[min(len(times) - 1, len(times) * 99 // 100)] / 1e6,
        len(times),
    )


def singles(nodes: int) -> Figure:
    """Single-worker jobs on a cluster that fills up."""
    cluster = Cluster(nodes)
    count = min(nodes * DEVICES, 8_000)
    return timed("single-worker job", cluster, (cluster.submission() for _ in range(count)))


def gangs(nodes: int, workers: int, count: int) -> Figure:
    """Gangs of one-device workers."""
    cluster = Cluster(nodes)
    count = min(count, nodes * DEVICES // workers)
    return timed(f"gang of {workers}", cluster, (cluster.submission(workers=workers) for _ in range(count)))


def full(nodes: int, count: int) -> Cluster:
    """A cluster on which as many one-device jobs of random low priorities run as fit."""
    cluster = Cluster(nodes)
    choose = random.Random(1).choice  # noqa: S311 - a fixed load, no secret
    for _ in range(min(count, nodes * DEVICES)):
        cluster.answer(cluster.handle(cluster.submission(priority=choose([1.0, 2.0, 3.0]))))
    return cluster


def preemptions(nodes: int) -> Figure:
    """Jobs of high priority on a full cluster: each evicts one; the answers are handled in between."""
    cluster = full(nodes, 10_000)
    cluster.fill()
    count = min(500, nodes)
    running = min(10_000, nodes * DEVICES)
    return timed(f"victim search among {running}", cluster, (cluster.submission(priority=50) for _ in range(count)))


def unschedulable(nodes: int) -> Figure:
    """Jobs that no node could ever hold: refused at once."""
    cluster = Cluster(nodes)
    return timed("unschedulable verdict", cluster, (cluster.submission(gpu=16) for _ in range(200)))


def completions(nodes: int) -> Figure:
    """A job ends while a thousand wait: it stops, the freed device goes to the next, and that runs."""
    cluster = full(nodes, 10_000)
    cluster.fill()
    for _ in range(1_000):
        cluster.handle(cluster.submission(priority=1.0))
    uids = list(cluster.scheduler.state.jobs_holding)[:300]

    def ends() -> Iterator[ev.Event]:
        for uid in uids:
            yield ev.JobCompleted(now_ms=cluster.now_ms, uid=uid)

    return timed("completion with 1000 waiting", cluster, ends(), whole=True)


def joins(nodes: int) -> Figure:
    """Nodes join a cluster that has so many already."""
    cluster = Cluster(nodes)
    return timed("join of a node", cluster, (cluster.hello(nodes + n) for n in range(min(1_000, nodes))))


def returns(nodes: int) -> Figure:
    """The controller was started again, and every node comes back with the workers it runs."""
    cluster = full(nodes, 10_000)
    running: dict[str, list[ev.RunningWorker]] = {}
    for worker in cluster.scheduler.state.workers.values():
        running.setdefault(worker.node_id, []).append(
            ev.RunningWorker(
                generation=worker.generation,
                job=worker.job,
                component=worker.component,
                rank=worker.rank,
                state=WorkerState.READY,
            )
        )
    cluster.handle(ev.ControllerStarted(now_ms=cluster.now_ms, grace_ms=600_000))
    hellos = (replace(cluster.hello(n), running=tuple(running.get(f"n{n}", ()))) for n in range(nodes))
    return timed("node back after a restart", cluster, hellos)


def losses(nodes: int, silent: int) -> Figure:
    """Some nodes fall silent and are given up one after another, each with the eight jobs that it runs. These take the
    place of others that yield and don't answer, where a node is left."""
    cluster = full(nodes, nodes * DEVICES)
    epochs = {node.node_id: node.epoch for node in islice(cluster.scheduler.state.nodes.values(), silent)}
    for node_id, epoch in epochs.items():
        cluster.handle(ev.NodeSuspected(now_ms=cluster.now_ms, node_id=node_id, epoch=epoch))
    lost = (
        ev.NodeLost(now_ms=cluster.now_ms, node_id=node_id, epoch=epoch, reason="silent")
        for node_id, epoch in epochs.items()
    )
    return timed(f"loss of {silent} nodes", cluster, lost, answered=False)


def memory(nodes: int) -> dict[str, float]:
    """Bytes per node and per running job."""
    tracemalloc.start()
    cluster = Cluster(nodes)
    empty, _ = tracemalloc.get_traced_memory()
    count = min(nodes * DEVICES, 4_000)
    for _ in range(count):
        cluster.answer(cluster.handle(cluster.submission()))
    filled, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"bytes_per_node": empty / nodes, "bytes_per_job": (filled - empty) / count}


def worst(workers: int) -> dict[str, float]:
    """The longest event of each kind in the life of a gang, in ms of CPU time."""
    longest: dict[str, float] = {}

    class Measured(Scheduler):
        def handle(self, event: ev.Event) -> Outcome:
            began = time.thread_time_ns()
            outcome = super().handle(event)
            took_ms = (time.thread_time_ns() - began) / 1e6
            longest[type(event).__name__] = max(took_ms, longest.get(type(event).__name__, 0))
            return outcome

    cluster = Cluster(workers // DEVICES + 50, Measured())
    cluster.answer(cluster.handle(cluster.submission()))
    gc.collect()
    spare_what_is_there()
    longest.clear()
    gang = cluster.submission(workers=workers)
    for event in (gang, ev.JobCompleted(now_ms=cluster.now_ms, uid=gang.uid)):
        cluster.answer(cluster.handle(event))
        while (wake_ms := cluster.scheduler.next_wake_ms()) is not None and wake_ms <= cluster.now_ms + 1:
            cluster.now_ms = max(cluster.now_ms, wake_ms)
            cluster.answer(cluster.handle(ev.Tick(now_ms=cluster.now_ms)))
    return longest


BENCHES: dict[str, Callable[[int], Figure]] = {
    "singles": singles,
    "gang8": lambda nodes: gangs(nodes, 8, 500),
    "gang512": lambda nodes: gangs(nodes, 512, 20),
    "preempt": preemptions,
    "unschedulable": unschedulable,
    "completions": completions,
    "joins": joins,
    "returns": returns,
    "losses": lambda nodes: losses(nodes, nodes),
    "half-lost": lambda nodes: losses(min(nodes, 200), min(nodes, 200) // 2),
}


def beside(tree: str, name: str, nodes: int) -> str:
    """One benchmark on this tree and another, a few events in turn, so that a machine whose speed changes from minute
    to minute is the same for both.

    Returns:
        The p50 of both, and the median ratio of what the same few events took here and there.
    """
    here = str(Path(__file__).resolve().parent.parent)
    arguments = [sys.executable, __file__, "--paced", "--only", name, "--nodes", str(nodes)]
    # The order of sets follows the seed, and with it the time that a search in them takes.
    runs = [
        subprocess.Popen(
            arguments,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in (tree, here)
    ]
    took: tuple[list[list[int]], list[list[int]]] = ([], [])
    ended = False
    turns = 0
    while not ended:
        for index in (0, 1) if turns % 2 else (1, 0):
            run = runs[index]
            assert run.stdin is not None
            assert run.stdout is not None
            if turns:
                print(file=run.stdin, flush=True)
            times, ended = json.loads(run.stdout.readline())
            took[index].append(times)
        turns += 1
    for run in runs:
        run.communicate()
    p50s = [statistics.median(ns for some in times for ns in some) / 1e6 for times in took]
    ratio = statistics.median(sum(ours) / sum(theirs) for theirs, ours in zip(*took, strict=True) if ours)
    return f"{name:14} {nodes:6} nodes  p50 there {p50s[0]:8.3f} ms, here {p50s[1]:8.3f} ms, ratio {ratio:.3f}"


def main() -> None:
    """Runs the benchmarks and prints a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--only", nargs="+", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--memory", action="store_true", help="measure memory too (slow)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worst", type=int, nargs="+", metavar="WORKERS", help="only the longest events of gangs")
    parser.add_argument("--beside", metavar="TREE", help="compare with another checkout, a few events in turn")
    parser.add_argument("--paced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for workers in options.worst or ():
        kinds = sorted(worst(workers).items(), key=lambda item: -item[1])
        print(f"gang of {workers:6}: " + ", ".join(f"{kind} {took_ms:.1f} ms" for kind, took_ms in kinds), flush=True)
    if options.worst:
        return
    figures: list[Figure] = []
    for name in options.only:
        for nodes in options.nodes:
            if name == "gang512" and nodes * DEVICES < 512:
                continue
            if options.beside:
                print(beside(options.beside, name, nodes), flush=True)
                continue
            figures.append(BENCHES[name](nodes))
            if not options.json:
                last = figures[-1]
                print(
                    f"{last.what:32} {last.nodes:6} nodes {last.per_second:10.0f}/s  "
                    f"p50 {last.p50_ms:8.3f} ms  p99 {last.p99_ms:8.3f} ms  ({last.count})",
                    flush=True,
                )
    sizes = {nodes: memory(nodes) for nodes in options.nodes[:2]} if options.memory else {}
    if options.json:
        print(json.dumps({"figures": [vars(figure) for figure in figures], "memory": sizes}))
    for nodes, size in sizes.items():
        print(f"memory at {nodes} nodes: {size['bytes_per_node']:.0f} B a node, {size['bytes_per_job']:.0f} B a job")


if __name__ == "__main__":
    main()
