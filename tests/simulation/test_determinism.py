"""Equal options give equal runs, byte for byte: a seed replays anywhere."""

from __future__ import annotations

import os
import subprocess
import sys

from callboard.simulation import SimulationOptions, simulate

PROGRAM = """
from callboard.simulation import SimulationOptions, simulate
report = simulate(SimulationOptions(seed=4, events=300, nodes=4, schedule=3))
assert report.passed, report.failure
print(report.events, report.virtual_ms, report.journal_digest)
"""


def outcome(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.check_output([sys.executable, "-c", PROGRAM], text=True, env=environment)


def test_a_seed_gives_one_journal_whatever_the_hash_seed_is() -> None:
    first, second = outcome("0"), outcome("4242")
    assert first == second
    assert len(first.split()[-1]) == 64


def test_another_seed_gives_another_journal() -> None:
    digests = {simulate(SimulationOptions(seed=seed, events=50, nodes=2)).journal_digest for seed in (1, 2)}
    assert len(digests) == 2
