"""A real headless Chromium, driven over a pair of pipes by the DevTools protocol; needs no further package."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """A page in the browser: what it requested and complained about, its size and its picture."""

    def __init__(self, send, receive):
        self._send, self._receive, self._number = send, receive, 0
        self.events = []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Calls a method of the DevTools protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._send(message | ({"sessionId": self._session} if self._session else {}))
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width=1280, height=900, dark=False):
        """Loads a file at a window size and a colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + 30
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def evaluate(self, script):
        """The value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self):
        """A PNG of the whole page, not of its window alone."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        )

    @property
    def requests(self):
        """Addresses that the page requested, those of data inside it excluded."""
        urls = [
            e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    @property
    def complaints(self):
        """Messages on the console, exceptions, and entries of the log such as violations of the security
        policy."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in methods]


@contextlib.contextmanager
def chromium(folder):
    """A `Page` in a browser whose profile is in `folder`. Skips the test where there is no Chromium."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium: apt install chromium")
    from_us, to_us = os.pipe(), os.pipe()
    ends, quiet = (from_us[0], to_us[1]), subprocess.DEVNULL
    wire = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'  # the browser reads from descriptor 3 and writes to 4
    command = ["bash", "-c", wire, program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    browser = subprocess.Popen(
        command, pass_fds=ends, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    os.close(from_us[0])
    os.close(to_us[1])
    with os.fdopen(from_us[1], "wb") as sender, os.fdopen(to_us[0], "rb") as receiver:

        def send(message):
            sender.write(json.dumps(message).encode() + b"\0")
            sender.flush()

        rest = b""

        def receive():
            nonlocal rest
            while b"\0" not in rest:
                part = os.read(receiver.fileno(), 1 << 20)
                assert part, "the browser has ended"
                rest += part
            line, rest = rest.split(b"\0", 1)
            return json.loads(line)

        try:
            yield Page(send, receive)
        finally:
            browser.kill()
            browser.wait()
