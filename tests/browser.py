"""A headless Chromium for tests, driven over its debugging pipe without a library or a port."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
WAIT_S = 30
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--force-device-scale-factor=1"),
)


class Page:
    """A page of a browser; `said` collects the errors of its console, `asked` the requested addresses."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer = send, receive, b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        """Call a method of the Chrome DevTools Protocol and wait for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            assert select.select([self._receive], [], [], WAIT_S)[0], "Chromium does not answer"
            part = os.read(self._receive, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(text)
        params = found.get("params", {})
        level = params.get("entry", {}).get("level")
        if level == "error" or found.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params)[:600])
        if found.get("method") == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        return found

    def size(self, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        """Set the window's size in pixels and the preferred color scheme."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    def goto(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def run(self, script: str):
        """Return the awaited value of an expression in the page; the content policy does not apply to it."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script: str):
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + WAIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; the page said {self.said}"
            time.sleep(0.03)
        return value

    def click(self, selector: str) -> None:
        """Click the middle of an element as a mouse does."""
        where = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({where})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, key: str) -> None:
        """Press a key of a character or of a name."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> Path:
        """Write the window's contents as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path


@contextmanager
def browser(profile: Path):
    """Yield a page of a new Chromium, which ends with the context."""
    (theirs_in, send), (receive, theirs_out) = os.pipe(), os.pipe()
    third_and_fourth = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # where Chromium reads and writes
    command = ["bash", "-c", third_and_fourth, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "about:blank"], pass_fds=(theirs_in, theirs_out), **quiet)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        process.terminate()
        process.wait(10)
        os.close(receive)
