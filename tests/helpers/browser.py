"""A page in headless Chromium, driven over its debugging pipe."""

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """Return the browser of $CHROMIUM or on the PATH; None if there is none."""
    return next((path for name in (os.environ.get("CHROMIUM"), *NAMES) if name and (path := shutil.which(name))), None)


class Page:
    """A page of the browser; see https://chromedevtools.github.io/devtools-protocol for its methods."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, open(from_browser, "rb", buffering=0)  # noqa: SIM115 (open for the page)
        self._rest, self._count, self._session = b"", 0, {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **values) -> dict:
        self._count += 1
        message = {"id": self._count, "method": method, "params": values} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += self._from.read(1 << 16)
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                return answer["result"]

    def evaluate(self, expression: str):
        """Return the value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    def redraw(self) -> None:
        """Wait until the page has drawn what it was told: a script may do so in the next frame, so wait for two."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def open(self, page: Path, is_ready: str, timeout: float = 120) -> None:
        """Open a file and wait until the expression is true."""
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + timeout
        while not self.evaluate(is_ready):
            assert time.monotonic() < deadline, self.evaluate("document.body.innerText")
            time.sleep(0.1)

    def drag(self, *points: tuple[float, float]) -> None:
        """Move to the first point, press, move to the others, release."""
        for kind, (x, y) in [
            ("mouseMoved", points[0]),
            ("mousePressed", points[0]),
            *(("mouseMoved", point) for point in points[1:]),
            ("mouseReleased", points[-1]),
        ]:
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)


@contextmanager
def open_browser(browser: str, folder: Path, width: int = 1200) -> Iterator[Page]:
    """Start a browser with an empty profile in ``folder``."""
    (child_in, to_browser), (from_browser, child_out) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (child_in, child_out)]  # not in the way of 3 and 4
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--window-size={width},900"]
    process = subprocess.Popen(
        [browser, *flags, f"--user-data-dir={folder}"],
        pass_fds=(3, 4),
        preexec_fn=lambda: [os.dup2(end, number) for number, end in zip((3, 4), ends, strict=True)],
        stderr=subprocess.DEVNULL,
    )
    for end in (child_in, child_out, *ends):
        os.close(end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        process.terminate()
        process.wait()
