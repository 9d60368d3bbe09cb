"""Opens a page in a headless Chromium as a reader would, and tells how it looks from inside."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 90.0
# Bokeh draws inside shadow roots. Data has colours; axes, grids and an empty figure have none.
INSIDE = """
function within(root, found = []) {
  for (const element of root.querySelectorAll("*")) {
    found.push(element);
    if (element.shadowRoot) within(element.shadowRoot, found);
  }
  return found;
}
function isColoured(canvas) {
  if (canvas.tagName !== "CANVAS" || !canvas.width || !canvas.height) return false;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) {
    const of = [pixels[i], pixels[i + 1], pixels[i + 2]];
    if (pixels[i + 3] > 100 && Math.max(...of) - Math.min(...of) > 40) return true;
  }
  return false;
}
const shown = [...document.querySelectorAll("div[id^=figure-]")].filter((place) => place.offsetParent !== null);
"""
FIGURES = (
    "Object.fromEntries(shown.map((place) => [place.id, within(place).filter(isColoured).length]))"
)


@dataclass(frozen=True)
class Seen:
    """Coloured canvases by shown figure, whether an attack ran, and the page's wanted width.

    `width` is in CSS pixels, `console` what the browser complained of, `paper` the background;
    `drawn_s` are the seconds from asking for the page until every figure was there, or the patience
    was at its end.
    """

    figures: dict[str, int]
    owned: Any
    width: int
    paper: str
    console: list[str]
    drawn_s: float


class Tab:
    """A page that is open in a browser, driven over a pipe."""

    def __init__(self, write: int, read: int) -> None:
        """Attach to the one page of the browser at the other ends."""
        self._write, self._read = write, os.fdopen(read, "rb", buffering=0)
        self._number, self._rest, self._session = 0, b"", ""
        self.console: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call `method` of the DevTools protocol and wait for its result."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": params}
        call |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(call).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._listen(message)

    def ask(self, expression: str) -> Any:
        """What `expression` is in the page, after the functions of INSIDE."""
        asked = f"(() => {{ {INSIDE} return {expression}; }})()"
        found = self.send(
            "Runtime.evaluate", expression=asked, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Load the file `page` in a window `width` CSS pixels wide, and unfold its parts.

        `dark` is the reader's wish.
        """
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.like("dark" if dark else "light")
        self.send("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete'")
        self.ask("document.querySelectorAll('.fold').forEach((part) => { part.open = true; })")

    def like(self, scheme: str, media: str = "") -> None:
        """Change to the colour scheme `light` or `dark`, and to `media`: `print` or the screen."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def until(self, condition: str) -> bool:
        """Wait until `condition` holds in the page; whether it did before the patience ended."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.ask(condition):
                return True
            time.sleep(0.1)
        return False

    def at_rest(self, expression: str) -> Any:
        """What `expression` is once unchanged for a second: a late paint moves a page's parts."""
        found, since = self.ask(expression), time.monotonic()
        while time.monotonic() < since + 1.0:
            time.sleep(0.1)
            if (now := self.ask(expression)) != found:
                found, since = now, time.monotonic()
        return found

    def wheel(self, x: float, y: float, delta: int, ctrl: bool = False) -> None:
        """Turn the wheel over a point of the window."""
        modifiers = 2 if ctrl else 0
        self.send(
            "Input.dispatchMouseEvent",
            type="mouseWheel",
            x=x,
            y=y,
            deltaX=0,
            deltaY=delta,
            modifiers=modifiers,
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button at `start`, move to `end` and let go."""
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        moves = [
            ("mouseMoved", start),
            ("mousePressed", start),
            ("mouseMoved", middle),
            ("mouseMoved", end),
        ]
        for kind, (x, y) in [*moves, ("mouseReleased", end)]:
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._read.read(1 << 20)
            if not read:
                raise AssertionError("the browser ended")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _listen(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self._hear(str(told["exceptionDetails"].get("exception", told)))
        if message.get("method") == "Log.entryAdded":
            self._hear(str(told["entry"]["text"]))
        if message.get("method") == "Runtime.consoleAPICalled":
            self._hear(" ".join(str(argument.get("value", argument)) for argument in told["args"]))

    def _hear(self, said: str) -> None:
        """Keep all but Bokeh's greeting and what is about seeing canvases, which is done here."""
        if "setting log level" not in said and "willReadFrequently" not in said:
            self.console.append(said)


@contextmanager
def open_browser(scratch: Path) -> Iterator[Tab]:
    """A browser with one empty page and its profile in `scratch`; skips the test without one."""
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if program is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    (to_read, write), (read, to_write) = os.pipe(), os.pipe()
    options = [
        *(
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ),
        *(
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ),
        *(f"--user-data-dir={scratch / 'profile'}", "about:blank"),
    ]
    # Chromium reads its calls from descriptor 3 and answers on 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', program, *options]
    with (scratch / "browser.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=(to_read, to_write))
    os.close(to_read)
    os.close(to_write)
    try:
        yield Tab(write, read)
    finally:
        process.kill()
        process.wait()
        os.close(write)


def look_at(page: Path, scratch: Path, width: int, dark: bool = False) -> Seen:
    """Open the file `page` in a window `width` CSS pixels wide; skips without a browser."""
    with open_browser(scratch) as tab:
        begin = time.monotonic()
        tab.open(page, width, dark)
        return seen(tab, begin)


def seen(tab: Tab, begin: float) -> Seen:
    """What there is to see once every figure that is shown is drawn."""
    tab.until(f"Object.values({FIGURES}).every((canvases) => canvases > 0)")
    drawn_s = time.monotonic() - begin
    return Seen(
        figures=tab.ask(FIGURES),
        owned=tab.ask("document.documentElement.dataset.owned ?? null"),
        width=tab.ask("document.documentElement.scrollWidth"),
        paper=tab.ask("getComputedStyle(document.body).backgroundColor"),
        console=tab.console,
        drawn_s=drawn_s,
    )
