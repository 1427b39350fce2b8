"""Mutants: deliberate faults in the code that ships, each of which the simulator must find.

    scripts/mutants                   all of them, with what found each after how many events
    scripts/mutants forget-owed       this one
    scripts/mutants --list            their names

A mutant replaces a text of one module as that module is imported, in a program of its own. The text must be there
exactly once, whatever the module is called: who changes such a line changes its mutant, or takes it off for a reason.
The simulator runs seed after seed until a promise is broken, and for 20,000 events at most; a mutant that is not found
by then shows a hole in the checks or in the faults that are injected.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]

MOST_EVENTS = 20_000
EVENTS, NODES = 2_000, 5
"""Of one seed; events are those that the scheduler decides."""

PROMISES = {
    "R1": ("R1", "R1/I8", "books"),
    "R2": ("R2", "R2/I1", "R2/I4", "I1", "I4", "I10"),
    "R3": ("R3", "QL-03"),
    "R4": ("R4",),
    "R5": ("R5", "R5/hooks", "I3", "I5", "I7"),
    "R6": ("R6", "R6/I9", "I9"),
    "R7": ("R7", "I6", "end"),
    "R8": ("R8",),
}
"""The rules that each promise consists of."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One deliberate fault.

    Attributes:
        what: the fault, in words.
        area: the package that has the module, below ``callboard``.
        old: what one of its modules says, and says once.
        new: what it says instead.
    """

    name: str
    what: str
    area: str
    old: str
    new: str
    rare: bool = False
    """What shows it is so rare that the suite has no time for it."""

    def find(self) -> tuple[str, CodeType]:
        """The dotted name of the module, wherever it lies by now, and its code with the fault.

        Raises:
            AssertionError: the text isn't there, or more than once.
        """
        sources = {path: path.read_text() for path in sorted((ROOT / "callboard" / self.area).rglob("*.py"))}
        places = [path for path, source in sources.items() for _ in range(source.count(self.old))]
        assert len(places) == 1, (
            f"mutant {self.name}: in {self.area} it says {len(places)} times, not once:\n{self.old}"
        )
        path = places[0]
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        return name, compile(sources[path].replace(self.old, self.new), path, "exec", dont_inherit=True)


@dataclass(frozen=True, slots=True)
class Found:
    """What found a mutant: after how many events of which seed, and how; an empty rule: nothing did."""

    name: str
    events: int
    seed: int
    rule: str
    message: str

    @property
    def promise(self) -> str:
        """The promise that was broken; else the kind of the error."""
        if not self.rule:
            return ""
        # What a check of the scheduler's own raises names its invariant first.
        rule = self.message.partition(":")[0] if self.rule == "InvariantBroken" else self.rule
        return next((promise for promise, rules in PROMISES.items() if rule in rules), rule)


MUTANTS: tuple[Mutant, ...] = (
    # ---- sessions and liveness ----
    Mutant(
        "believe-past-hello",
        "a Hello that a later one overtook is believed",
        "controller",
        "            check_order(hello, self._driver.state)\n",
        "",
        rare=True,
    ),
    Mutant(
        "skip-epoch-check",
        "what an earlier session of a node says counts",
        "scheduler",
        "    return node if node is not None and node.epoch == epoch else None\n",
        "    return node\n",
        rare=True,
    ),
    Mutant(
        "forget-owed",
        "commands that were not answered are not sent again to an agent that joins",
        "scheduler",
        "            yield stop_worker(worker, now_ms)\n",
        "            continue\n",
    ),
    Mutant(
        "drop-goodbye",
        "a goodbye is not told to the scheduler",
        "controller",
        "                await self._goodbye(session, request.goodbye.reason)\n",
        "",
        rare=True,
    ),
    Mutant(
        "never-lost",
        "a silent node is never given up",
        "controller",
        "            self._verdicts.lost(node_id, node.epoch, round((now - node.heard_s) * 1000))\n",
        "",
    ),
    Mutant(
        "unwatched",
        "a node that joined is not expected to be heard of",
        "controller",
        "        self.liveness.watch(session.node_id, session.epoch)\n",
        "",
    ),
    Mutant(
        "judge-after-a-pause",
        "silence counts for which the controller itself was stopped",
        "controller",
        "        if now - self._due_s > HELD_UP_S:\n            self._take_off",
        "        if False:\n            self._take_off",
        rare=True,
    ),
    Mutant(
        "lost-too-early",
        "a node is given up while its lease still runs",
        "controller",
        "return self._lease_ms + self._kill_timeout_ms() + self.margin_ms",
        "return self._lease_ms // 2",
    ),
    Mutant(
        "ack-before-journal",
        "a report is acknowledged before it is on disk",
        "controller",
        "            if place == len(makes):\n                answer.add_done_callback(",
        "            session.acknowledge(report.report_id)\n"
        "            if place == len(makes):\n                answer.add_done_callback(",
    ),
    Mutant(
        "publish-before-commit",
        "commands are sent and calls answered before the batch is on disk",
        "controller",
        "        await self._commit(decided)\n        self._publish(decided)\n",
        "        self._publish(decided)\n        await self._commit(decided)\n",
    ),
    Mutant(
        "replay-without-log",
        "what was journaled last is not replayed",
        "controller",
        "        state, events = await self._commits.open(self._newest_events)\n",
        "        state, events = await self._commits.open(self._newest_events)\n"
        "        for name in list(state.checkpoints)[-1:]: del state.checkpoints[name]\n",
    ),
    Mutant(
        "unsynced-log",
        "a batch counts as written before it is synced",
        "controller",
        '"journal_mode=WAL", "synchronous=FULL"',
        '"journal_mode=WAL", "synchronous=NORMAL"',
        rare=True,
    ),
    Mutant(
        "half-a-batch",
        "a batch is no transaction",
        "controller",
        '            with self._database.transaction():\n                self._database.insert("log"',
        '            if True:\n                self._database.insert("log"',
        rare=True,
    ),
    Mutant(
        "stay-closed",
        "after a full disk the controller waits five minutes before it tries again",
        "controller",
        "        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)\n",
        "        backoff = Backoff(300.0, 300.0)\n",
    ),
    Mutant(
        "wait-for-agents",
        "the loop waits for a while when an agent's report comes",
        "controller",
        "        self._publish(decided)\n        await self._commits.compact",
        "        self._publish(decided)\n"
        "        if any(ask and ask.cause.startswith('join') for ask, *_ in decided): await asyncio.sleep(20)\n"
        "        await self._commits.compact",
    ),
    # ---- the life of a worker on its agent ----
    Mutant(
        "forget-adopted",
        "a worker that an earlier agent began is not gone on with",
        "agents",
        "        self._begin(Worker(order, self._site, self._ended, record=record))\n",
        "",
    ),
    Mutant(
        "exited-before-proof",
        "the death of a worker is reported before what it left is proved gone",
        "agents",
        "        left = await self._end_tree(UNASKED_KILL_S, alone=True)\n",
        '        left = ""\n',
    ),
    Mutant(
        "stopped-without-kill",
        "a stop is answered when the hooks have returned",
        "agents",
        "        self._prove(await self._end_tree(self._stopping.kill_s))\n",
        '        self._prove("")\n',
    ),
    Mutant(
        "gone-unproved",
        "a worker that could not be killed is forgotten",
        "agents",
        "        Event.LEFT: Move(State.QUARANTINED, (report, Effect.TRY_AGAIN)),\n",
        "        Event.LEFT: Move(State.GONE, (report, Effect.BURY)),\n",
    ),
    Mutant(
        "order-to-the-dead",
        "a worker that is gone still gets what is asked of it",
        "agents",
        "        self._workers.pop((key_of(command.worker), command.generation), None)\n",
        "",
    ),
    Mutant(
        "deaf-while-starting",
        "a stop is not heard while a worker starts",
        "agents",
        "        **dict.fromkeys((Event.STOP, Event.EXIT, Event.DEADLINE), cut),\n",
        "        **dict.fromkeys((Event.EXIT, Event.DEADLINE), cut),\n        Event.STOP: Move(state),\n",
    ),
    Mutant(
        "unseen-exit",
        "a process that ends is not noticed",
        "agents",
        "                self._watch(self._notice_exit(fact.process))\n",
        "",
    ),
    Mutant(
        "kill-unasked",
        "a worker is killed without being asked to yield",
        "agents",
        "        Event.STOP: Move(State.ASKING, (Effect.ASK_TO_YIELD,)),\n        Event.EXIT: Move(State.REAPING",
        "        Event.STOP: Move(State.KILLING, (Effect.KILL,)),\n        Event.EXIT: Move(State.REAPING",
    ),
    Mutant(
        "half-the-time",
        "hooks get half of the time that they were promised",
        "agents",
        "            hooks_until=now + command.cancel_timeout_ms / 1000,\n",
        "            hooks_until=now + command.cancel_timeout_ms / 2000,\n",
    ),
    Mutant(
        "impatient-ladder",
        "hooks are waited for no longer than a moment",
        "agents",
        "            left_s = order.hooks_until - loop.time()\n            if left_s <= 0:\n",
        "            left_s = order.asked_at + 0.2 - loop.time()\n            if left_s <= 0:\n",
    ),
    Mutant(
        "never-saved",
        "a worker whose checkpoint is wanted is killed when cancel() has returned",
        "agents",
        "        on_cancelled()\n        step = ",
        "        on_cancelled()\n        return Yielded()\n        step = ",
    ),
    # ---- the agent's side ----
    Mutant(
        "renew-on-receipt",
        "the lease counts from when an answer arrives, not from when its question was sent",
        "agents",
        "            self._lease.renew(sent_s)\n",
        "            self._lease.renew(self._lease.now_s())\n",
    ),
    Mutant(
        "forget-unacknowledged",
        "reports that were not acknowledged are not sent again in the next session",
        "agents",
        "        self._unsent = dict.fromkeys(self._waiting)\n",
        "        self._unsent = {}\n",
    ),
    Mutant(
        "free-at-sigkill",
        "a worker counts as gone when it was sent its SIGKILL, before its end is proved",
        "agents",
        'return "" if end.gone else "not gone: "',
        'return "" if end.gone or end.killed else "not gone: "',
    ),
    Mutant(
        "free-when-overdue",
        "a stop that was not answered in time counts as proved",
        "scheduler",
        '        _gone_or_quarantined(tx, worker, "not proved gone in time", StopOutcome.QUARANTINED)\n',
        '        leave(tx, worker, "not proved gone in time", StopOutcome.KILLED)\n',
    ),
    Mutant(
        "free-when-stuck",
        "what could not be killed counts as gone",
        "scheduler",
        "    if outcome is StopOutcome.QUARANTINED:\n        tx.move_worker(",
        "    if False:\n        tx.move_worker(",
    ),
    Mutant(
        "free-while-still-stuck",
        "a quarantined worker counts as gone as soon as its agent says anything of it",
        "scheduler",
        "    if not _is_proof(event):\n        return\n",
        "",
    ),
    Mutant(
        "reap-unproved",
        "an unwanted worker counts as gone though its agent says that it could not be killed",
        "scheduler",
        "    return isinstance(event, WorkerExited | WorkerStartFailed) and not event.quarantined\n",
        "    return isinstance(event, WorkerExited | WorkerStartFailed)\n",
    ),
    Mutant(
        "keep-none-that-stop",
        "an agent that comes back isn't told to keep the workers that are stopping",
        "scheduler",
        "        if worker.generation in reported:\n",
        "        if worker.generation in reported and worker.state is not WorkerState.STOPPING:\n",
    ),
    Mutant(
        "no-ghosts",
        "what a joining agent runs and nobody wants is not noticed",
        "scheduler",
        "    ghosts = [running for running in event.running if running.generation not in expected]\n",
        "    ghosts: list[Any] = []\n",
        rare=True,
    ),
    Mutant(
        "place-beside-ghosts",
        "a node takes work before its unwanted workers are gone",
        "scheduler",
        "        return self.state is NODE_READY and not self.cordoned and not self.ghosts\n",
        "        return self.state is NODE_READY and not self.cordoned\n",
        rare=True,
    ),
    Mutant(
        "reuse-generation",
        "the generation of a replacement was given before",
        "scheduler",
        '    generation = tx.draw("next_generation")\n',
        '    generation = tx.draw("next_generation") - 1\n',
    ),
    Mutant(
        "reuse-generations-after-restart",
        "generations are counted anew when the journal is replayed",
        "scheduler",
        "    term = tx.state.meta.term + 1\n",
        "    term = tx.state.meta.term + 1\n    tx.count(next_generation=max(1, tx.state.meta.next_generation - 3))\n",
    ),
    Mutant(
        "admit-before-reconciliation",
        "jobs start while running work is still counted after a restart",
        "scheduler",
        "    if meta.reconcile_until_ms:\n        if meta.look_on",
        "    if False:\n        if meta.look_on",
    ),
    Mutant(
        "grow-before-reconciliation",
        "jobs grow while running work is still counted after a restart",
        "scheduler",
        "    if tx.state.meta.reconcile_until_ms or starting.a_copy_may_live(tx, uid):\n",
        "    if starting.a_copy_may_live(tx, uid):\n",
        rare=True,
    ),
    Mutant(
        "count-a-joining-node-twice",
        "a node that comes back is booked anew, without what is held there",
        "scheduler",
        "        if book is None:\n            self.nodes[new.node_id] = NodeBook(new)\n",
        "        if book is None or (old is not None and old.epoch != new.epoch):\n"
        "            self.nodes[new.node_id] = NodeBook(new)\n",
    ),
    Mutant(
        "second-copy",
        "a strict job starts beside a worker that nobody proved gone",
        "scheduler",
        "        worker.state is WORKER_QUARANTINED for worker in tx.state.workers_of(uid)\n",
        "        False for worker in tx.state.workers_of(uid)\n",
    ),
    Mutant(
        "same-request-twice",
        "a submission that is repeated makes another job",
        "scheduler",
        "    if event.request_id and event.request_id in tx.state.requests:\n",
        "    if False:\n",
    ),
    Mutant(
        "preempt-upwards",
        "a job yields to one of lower priority",
        "scheduler",
        "    gap = preemptor.priority_milli - spec.priority_milli\n",
        "    gap = abs(preemptor.priority_milli - spec.priority_milli)\n",
    ),
    Mutant(
        "preempt-the-protected",
        "a job yields that may not be preempted",
        "scheduler",
        "    if not spec.preemptible:\n        return _no(",
        "    if False:\n        return _no(",
    ),
    Mutant(
        "no-deadline",
        "a stop has no deadline",
        "scheduler",
        "        deadline_ms=tx.now_ms + cancel_ms + kill_ms + groups.ANSWER_MARGIN_MS,\n",
        "        deadline_ms=0,\n",
    ),
    Mutant(
        "forget-removal",
        "a placement group that is not needed any more is left in Ray",
        "scheduler",
        "    yield from going\n",
        "",
    ),
    Mutant(
        "endless-history",
        "jobs that ended are never forgotten",
        "scheduler",
        "        if excess > 0:\n",
        "        if False:\n",
    ),
    Mutant(
        "give-up-nothing",
        "the workers of a node that was given up are left as they were",
        "scheduler",
        "    _give_up(tx, node, event.reason)\n",
        "",
    ),
    Mutant(
        "unproved-rejoin",
        "a worker that a joining agent does not know is taken for running",
        "scheduler",
        "        elif worker.state is WorkerState.READY:\n            workers.handle(",
        "        elif False:\n            workers.handle(",
    ),
)


# ---- a program with a fault ----


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        """Never what was compiled before."""
        return self._code


class _Finder(MetaPathFinder):
    def __init__(self, name: str, code: CodeType) -> None:
        self._name = name
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module with the fault; every other is found as ever."""
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._code)
        return spec


def install(name: str) -> str:
    """Lets the fault be imported, before anything of its module was; the module's name."""
    module, code = named(name).find()
    assert module not in sys.modules
    sys.meta_path.insert(0, _Finder(module, code))
    return module


def _run_here(name: str, first_seed: int, most: int) -> Found:
    """In a program of its own."""
    module = install(name)
    from callboard.simulation import SimulationOptions, simulate

    events = 0
    for seed in range(first_seed, first_seed + most):
        report = simulate(SimulationOptions(seed=seed, events=min(EVENTS, most - events), nodes=NODES))
        assert module in sys.modules, f"{module} is no part of what is simulated"
        events += report.events
        if report.failure is not None:
            return Found(name, events, seed, report.failure.rule, report.failure.message)
        if events >= most:
            break
    return Found(name, events, 0, "", "")


# ---- from outside ----


def named(name: str) -> Mutant:
    """The mutant of this name."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def hunt(name: str, first_seed: int = 1, most: int = MOST_EVENTS) -> Found:
    """Runs a mutant in a program of its own."""
    words = [sys.executable, "-m", "tests.simulation.mutants", "--here", name]
    words += ["--seed", str(first_seed), "--events", str(most)]
    done = subprocess.run(words, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs mutants; 1 when one was not found."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Find deliberate faults by simulation.")
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="all when none is named")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="the first seed")
    parser.add_argument("--events", type=int, default=MOST_EVENTS, metavar="N", help="the most for one mutant")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        found = _run_here(options.here, options.seed, options.events)
        _say(json.dumps({field: getattr(found, field) for field in Found.__dataclass_fields__}))
        return 0
    if options.list:
        for mutant in MUTANTS:
            _say(f"{mutant.name:32} {mutant.what} ({mutant.find()[0]})")
        return 0
    known = [mutant.name for mutant in MUTANTS]
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no mutant is named {', '.join(unknown)}; --list says which there are")
    missed = 0
    for name in options.names or known:
        found = hunt(name, options.seed, options.events)
        missed += not found.rule
        how = f"{found.promise:8} {found.message[:100]}" if found.rule else "NOT FOUND"
        _say(f"{found.name:32} {found.events:6} events, seed {found.seed:<6} {how}")
    _say(f"{missed} of {len(options.names or known)} were not found" if missed else "all were found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
