"""A headless Chromium, driven by its own protocol over a pipe: what the page's tests look through."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # on a machine that is busy with other things
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowUp": (38, "")}  # name -> (code, text)
CONTROL, SHIFT = 2, 8


class Page:
    """One tab. ``errors``: what its console has complained of, broken rules of its security policy too."""

    def __init__(self, read: int, write: int) -> None:
        self.errors: list[str] = []
        self._read, self._write = read, write
        self._session: str | None = None
        self._buffer = b""
        self._count = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            part = os.read(self._read, 1 << 16) if ready else b""
            assert part, "the browser says nothing"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, told: dict[str, Any]) -> None:
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["params"]["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.errors.append(told["params"]["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, json.dumps(done["exceptionDetails"])
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The first value of an expression that is true."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, files: list[str]) -> None:
        """Files in the dialog of an input."""
        node = self.call("Runtime.evaluate", expression=f"document.querySelector({selector!r})")["result"]["objectId"]
        self.call("DOM.setFileInputFiles", files=files, objectId=node)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str, modifiers: int = 0) -> None:
        code, text = KEYS.get(name, (ord(name[0].upper()), ""))
        told = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def look(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """The size of the window, and what its user likes."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browsing(executable: str, profile: Path) -> Iterator[Page]:
    """A browser with an empty ``profile``, and its page."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # It reads commands from descriptor 3 and writes to 4: moved out of the way first, lest one is closed by the other.
    pair = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
    for fd in (theirs_in, theirs_out):
        os.close(fd)

    def connect() -> None:
        os.dup2(pair[0], 3)
        os.dup2(pair[1], 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [executable, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=connect, stdout=quiet, stderr=quiet)
    for fd in pair:
        os.close(fd)
    try:
        yield Page(ours_in, ours_out)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            os.close(ours_in)
            os.close(ours_out)
