"""A failing run, shrunk: the smallest set of faults and of users' acts that still breaks the same rule.

Every fault and every act of a user has a name (:meth:`Site.happens`), and what is drawn for one depends on no other, so
that a run can leave some out and go on much as before. Delta debugging then tries smaller and smaller sets, each by a
run of its own: whole kinds first, then halves, quarters and so on of what is left. What comes out is a run that was
seen to fail, though there may be a smaller one: time is bounded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from callboard.model.frozen import dataclass
from callboard.simulation.checks.report import SimulationFailure
from callboard.simulation.options import Fault, SimulationOptions, faults_text
from callboard.simulation.simulator import Simulator

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Shrunk:
    """What is left of a failing run.

    Attributes:
        options: of the smaller run.
        failure: what it breaks; the same rule.
        before: how many faults and acts the first run had.
    """

    options: SimulationOptions
    failure: SimulationFailure
    before: int
    runs: int

    @property
    def after(self) -> int:
        """How many faults and acts are left."""
        return len(self.options.only or ())

    @property
    def scenario(self) -> str:
        """The run as a test that can be pasted; it fails until the defect is mended."""
        options = self.options
        name = "".join(letter if letter.isalnum() else "_" for letter in self.failure.rule.lower())
        limits = [("hours", options.hours), ("events", options.events), ("jobs", options.jobs)]
        kept = "".join(f"            {each!r},\n" for each in options.only or ()).replace("'", '"')
        return "\n".join(
            [
                "from callboard.simulation import SimulationOptions, parse_faults, simulate",
                "",
                "",
                f"def test_{name}_holds_in_seed_{options.seed}() -> None:",
                "    options = SimulationOptions(",
                f"        seed={options.seed},",
                *[f"        {limit}={value!r}," for limit, value in limits if value is not None],
                f"        nodes={options.nodes},",
                f'        faults=parse_faults("{faults_text(options.faults)}"),',
                *([f"        schedule={options.schedule},"] if options.schedule else []),
                f"        only=(\n{kept}        )," if kept else "        only=(),",
                "    )",
                "    failure = simulate(options).failure",
                "    assert failure is None, failure.message",
                "",
            ]
        )


def shrink(
    options: SimulationOptions,
    *,
    within_s: float,
    make: Callable[[SimulationOptions], Simulator] = Simulator,
    clock: Callable[[], float] = time.monotonic,
) -> Shrunk | None:
    """Shrinks the run of these options; None if it does not fail.

    Args:
        within_s: no run begins after so many seconds.
        clock: seconds.
    """
    first = make(options)
    failure = first.run().failure
    if failure is None:
        return None
    shrinker = _Shrinker(options, failure, clock() + within_s, make, clock)
    shrinker.work(first)
    return Shrunk(shrinker.options, shrinker.failure, len(first.site.happened), shrinker.runs)


@dataclass
class _Shrinker:
    options: SimulationOptions
    failure: SimulationFailure
    until_s: float
    make: Callable[[SimulationOptions], Simulator]
    clock: Callable[[], float]
    runs: int = 1

    @property
    def _kept(self) -> tuple[str, ...]:
        return self.options.only or ()

    def work(self, first: Simulator) -> None:
        self.options = replace(self.options, only=tuple(first.site.happened))
        # It ends when it failed, however few events it takes to get there.
        self._try(self._ended(self.options, first, self.failure))
        kinds = Counter(name.rpartition(" ")[0] for name in self._kept)
        for kind, _ in kinds.most_common():
            self._keep([name for name in self._kept if name.rpartition(" ")[0] != kind])
        self._halve()
        for fault in Fault:
            if fault in self.options.faults:
                self._try(replace(self.options, faults=self.options.faults - {fault}))

    def _halve(self) -> None:
        """Delta debugging: leaves out one part of many, smaller parts when none can be missed."""
        parts = 2
        while len(self._kept) > 1 and self.clock() < self.until_s:
            size = -(-len(self._kept) // parts)
            for start in range(0, len(self._kept), size):
                if self._keep([*self._kept[:start], *self._kept[start + size :]]):
                    parts = max(parts - 1, 2)
                    break
            else:
                if size == 1:
                    break
                parts = min(parts * 2, len(self._kept))
        if len(self._kept) == 1:
            self._keep([])

    def _keep(self, names: Sequence[str]) -> bool:
        return len(names) < len(self._kept) and self._try(replace(self.options, only=tuple(names)))

    def _try(self, options: SimulationOptions) -> bool:
        """Whether these options break the same rule; if so they are the ones to go on with."""
        if self.clock() >= self.until_s:
            return False
        self.runs += 1
        simulator = self.make(options)
        failure = simulator.run().failure
        if failure is None or failure.rule != self.failure.rule:
            return False
        # What was kept and did not come about is not needed.
        kept = replace(options, only=tuple(simulator.site.happened))
        self.options, self.failure = self._ended(kept, simulator, failure), failure
        return True

    def _ended(self, options: SimulationOptions, simulator: Simulator, failure: SimulationFailure) -> SimulationOptions:
        until_ms = simulator.healed_at_ms or failure.at_ms
        return replace(options, events=None, jobs=None, hours=until_ms / _HOUR_MS)
