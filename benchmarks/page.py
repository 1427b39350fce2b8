"""How soon is what happens seen on the web page, and does it stay smooth?

    python benchmarks/page.py [--nodes 1000] [--jobs 10000] [--seconds 15]

A controller in this process with nodes and jobs but without agents, its page in a real headless Chromium beside it on
the same machine. Printed: how large the board is and how long a browser takes to show it; for each view the time from a
message received to the frame painted with it, while things happen at a steady rate; the time between two frames while a
list of all jobs is scrolled from end to end, while nothing happens and while things do; and how long the loop of the
controller was held up at most.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from callboard.controller.logs import configure_logs
from callboard.controller.options import ControllerOptions
from callboard.controller.server import Controller
from tests.support.browser import Browser, BrowserPage
from tests.support.crowd import Crowd

PAUSE_S = 0.02
"""Between two things that happen: 50 in a second."""

SCROLLED_S = 4.0

SCROLL = """new Promise((resolve) => {
    const list = document.querySelector('.list'), gaps = [], end = performance.now() + SCROLLED_MS;
    let last = performance.now();
    const step = () => {
        const now = performance.now();
        gaps.push(now - last);
        last = now;
        list.scrollTop = (list.scrollTop + STEP) % (list.scrollHeight - list.clientHeight);
        if (now < end) requestAnimationFrame(step); else resolve(gaps.slice(1));
    };
    requestAnimationFrame(step);
})""".replace("SCROLLED_MS", str(SCROLLED_S * 1000))

PAINTED = "performance.getEntriesByName('event-to-paint').map((entry) => entry.duration)"


class Held:
    """Takes turns on the loop, and notes the longest wait for one."""

    longest_s = 0.0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.perf_counter() - before)
            await asyncio.sleep(0.001)


def of(values: list[float]) -> str:
    """Median, 95th of a hundred, and most of some milliseconds."""
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * part))] for part in (0.5, 0.95)]
    return f"p50 {at[0]:6.1f}  p95 {at[1]:6.1f}  most {ordered[-1]:6.1f} ms  (n = {len(ordered)})"


async def happen(crowd: Crowd, seconds: float) -> int:
    """Jobs come at a steady rate: every second one starts on a free GPU, the others wait. None ends: with so many
    that wait, the scheduler would take its time to look at all of them again, and that is not what is measured here."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if count % 2:
            await crowd.job(pool="batch")
        else:
            await crowd.job(pool="rlhf", workers=1, ask={"gpu": 1})
        count += 1
        await asyncio.sleep(PAUSE_S)
    return count


async def logged_in(browser: Browser, controller: Controller) -> tuple[BrowserPage, float]:
    """The page, and the seconds from the token to the first figures."""
    page = await browser.open(controller.page_address)
    await page.click("#token")
    await page.type(controller.access.token)
    began = time.perf_counter()
    await page.press("Enter")
    await page.until(
        "document.querySelector('.tile strong')?.textContent && document.querySelector('canvas')?.height > 50"
    )
    return page, time.perf_counter() - began


def whole_board(controller: Controller) -> tuple[float, int]:
    """Seconds and packed bytes of the board as a program asks for it."""
    there = http.client.HTTPConnection(controller.page_address.removeprefix("http://"), timeout=120)
    own = {"X-Callboard-Page": "1", "Accept-Encoding": "gzip"}
    there.request("POST", "/api/login", json.dumps({"token": controller.access.token}), own)
    answer = there.getresponse()
    answer.read()
    own["Cookie"] = (answer.headers["set-cookie"] or "").split(";")[0]
    began = time.perf_counter()
    there.request("GET", "/api/board", headers=own)
    size = len(there.getresponse().read())
    there.close()
    return time.perf_counter() - began, size


async def measure(nodes: int, jobs: int, seconds: float) -> None:
    """Measures, and prints."""
    configure_logs("console", "error")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"listen": "127.0.0.1:0", "page": "127.0.0.1:0", "state_dir": Path(folder) / "state"}
        controller = Controller(ControllerOptions(**options))
        await controller.start()
        crowd = Crowd(controller)
        await crowd.pools(nodes * 8)
        await crowd.nodes(nodes)
        await crowd.fill(jobs, gpus=nodes * 8)
        print(f"{len(crowd.state.nodes)} nodes of 8 GPUs, {len(crowd.state.jobs)} jobs; load {os.getloadavg()[0]:.1f}")
        held = Held()
        turns = asyncio.create_task(held.run())
        for what in ("first", "next"):
            took_s, size = await asyncio.to_thread(whole_board, controller)
            print(f"board, {what} reader: {took_s * 1000:.0f} ms, {size / 1024:.0f} KiB packed")
        print(f"loop held up while it was made: {held.longest_s * 1000:.1f} ms at most")
        async with Browser() as browser:
            page, shown_s = await logged_in(browser, controller)
            print(f"from the token to the picture: {shown_s * 1000:.0f} ms")
            for view in ("", "jobs", "nodes", "timeline"):
                await page.run(f"location.hash = '#/{view}'; performance.clearMeasures('event-to-paint')")
                held.longest_s = 0.0
                count = await happen(crowd, seconds)
                painted = await page.run(PAINTED)
                print(f"{view or 'overview':9} {of(painted)}; {count} events; loop held {held.longest_s * 1000:.1f} ms")
            await page.run("location.hash = '#/jobs'")
            await page.until("document.querySelector('.rows .row')")
            for step in (120, 900):
                for going_on in (0.0, SCROLLED_S):
                    await page.run("performance.clearMeasures('event-to-paint')")
                    scrolling = page.run(SCROLL.replace("STEP", str(step)))
                    gaps, _ = await asyncio.gather(scrolling, happen(crowd, going_on))
                    painted = await page.run(PAINTED)
                    print(f"frames, all jobs scrolled by {step} px each: {of(gaps)}; load {os.getloadavg()[0]:.1f}")
                    if going_on:
                        print(f"scrolled while things happen: {of(painted)} from a message to its paint")
        turns.cancel()
        await controller.stop()


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    read = parser.parse_args()
    asyncio.run(measure(read.nodes, read.jobs, read.seconds))


if __name__ == "__main__":
    main()
