"""The report in a real browser: every figure is drawn, nothing complains, no attack runs."""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.report.browser import Seen, Tab, look_at, open_browser, seen
from tests.report.fake_plans import gpu_run
from tests.report.fakes import World, hostile_files, metrics

FIGURES = {
    *(
        "figure-memory",
        "figure-ledger",
        "figure-lengths",
        "figure-loss",
        "figure-lr",
        "figure-throughput",
    ),
    *("figure-gradient", "figure-peak", "figure-scores", "figure-phases", "figure-timeline"),
}
LOG_FIGURES = FIGURES - {"figure-loss", "figure-gradient"} | {
    "figure-loss-log",
    "figure-gradient-log",
}
LONG_STEPS = 10_000
DRAWN_WITHIN_S = 30  # it takes about 2 s on an idle machine
MAX_BYTES = 3_000_000
WHITE, BLACK = "rgb(255, 255, 255)", "rgb(20, 23, 27)"


def report_of(world: World) -> Path:
    if not world.folder("report").exists():
        world.seal_inputs()
        world.seal_report()
    return world.folder("report") / "report.html"


def assert_drawn(page: Seen, width: int, figures: set[str] = FIGURES) -> None:
    assert page.figures.keys() == figures
    assert all(canvases > 0 for canvases in page.figures.values()), page.figures
    assert page.width <= width
    assert page.console == []


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """One browser for all that look at the finished report."""
    with open_browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize("width", [1280, 400])
def test_every_figure_is_drawn_in_light_dark_and_log_and_the_page_fits_its_window(
    finished: World, tab: Tab, width: int
) -> None:
    tab.open(report_of(finished), width)
    light = seen(tab, monotonic())
    assert_drawn(light, width)
    tab.like("dark")
    tab.ask("document.querySelectorAll('.switch input').forEach((box) => box.click())")
    dark = seen(tab, monotonic())
    assert_drawn(dark, width, LOG_FIGURES)
    assert (light.paper, dark.paper) == (WHITE, BLACK)
    assert (
        tab.ask(
            "[...document.querySelectorAll('.narrow')].filter((one) => one.scrollWidth > "
            "one.clientWidth).length"
        )
        == 0
    )


def test_the_wheel_scrolls_and_a_drag_or_ctrl_with_the_wheel_zooms_all_curves(
    finished: World, tab: Tab
) -> None:
    curves = "Bokeh.documents.at(-1).roots().map((one) => one.x_range).filter((one) => one.bounds)"
    scale = f"{curves}[0].end - {curves}[0].start"
    tab.open(report_of(finished), 1280)
    seen(tab, monotonic())
    assert tab.ask(f"new Set({curves}).size") == 1
    whole = tab.ask(scale)
    tab.ask(
        "document.getElementById('figure-loss').scrollIntoView({ block: 'center', behavior: "
        "'instant' })"
    )
    left, top = tab.at_rest(
        "(({ left, top }) => [left, "
        "top])(document.getElementById('figure-loss').getBoundingClientRect())"
    )
    tab.drag((left + 300, top + 80), (left + 600, top + 200))
    assert tab.until(f"{scale} < {0.5 * whole}")
    tab.ask(f"{curves}[0].reset()")
    assert tab.ask(scale) == whole
    tab.wheel(left + 400, top + 100, -120, ctrl=True)
    assert tab.until(f"{scale} < {0.99 * whole}")
    before, zoomed = tab.ask("scrollY"), tab.ask(scale)
    tab.wheel(left + 400, top + 100, 120)
    assert tab.until(f"scrollY > {before}")
    assert tab.ask(scale) == zoomed


def test_printed_it_shows_what_is_folded_and_no_switches(finished: World, tab: Tab) -> None:
    tab.open(report_of(finished), 1280)
    visible = "[...document.querySelectorAll('{}')].filter((one) => one.checkVisibility()).length"
    folded, switches = (
        visible.format("details table"),
        visible.format("nav, .switch, details:not(.fold) > summary"),
    )
    tables = tab.ask("document.querySelectorAll('details table').length")
    tab.ask("document.querySelectorAll('details').forEach((one) => one.open = false)")
    assert (tab.ask(folded), tab.ask(switches) > 0) == (0, True)
    tab.like("light", media="print")
    assert (tab.ask(folded), tab.ask(switches)) == (tables, 0)
    tab.like("light")


def test_a_long_run_on_gpus_is_small_and_drawn_in_time(world: World, tmp_path: Path) -> None:
    world.files["train"]["metrics.jsonl"] = metrics(LONG_STEPS)
    gpu_run(world.files)
    path = report_of(world)
    assert path.stat().st_size < MAX_BYTES
    page = look_at(path, tmp_path, 400, dark=True)
    assert_drawn(page, 400)
    assert page.drawn_s < DRAWN_WITHIN_S


def test_no_attack_runs(world: World, tmp_path: Path) -> None:
    world.files = hostile_files()
    page = look_at(report_of(world), tmp_path, 1280)
    assert page.owned is None
    assert_drawn(page, 1280)
