"""The report in a real browser: every figure is drawn, nothing is complained about, no attack runs."""

from pathlib import Path

import pytest

from tests.publish.browser import Seen, look_at
from tests.publish.fake_plans import gpu_run
from tests.publish.fakes import World, hostile_files

FIGURES = {
    *("figure-memory", "figure-ledger", "figure-lengths", "figure-loss", "figure-lr", "figure-throughput"),
    *("figure-gradient", "figure-scores", "figure-phases", "figure-timeline"),
}


def seen(world: World, scratch: Path, width: int) -> Seen:
    if not world.folder("report").exists():
        world.seal_inputs()
        world.seal_report()
    return look_at(world.folder("report") / "report.html", scratch, width)


def complaints(page: Seen) -> list[str]:
    return [line for line in page.console if "setting log level" not in line]


@pytest.mark.parametrize("width", [1280, 400])
def test_every_figure_is_painted_and_the_page_fits_its_window(finished: World, tmp_path: Path, width: int) -> None:
    page = seen(finished, tmp_path, width)
    assert page.figures.keys() == FIGURES
    assert all(canvases > 0 for canvases in page.figures.values()), page.figures
    assert page.width <= width
    assert complaints(page) == []


@pytest.mark.parametrize("width", [1280, 400])
def test_a_plan_for_gpus_is_painted_whole(world: World, tmp_path: Path, width: int) -> None:
    gpu_run(world.files)
    page = seen(world, tmp_path, width)
    assert page.figures.keys() == FIGURES
    assert all(canvases > 0 for canvases in page.figures.values()), page.figures
    assert page.width <= width
    assert complaints(page) == []


def test_no_attack_runs(world: World, tmp_path: Path) -> None:
    world.files = hostile_files()
    page = seen(world, tmp_path, 1280)
    assert page.owned is None
    assert page.width <= 1280
    assert all(canvases > 0 for canvases in page.figures.values()), page.figures
    assert complaints(page) == []


def test_a_page_without_data_draws_nothing_and_complains_of_nothing(world: World, tmp_path: Path) -> None:
    world.files = {}
    page = seen(world, tmp_path, 1280)
    assert page.figures == {}
    assert complaints(page) == []
