"""One point of a hyper-parameter search; an array runs one for each seed or rate.

    callboard run --pool research --array 0-3 -- python examples/programs/sweep.py --rate-index {index}

Gradient descent on Rosenbrock's valley: of four rates one diverges, which its run reports by its exit code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys

RATES = (0.0002, 0.001, 0.002, 0.02)


def descend(rate: float, steps: int = 2_000) -> float:
    """The value reached from (-1, 1), which may be infinite."""
    x, y = -1.0, 1.0
    for _ in range(steps):
        slope_x = -2 * (1 - x) - 400 * x * (y - x * x)
        slope_y = 200 * (y - x * x)
        x, y = x - rate * slope_x, y - rate * slope_y
        if not math.isfinite(x) or abs(x) > 1e6:
            return math.inf
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2


def main() -> None:
    """Print the result of one rate as a line of JSON; exit code 1: it diverged."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rate-index", type=int, required=True)
    rate = RATES[arguments.parse_args().rate_index]
    found = descend(rate)
    if math.isinf(found):
        sys.exit(f"rate {rate} diverges")
    print(json.dumps({"rate": rate, "value": round(found, 6)}), flush=True)


if __name__ == "__main__":
    main()
