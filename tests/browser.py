"""A real browser for tests: Chromium, told what to do through a pipe. Every wait is for one answer, and has a deadline."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_DEADLINE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4. The pipes may have these numbers already, crosswise.
_LAUNCH = """import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])"""


def find_chromium() -> str:
    """The browser's path. Without one a test is skipped, or fails where there must be one (CI_BROWSER=1)."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI_BROWSER") == "1":
        pytest.fail("CI_BROWSER=1, and there is no Chromium")
    pytest.skip("there is no Chromium")


class Browser:
    """One process; each page is a tab of it."""

    def __init__(self, profile: Path) -> None:
        chromium = find_chromium()
        commands, self.write = os.pipe()
        self.read, answers = os.pipe()
        launch = [sys.executable, "-c", _LAUNCH, str(commands), str(answers), chromium, *_FLAGS, f"--user-data-dir={profile}"]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(launch, pass_fds=(commands, answers), stdin=null, stdout=null, stderr=null)
        os.close(commands)
        os.close(answers)
        self.unread = b""
        self.asked = 0
        self.pages: dict[str, Page] = {}

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A page in a window of that size, loaded and drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.choose(dark=dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        self._until(lambda: page.loaded)
        page.settle()
        return page

    def call(self, method: str, *, session: str | None = None, **params: object) -> dict[str, Any]:
        """Ask the browser something and wait for the answer."""
        self.asked += 1
        message = {"id": self.asked, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.write, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        self._until(lambda: bool(answers), answers=answers)
        assert "error" not in answers[0], f"{method}: {answers[0]['error']}"
        result: dict[str, Any] = answers[0]["result"]
        return result

    def _until(self, done: Any, answers: list[dict[str, Any]] | None = None) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not done():
            message = self._next(deadline)
            if "id" in message:
                if answers is not None and message["id"] == self.asked:
                    answers.append(message)
            elif page := self.pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.read, 2**20)
            assert piece, "the browser is gone"
            self.unread += piece
        message, _, self.unread = self.unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        os.close(self.write)  # it ends when nobody can tell it anything any more
        os.close(self.read)
        try:
            self.process.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Page:
    """A tab. `complaints` are errors and warnings of its console, `asked_for` the addresses that it loaded."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.loaded = False
        self.complaints: list[str] = []
        self.asked_for: list[str] = []

    def call(self, method: str, **params: object) -> dict[str, Any]:
        return self.browser.call(method, session=self.session, **params)

    def hear(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self.loaded = True
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked_for.append(params["request"]["url"])

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, once it is there."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until all that is to be drawn has been drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def choose(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        held = {"button": "left", "buttons": 1}
        self.point_at(*start)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], clickCount=1, **held)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=stop[0], y=stop[1], **held)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=stop[0], y=stop[1], clickCount=1, **held)
        self.settle()

    def picture(self, out: Path) -> None:
        """The whole page, also what is below the window, as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        out.write_bytes(base64.b64decode(shot["data"]))

    def print(self, out: Path) -> None:
        """As paper would have it."""
        out.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))
