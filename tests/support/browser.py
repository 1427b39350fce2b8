"""A real browser without a window: Chromium, driven over a pipe by its own protocol (CDP), with no library between.

async with Browser() as browser:
    page = await browser.open(url, width=390, height=844, dark=True)
    await page.until("document.querySelector('.tile')")
    await page.click("button.danger")
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")

OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--mute-audio",
    # Containers have no user namespaces, and the only pages are ours.
    "--no-sandbox",
)

LONGEST_S = 30.0
"""Longest wait for anything; a busy machine is slow."""


class NoBrowser(Exception):
    """There is no browser to drive."""


def find_browser() -> str:
    """The program.

    Raises:
        NoBrowser: it is not installed.
    """
    named = os.environ.get("CALLBOARD_BROWSER")
    found = named or next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if not found:
        raise NoBrowser("no Chromium is installed: run `scripts/setup browser`, or name one in CALLBOARD_BROWSER")
    return found


class PageFailed(Exception):
    """The browser refused something, or a script raised."""


class Browser:
    """One browser process. Each page has cookies of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, BrowserPage] = {}

    async def __aenter__(self) -> Self:
        program = find_browser()
        self._folder = tempfile.mkdtemp(prefix="browser-")
        (to_read, self._writing), (reading, to_write) = os.pipe(), os.pipe()
        # The pipes are to be descriptors 3 and 4.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ("bash", "-c", shell, "bash", program, *OPTIONS, f"--user-data-dir={self._folder}", "about:blank")
        self._process = await asyncio.create_subprocess_exec(
            *command,
            pass_fds=(to_read, to_write),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._reader = asyncio.StreamReader(limit=1 << 30)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), os.fdopen(reading, "rb", 0)
        )
        self._task = asyncio.create_task(self._read())
        await self.send("Browser.getVersion")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        closing = asyncio.create_task(self.send("Browser.close"))
        ended = asyncio.create_task(self._process.wait())
        await asyncio.wait({ended}, timeout=LONGEST_S)
        if not ended.done():
            self._process.kill()
            await ended
        closing.cancel()
        self._task.cancel()
        await asyncio.wait({closing, self._task})
        self._transport.close()
        os.close(self._writing)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def open(
        self,
        url: str,
        *,
        width: int = 1440,
        height: int = 900,
        dark: bool = False,
        phone: bool = False,
        scale: float = 1,
    ) -> BrowserPage:
        """A new window with this page."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = BrowserPage(self, attached["sessionId"], context)
        self._pages[attached["sessionId"]] = page
        await page.send("Page.enable")
        await page.send("Runtime.enable")
        await page.send("Log.enable")
        await page.send("Network.enable")
        await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.send("Emulation.setEmulatedMedia", features=[scheme])
        await page.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        await page.send("Page.navigate", url=url)
        return page

    async def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """What the browser answers.

        Raises:
            PageFailed: it refused.
        """
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.to_thread(_write, self._writing, json.dumps(message).encode() + b"\0")
            async with asyncio.timeout(LONGEST_S * 2):
                answer = await answered
        finally:
            del self._answers[number]
        if "error" in answer:
            raise PageFailed(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _read(self) -> None:
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in message:
                answer = self._answers.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.happened(message["method"], message["params"])


class BrowserPage:
    """One window.

    Attributes:
        problems: errors of scripts, refused requests and breaches of the content policy, in order.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, for this window."""
        return await self._browser.send(method, self._session, **parameters)

    async def run(self, script: str) -> Any:
        """What an expression gives; a promise is awaited.

        Raises:
            PageFailed: it raised.
        """
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageFailed(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Waits, from frame to frame, until an expression is true, and returns it.

        Raises:
            PageFailed: it did not become true.
        """
        look = f"""new Promise((resolve, reject) => {{
            const end = performance.now() + {LONGEST_S * 1000};
            const look = () => {{
                let found;
                try {{ found = ({condition}); }} catch (error) {{ found = null; }}
                if (found) resolve(found instanceof Element ? true : found);
                else if (performance.now() < end) setTimeout(look, 15);
                else reject(new Error({json.dumps(f"it did not come true: {condition} in: ")}
                    + document.body?.innerText.slice(0, 1500)));
            }};
            look();
        }})"""
        return await self.run(look)

    async def text(self, selector: str = "body") -> str:
        """The words of an element, as they are seen."""
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def click(self, selector: str) -> None:
        """Clicks the middle of an element, as a person would."""
        await self.until(f"document.querySelector({json.dumps(selector)})")
        place = await self.run(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                element.scrollIntoView({{ block: "center" }});
                const box = element.getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Types into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Presses a key: "Enter", "Tab", "ArrowDown"."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39}
        fields: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        if key == "Enter":
            fields["text"] = "\r"
        await self.send("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        answer = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        """Closes the window and forgets its cookies."""
        await self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)

    def happened(self, method: str, parameters: dict[str, Any]) -> None:
        """The browser says what happened in the window."""
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details.get("text", "")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
