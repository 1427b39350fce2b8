"""Does the web page do in a real browser what it is there for? One Chromium for all; without one these fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from callboard.controller.server import Controller
from callboard.scheduler.records import events as ev
from callboard.security.caller_roles import Role
from callboard.security.grants import grant
from callboard.v1 import agent_pb2, common_pb2
from tests.controller.support import Api, api_at, job, options_for, pool, running
from tests.recovery.programs import DOWN, Proxy
from tests.support.browser import Browser, BrowserPage
from tests.support.crowd import Crowd
from tests.support.fake_agent import FakeAgent

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

OUTSIDE = """[...document.querySelectorAll('.head > *, .rows .row:not([hidden]) > *, .minis > *')].filter((each) =>
    each.getBoundingClientRect().right > each.closest('.row, .head').getBoundingClientRect().right + 0.5).length"""
"""How many cells of a list, or pictures in them, leave their row."""

PHONE: dict[str, Any] = {"width": 390, "height": 844, "phone": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with Browser() as started:
        yield started


@asynccontextmanager
async def reading(
    browser: Browser, controller: Controller, where: str = "", *, token: str = "", **window: Any
) -> AsyncIterator[BrowserPage]:
    """A window that is logged in by the form, as a person would."""
    page = await browser.open(f"{controller.page_address}/#/{where}", **window)
    await page.click("#token")
    await page.type(token or controller.access.token)
    await page.press("Enter")
    await page.until("document.querySelector('header .live[data-state=live]')")
    try:
        yield page
    finally:
        await page.close()


def served(directory: Path, **options: Any) -> Any:
    return running(options_for(directory, **({"page": "127.0.0.1:0"} | options)))


async def test_what_happens_is_seen_at_once_and_nothing_comes_from_elsewhere(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path) as controller,
        api_at(controller.address) as api,
        reading(browser, controller) as page,
    ):
        await page.until("document.body.innerText.includes('No node has joined yet.')")
        async with FakeAgent(controller.address, "n1", gpus=2):
            await api.pools.CreatePool(pool())
            await api.submit(job("a", gpu=1000))
            await page.until("document.querySelector('.tile strong').textContent === '1'")
            await page.until("document.querySelector('canvas').getAttribute('aria-label').includes('1 in use, 1 free')")
            await page.until("document.querySelector('.feed').innerText.includes('job.running')")
            await page.until("performance.getEntriesByName('event-to-paint').length > 0")
            await page.run("location.hash = '#/jobs'")
            await page.until("document.querySelector('.rows .row a')?.textContent === 'a'")
        assert {url.split("/")[2] for url in page.requests if url != "about:blank"} == {
            controller.page_address.split("/")[2]
        }
        assert [each for each in page.problems if "401" not in each] == []


@asynccontextmanager
async def with_a_job(tmp_path: Path) -> AsyncIterator[tuple[Controller, Api]]:
    """A controller where job a runs."""
    async with (
        served(tmp_path) as controller,
        api_at(controller.address) as api,
        FakeAgent(controller.address, "n1", gpus=2),
    ):
        await api.pools.CreatePool(pool())
        await api.submit(job("a", gpu=1000))
        await api.until_job("a", "RUNNING")
        yield controller, api


async def answer(page: BrowserPage, reason: str) -> None:
    """Says why, in the question that is open, and agrees; by keyboard."""
    await page.until("document.querySelector('dialog[open] input') === document.activeElement")
    await page.type(reason)
    await page.press("Tab")
    await page.press("Tab")
    await page.press("Enter")


async def test_a_job_is_cancelled_after_a_question_and_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    async with with_a_job(tmp_path) as (controller, api), reading(browser, controller, "jobs/a") as page:
        await page.until("document.querySelector('.page-head button.danger')")
        await page.run("document.querySelector('.page-head button.danger').focus()")
        await page.press("Enter")
        await answer(page, "wrong recipe")
        event = await api.until_job("a", "CANCELLED")
        await page.until("document.querySelector('.page-head .badge').textContent === 'Cancelled'")
        await page.until("document.querySelector('.story').innerText.includes('wrong recipe')")
        assert "wrong recipe" in event.reason


async def test_a_job_is_preempted_from_its_page(browser: Browser, tmp_path: Path) -> None:
    async with with_a_job(tmp_path) as (controller, api), reading(browser, controller, "jobs/a") as page:
        await page.until("document.querySelector('.page-head button.preempt:not([hidden])')")
        await page.click(".page-head button.preempt")
        await answer(page, "maintenance")
        assert "maintenance" in (await api.until_job("a", "PREEMPTING")).reason
        await page.until("document.querySelector('.story').innerText.includes('maintenance')")


async def test_who_may_not_act_has_no_buttons(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path) as controller, FakeAgent(controller.address, "n1", gpus=2):
        viewer = grant(controller.options.state_dir, "vera", Role.VIEWER)
        async with reading(browser, controller, "nodes/n1", token=viewer) as page:
            await page.until("document.querySelector('.page-head .badge')")
            assert await page.run("document.querySelectorAll('.page-head button').length") == 0
            assert "vera" in await page.text("header#top")
        async with reading(browser, controller, "nodes/n1") as page:
            await page.until("document.querySelectorAll('.page-head button:not([hidden])').length === 2")


async def test_it_says_why_a_job_waits(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path) as controller,
        api_at(controller.address) as api,
        FakeAgent(controller.address, "n1", gpus=2),
    ):
        await api.pools.CreatePool(pool(gpu=2000))
        await api.submit(job("first", gpu=2000))
        await api.until_job("first", "RUNNING")
        await api.submit(job("second", gpu=1000))
        async with reading(browser, controller, "jobs/second") as page:
            await page.until(
                "document.querySelector('.why-panel:not([hidden])')?.innerText.includes('number 1 in the queue')"
            )
            assert "Why it waits" in await page.text(".why-panel")
            await page.run("location.hash = '#/jobs?state=PENDING'")
            await page.until("document.querySelector('.rows')?.innerText.includes('pool rlhf')")


async def test_what_a_job_prints_is_read_live(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path) as controller,
        api_at(controller.address) as api,
        FakeAgent(controller.address, "n1", gpus=2) as agent,
    ):
        await api.pools.CreatePool(pool())
        await api.submit(job("a", gpu=1000))
        await api.until_job("a", "RUNNING")
        async with reading(browser, controller, "jobs/a") as page:
            await agent.until(lambda: bool(agent.reads))
            async with agent.sending(agent.reads[0].read_id) as stream:
                # The second piece begins amid a character.
                whole = "step 1 ✓\nstep 2\n<b>no markup</b>\n".encode()
                for offset, data in ((0, whole[:8]), (8, whole[8:])):
                    piece = common_pb2.OutputChunk(component="w", attempt=1, generation=1, offset=offset, data=data)
                    piece.stream = common_pb2.OUTPUT_STREAM_STDOUT
                    await stream.write(agent_pb2.SendOutputRequest(chunk=piece))
                await page.until("document.querySelectorAll('.output .lines > div').length === 3")
                lines = await page.run("[...document.querySelectorAll('.output span')].map((e) => e.textContent)")
        assert lines == ["step 1 ✓", "step 2", "<b>no markup</b>"]


async def test_a_lost_controller_is_said_with_the_time_and_the_page_goes_on_when_it_is_back(
    browser: Browser, tmp_path: Path
) -> None:
    async with served(tmp_path) as controller:
        address = controller.page_address
        at = address.removeprefix("http://")
        page = await browser.open(address)
        await page.click("#token")
        await page.type(controller.access.token)
        await page.press("Enter")
        await page.until("document.querySelector('header .live[data-state=live]')")
    await page.until("/Last update \\d+ s ago/.test(document.getElementById('banner').innerText)")
    assert await page.run("document.body.classList.contains('old')")
    async with served(tmp_path, page=at) as controller, api_at(controller.address) as api:
        await page.until(
            "document.querySelector('header .live[data-state=live]') && !document.getElementById('banner').firstChild"
        )
        await api.pools.CreatePool(pool("fresh"))
        await page.until("document.body.innerText.includes('fresh')")
    await page.close()


async def test_a_stream_that_stalls_is_said_and_goes_on_for_good_when_it_flows_again(
    browser: Browser, tmp_path: Path
) -> None:
    """The connection stays and nothing comes through it, as when a laptop slept or a network swallows packets."""
    async with served(tmp_path) as controller, api_at(controller.address) as api:
        host, _, port = controller.page_address.removeprefix("http://").partition(":")
        async with Proxy(host, int(port)) as proxy:
            page = await browser.open(f"http://{proxy.address}")
            await page.click("#token")
            await page.type(controller.access.token)
            await page.press("Enter")
            await page.until("document.querySelector('header .live[data-state=live]')")
            proxy.hold(DOWN)
            # Its clock goes on by more than the longest silence of a controller; what it heard so far is old then.
            await page.run("{ const clock = Date.now; Date.now = () => clock() + 13_000; }")
            said = "document.getElementById('banner').innerText"
            await page.until(f"/Last update 1\\d s ago.*the controller is silent/.test({said})")
            proxy.heal()
            await page.until(f"document.querySelector('header .live[data-state=live]') && !{said}")
            # Two looks of the page at its clock, without a word of the controller, which has nothing to say for 5 s.
            lost = await page.run(
                f"""new Promise((resolve) => {{
                    const lost = [], watch = new MutationObserver(() => {said} && lost.push({said}));
                    watch.observe(document.getElementById('banner'), {{ subtree: true, childList: true }});
                    setTimeout(() => resolve(lost), 2_500);
                }})"""
            )
            assert lost == []
            await api.pools.CreatePool(pool("fresh"))
            await page.until("document.body.innerText.includes('fresh')")
            await page.close()


async def test_thousands_of_rows_are_few_elements_and_fit_a_phone(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path) as controller:
        crowd = Crowd(controller)
        await crowd.nodes(60)
        await crowd.pools(480)
        await crowd.fill(700, gpus=60)
        await crowd.send(ev.NodeCordoned, node_id="node-7", cordoned=True)
        async with reading(browser, controller, "jobs", **PHONE) as page:
            await page.until("document.querySelector('.list').getAttribute('aria-rowcount') === '701'")
            assert await page.run("document.querySelectorAll('.rows .row').length") < 60
            # As it scrolls, only the rows that come into sight are moved; at rest they are in their order again.
            moved, seen = await page.run(
                """new Promise((resolve) => {
                    const list = document.querySelector('.list'), frames = (then) =>
                        requestAnimationFrame(() => requestAnimationFrame(then));
                    const rows = () => [...document.querySelectorAll('.rows .row:not([hidden])')];
                    list.scrollTop = 3000;
                    frames(() => {
                        const moved = new Set(), watch = new MutationObserver((all) =>
                            all.forEach((one) => moved.add(one.target)));
                        rows().forEach((row) => watch.observe(row, { attributes: true, attributeFilter: ['style'] }));
                        list.scrollTop += 4 * rows()[0].offsetHeight;
                        frames(() => resolve([moved.size, rows().length]));
                    });
                })"""
            )
            assert 4 <= moved <= 6 < seen
            await page.until(
                "((places) => places.every((each, n) => !n || each > places[n - 1]))"
                "([...document.querySelectorAll('.rows .row:not([hidden])')].map((row) => +row.ariaRowIndex))"
            )
            await page.run("document.querySelector('.list').scrollTop = 1e6")
            await page.until(
                "[...document.querySelectorAll('.row:not([hidden])')].some((e) => e.ariaRowIndex === '701')"
            )
            for view in ("", "jobs", "nodes", "pools", "groups", "timeline", "events", "nodes/node-7"):
                await page.run(f"location.hash = '#/{view}'")
                await page.until(
                    "!document.querySelector('.loading') && document.querySelector('main').innerText.length > 20"
                )
                assert await page.run("document.documentElement.scrollWidth <= innerWidth"), view
                assert await page.run(OUTSIDE) == 0, view
            assert [each for each in page.problems if "401" not in each] == []


@pytest.mark.parametrize("dark", [False, True])
async def test_words_stand_out_from_their_ground(browser: Browser, tmp_path: Path, dark: bool) -> None:
    """Contrast of 4.5 or more, for every text colour on the grounds that it is used on (WCAG 2.2, 1.4.3)."""
    async with served(tmp_path) as controller:
        page = await browser.open(controller.page_address, dark=dark)
        await page.until("document.querySelector('#token')")
        weak = await page.run(
            """(() => {
                const style = getComputedStyle(document.documentElement);
                const light = (name) => {
                    const hex = style.getPropertyValue(name).trim().slice(1);
                    const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
                        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const tones = ["run", "wait", "start", "yield", "recover", "stop", "fail", "done"];
                const pairs = [...["--text", "--muted", "--accent"].flatMap((ink) =>
                    ["--ground", "--surface", "--raised"].map((ground) => [ink, ground])),
                    ...tones.map((tone) => [`--${tone}`, `--${tone}-soft`]), ["--on-accent", "--accent"],
                    ["--accent", "--accent-soft"], ["--muted", "--cell-free"],
                    ...Array.from({ length: 12 }, (_, n) => ["--on-cell", `--hue-${n}`])];
                return pairs.map(([ink, ground]) => {
                    const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
                    return [ink, ground, (high + 0.05) / (low + 0.05)];
                }).filter(([, , contrast]) => contrast < 4.5).map((each) => each.join(" "));
            })()"""
        )
        await page.close()
    assert weak == []


async def test_a_link_of_the_command_line_logs_in_without_a_form(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path) as controller:
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "callboard.cli", "page", "--controller", controller.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        printed, _ = await made.communicate()
        link = printed.decode().strip()
        assert link.startswith(f"{controller.page_address}/#login=")
        page = await browser.open(link)
        await page.until("document.querySelector('header .live[data-state=live]')")
        assert "login" not in await page.run("location.href")
        await page.close()
