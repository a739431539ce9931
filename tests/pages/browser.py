"""A headless Chromium, told what to do over its debugging pipe (the DevTools protocol), so that no driver is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
SECONDS = 120.0


class Tab:
    """One page.

    Attributes:
        problems: every exception, console error and refused resource since it was opened.
    """

    def __init__(self, commands: int, answers: int):
        self.problems: list[str] = []
        self._commands, self._answers = commands, answers
        self._received, self._last, self._loaded = b"", 0, False
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a file in a window of this size and wait until it is loaded and its scripts have run."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.problems, self._loaded = [], False
        self._call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while not self._loaded:
            self._receive(deadline)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Return as soon as an expression is true; fail where it does not become so."""
        deadline = time.monotonic() + 20
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression} does not become true"
            time.sleep(0.05)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first such element, in the window."""
        bounds = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return tuple(self.evaluate(f"(box => [box.left, box.top, box.width, box.height])({bounds})"))

    def point_at(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse, and click."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for event in ("mousePressed", "mouseReleased") if click else ():
            self._call("Input.dispatchMouseEvent", type=event, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, whole: bool = False) -> np.ndarray:
        """[height, width, 3] in [0, 1] of the window, or of the whole page."""
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        return np.asarray(imread(BytesIO(base64.b64decode(picture)), format="png"))[..., :3]

    def _clip(self, whole: bool) -> Mapping[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message, noted if it is an event."""
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser has ended"
            self._received += piece
        first, _, self._received = self._received.partition(b"\0")
        message = json.loads(first)
        event, details = message.get("method"), message.get("params", {})
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(details["exceptionDetails"].get("exception", {}).get("description", str(details)))
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append(str(details["args"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])
        return message


@contextmanager
def browser_tab(profile: Path) -> Iterator[Tab]:
    """A browser with one tab; `profile` is a new folder for what it keeps."""
    assert BROWSER is not None
    (to_read, commands), (answers, to_write) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4, wherever the pipes lie here.
    wired = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    command = ["bash", "-c", wired, BROWSER, *QUIET.split(), f"--user-data-dir={profile}"]
    with subprocess.Popen(
        command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(to_read)
        os.close(to_write)
        try:
            yield Tab(commands, answers)
        finally:
            # It ends when nobody can command it any more.
            os.close(commands)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            os.close(answers)
