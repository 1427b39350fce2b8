"""How long do `import callboard`, `callboard --help` and `callboard plan` take? Prints what many runs of each took.

The targets are 100 ms, 300 ms (issue 2) and 200 ms (issue 8). Measured, not asserted: a busy machine is no defect. CPU
is what the fastest run used of it, which other work disturbs less than its time. Every module is compiled beforehand,
as it is after the first run, and after `scripts/setup`; where Python may write no bytecode and none is there, a start
takes twice as long.

    python benchmarks/cli_start.py [RUNS]
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import callboard": ["-c", "import callboard"],
    "callboard --help": ["-m", "callboard.cli", "--help"],
    "callboard job submit --help": ["-m", "callboard.cli", "job", "submit", "--help"],
    "callboard plan (small) -o json": ["-m", "callboard.cli", "plan", "examples/plans/small.yaml", "-o", "json"],
    "callboard plan (large) -o json": ["-m", "callboard.cli", "plan", "examples/plans/large.yaml", "-o", "json"],
    "callboard plan (small)": ["-m", "callboard.cli", "plan", "examples/plans/small.yaml"],
    "callboard status (no controller)": ["-m", "callboard.cli", "status", "--controller", "127.0.0.1:1"],
}


def main() -> None:
    """Measures each program."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as compiled:
        environment |= {"PYTHONPYCACHEPREFIX": compiled}
        print(f"{'load':34} {os.getloadavg()[0]:8.1f}")
        print(f"{'':34} {'fastest':>8} {'median':>8} {'slowest':>8} {'CPU':>8}")
        for name, arguments in PROGRAMS.items():
            command = [sys.executable, *arguments]
            _measured(command, environment)  # Compiles.
            measured = sorted(_measured(command, environment) for _ in range(runs))
            times_ms = [time_ms for time_ms, _ in measured]
            figures = (times_ms[0], statistics.median(times_ms), times_ms[-1], measured[0][1])
            print(f"{name:34} " + " ".join(f"{figure:5.0f} ms" for figure in figures))


def _measured(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Time and CPU of one run, in milliseconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False, cwd=ROOT, env=environment)
    time_ms = (time.perf_counter() - began) * 1000
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time_ms, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


if __name__ == "__main__":
    main()
