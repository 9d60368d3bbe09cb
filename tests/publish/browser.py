"""Opens a page in a headless Chromium as a reader would, and tells what it looks like from inside."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

# Bokeh draws inside shadow roots, which no dump of the page shows: so a page around it looks in.
PROBE = """<!doctype html><body style="margin: 0">
<iframe src="%(page)s" style="border: 0; width: %(width)dpx; height: 900px"></iframe><pre id="probe"></pre><script>
function within(root, found = []) {
  for (const element of root.querySelectorAll("*")) {
    found.push(element);
    if (element.shadowRoot) within(element.shadowRoot, found);
  }
  return found;
}
function painted(canvas) {
  if (!canvas.width || !canvas.height) return false;
  return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0);
}
setTimeout(() => {
  const inside = document.querySelector("iframe").contentDocument, root = inside.documentElement;
  const figures = {};
  for (const place of inside.querySelectorAll("div[id^=figure-]"))
    figures[place.id] = within(place).filter((e) => e.tagName === "CANVAS" && painted(e)).length;
  document.getElementById("probe").textContent =
    JSON.stringify({figures, owned: root.dataset.owned ?? null, width: root.scrollWidth});
}, 5000);
</script></body>"""


@dataclass(frozen=True)
class Seen:
    """Painted canvases by figure, whether an attack ran, the width the page needs, and what the console said."""

    figures: dict[str, int]
    owned: Any
    width: int
    console: list[str]


def look_at(page: Path, scratch: Path, width: int) -> Seen:
    """Open the file `page` in a window `width` CSS pixels wide; skips the test where there is no browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    probe = scratch / "probe.html"
    probe.write_text(PROBE % {"page": page.as_uri(), "width": width})
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--allow-file-access-from-files"),
        *(f"--user-data-dir={scratch / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=9000"),
        *("--dump-dom", probe.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    if not found or not found[1]:
        raise AssertionError(f"the probe saw nothing:\n{done.stderr[-3000:]}")
    console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
    return Seen(**json.loads(unescape(found[1])), console=console)
