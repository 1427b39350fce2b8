"""What the token costs a call: the same call to two controllers, one that asks for the token and one with --insecure.

    python benchmarks/authentication.py [--n 2000]

Both run as processes of their own and are called in turn, so that a busy moment hits both. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Run by path, Python knows the folder of this file only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from callboard.client.client import Client
from tests.support.controller_process import ControllerProcess


async def measure(calls: int) -> dict[str, float]:
    """The median of each, in microseconds."""
    took: dict[str, list[float]] = {"with the token": [], "insecure": []}
    with tempfile.TemporaryDirectory() as base:
        async with (
            ControllerProcess(Path(base, "a")) as asking,
            ControllerProcess(Path(base, "b"), "--insecure") as open_to_all,
            Client(asking.address) as one,
            Client(open_to_all.address) as other,
        ):
            for number in range(calls + 100):
                for name, client in zip(took, (one, other), strict=True):
                    began = time.perf_counter()
                    await client.stats()
                    if number >= 100:
                        took[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2000, metavar="N", help="calls of each kind")
    for name, microseconds in asyncio.run(measure(parser.parse_args().n)).items():
        print(f"{name:>16}: {microseconds:7.0f} µs")


if __name__ == "__main__":
    main()
