"""How long do `import callboard` and `callboard --help` take? Prints the median and the slowest of many runs.

The targets are 100 ms and 300 ms (issue 2). Measured, not asserted: a busy machine is no defect.

    python benchmarks/cli_start.py [RUNS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import callboard": ["-c", "import callboard"],
    "callboard --help": ["-m", "callboard.cli", "--help"],
    "callboard job submit --help": ["-m", "callboard.cli", "job", "submit", "--help"],
    "callboard status (no controller)": ["-m", "callboard.cli", "status", "--controller", "127.0.0.1:1"],
}


def main() -> None:
    """Measures each program."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"{'':34} {'median':>8} {'slowest':>8}")
    for name, arguments in PROGRAMS.items():
        times_ms = []
        for _ in range(runs):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
            times_ms.append((time.perf_counter() - began) * 1000)
        print(f"{name:34} {statistics.median(times_ms):5.0f} ms {max(times_ms):5.0f} ms")


if __name__ == "__main__":
    main()
