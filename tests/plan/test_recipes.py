"""The recipes: each passes `check` and `plan`; its header and docs/recipes.md have the figures.

The figures are those of the plan.
"""

import json
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline_lib.cli.main import main
from pipeline_lib.config.load import load_configs
from pipeline_lib.config.schema import FileData, HubModel
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.plan import preflight
from tests.fake_hub import FakeHub
from tooling.recipes import (
    BEGIN,
    END,
    PAGE,
    RECIPES,
    Recipe,
    find_recipes,
    read_recipe,
    recipe_files,
)

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (ROOT / RECIPES).glob("*.yaml"))
ROWS = {
    "auto": {
        "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    },
    "text": {"text": "Two and two are four."},
}
REQUIRED = {  # file name: nodes, GPUs of a node, words of the GPU's name, model, method
    "lora-8b-1x24gb.yaml": (1, 1, "3090", "Qwen/Qwen3-8B", "lora"),
    "lora-8b-4x24gb.yaml": (1, 4, "4090", "Qwen/Qwen3-8B", "lora"),
    "qlora-8b-1x12gb.yaml": (1, 1, "3060", "Qwen/Qwen3-8B", "lora"),
    "qlora-14b-1x24gb.yaml": (1, 1, "3090", "Qwen/Qwen3-14B", "lora"),
    "qlora-32b-1x48gb.yaml": (1, 1, "A6000", "Qwen/Qwen3-32B", "lora"),
    "qlora-8b-4x24gb.yaml": (1, 4, "4090", "Qwen/Qwen3-8B", "lora"),
    "full-1.5b-2xa10.yaml": (1, 2, "A10", "Qwen/Qwen2.5-1.5B-Instruct", "full"),
    "full-1.5b-2nodes-2xa10-9gbit.yaml": (2, 2, "A10", "Qwen/Qwen2.5-1.5B-Instruct", "full"),
    "full-4b-zero2-offload-4x3090.yaml": (1, 4, "3090", "Qwen/Qwen3-4B", "full"),
    "full-8b-8xa100.yaml": (1, 8, "A100 80GB", "Qwen/Qwen3-8B", "full"),
    "full-8b-8xh100.yaml": (1, 8, "H100", "Qwen/Qwen3-8B", "full"),
    "full-14b-8xa100.yaml": (1, 8, "A100 80GB", "Qwen/Qwen3-14B", "full"),
    "lora-32b-8xa100.yaml": (1, 8, "A100 80GB", "Qwen/Qwen3-32B", "lora"),
    "full-32b-2nodes-8xa100.yaml": (2, 8, "A100 80GB", "Qwen/Qwen3-32B", "full"),
    "full-30b-a3b-8xh200.yaml": (1, 8, "H200", "Qwen/Qwen3-30B-A3B", "full"),
    "lora-8b-128k-1xh200.yaml": (1, 1, "H200", "Qwen/Qwen3-8B", "lora"),
    "full-8b-128k-8xh100.yaml": (1, 8, "H100", "Qwen/Qwen3-8B", "full"),
    "lora-32b-128k-8xh100.yaml": (1, 8, "H100", "Qwen/Qwen3-32B", "lora"),
    "qlora-qwen3.5-9b-1x24gb.yaml": (1, 1, "3090", "Qwen/Qwen3.5-9B", "lora"),
    "lora-qwen3.6-27b-1xh100.yaml": (1, 1, "H100", "Qwen/Qwen3.6-27B", "lora"),
    "full-qwen3.5-9b-8xh100.yaml": (1, 8, "H100", "Qwen/Qwen3.5-9B", "full"),
}


class Usage(NamedTuple):
    """A disk with room for everything."""

    free: int = 10**15


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    return {recipe.path.name: recipe for recipe in find_recipes(ROOT)}


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with its own copy of two recipes and of their page, whose table has these two."""
    (tmp_path / RECIPES).mkdir(parents=True)
    for name in ("full-8b-8xh100.yaml", "lora-8b-1x24gb.yaml"):
        shutil.copy(ROOT / RECIPES / name, tmp_path / RECIPES / name)
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / PAGE, tmp_path / PAGE)
    assert outdated(tmp_path) == [PAGE.name]  # no other recipe is below this folder
    (tmp_path / PAGE).write_text(recipe_files(tmp_path)[tmp_path / PAGE], encoding="utf-8")
    return tmp_path


def outdated(root: Path) -> list[str]:
    return [
        path.name
        for path, text in recipe_files(root).items()
        if path.read_text(encoding="utf-8") != text
    ]


def run(monkeypatch: pytest.MonkeyPatch, command: str, config: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["pipeline_lib", command, str(config)])
    with pytest.raises(SystemExit) as raised:
        main()
    return int(raised.value.code or 0)


def test_the_figures_are_the_present_ones() -> None:
    assert outdated(ROOT) == [], "run `make docs`"


@pytest.mark.parametrize("name", NAMES)
def test_check_and_plan_accept_it(
    name: str,
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / name
    shutil.copy(ROOT / RECIPES / name, config)
    first = load_configs(config)[0]
    source = first.data.train[0]
    assert isinstance(first.model, HubModel)
    assert isinstance(source, FileData)
    assert (first.model.revision, source.path) == (None, "data/*.jsonl")
    hub.add("model", first.model.name, {"config.json": b"{}"})
    (tmp_path / "data").mkdir()
    row = json.dumps(ROWS["text" if source.format == "text" else "auto"])
    (tmp_path / "data" / "rows.jsonl").write_text(f"{row}\n" * 2000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(preflight, "disk_usage", lambda _: Usage())
    # Where fla-core is installed, transformers calls it on CPUs too, and fails: so it is not in the
    # extra `dev`.
    monkeypatch.setattr(preflight, "find_spec", lambda name: name == "fla" or find_spec(name))
    if first.train.uses_deepspeed and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    checked = run(monkeypatch, "check", config)
    written = capsys.readouterr()
    assert checked == 0, written.err
    assert "no problems" in written.out
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a network was asked for"))
    assert run(monkeypatch, "plan", config) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", REQUIRED)
def test_it_is_of_the_machine_and_the_model_in_its_name(
    recipes: dict[str, Recipe], name: str
) -> None:
    recipe, (nodes, per_node, gpu, model, method) = recipes[name], REQUIRED[name]
    machine = recipe.machine
    assert (machine.nodes, machine.ranks_per_node, recipe.model_name) == (nodes, per_node, model)
    assert gpu in machine.name
    assert recipe.config.train.method == method
    assert recipe.way.fits


def test_special_recipes_have_their_keys(recipes: dict[str, Recipe]) -> None:
    assert recipes["pretrain-text-1.7b-1xa100.yaml"].config.data.train[0].format == "text"  # type: ignore[union-attr]
    assert recipes["reasoning-8b-8xh100.yaml"].config.tokenize.thinking == "keep"
    assert "halving:" in (ROOT / RECIPES / "sweep-halving-lora-1.7b-1x24gb.yaml").read_text()
    assert recipes["sweep-halving-lora-1.7b-1x24gb.yaml"].experiments == 8
    offloading = recipes["full-4b-zero2-offload-4x3090.yaml"].config.train
    assert (offloading.strategy, offloading.offload) == ("zero2", "optimizer")
    assert all(recipe.config.train.validate_every_steps for recipe in recipes.values())


def test_one_node_is_faster_where_the_header_says_so(recipes: dict[str, Recipe]) -> None:
    slow, fast = recipes["full-1.5b-2nodes-2xa10-9gbit.yaml"], recipes["full-1.5b-2xa10.yaml"]
    assert slow.alone is not None
    assert slow.alone.step_s.value < slow.way.step_s.value
    assert slow.alone.step_s == fast.way.step_s


def test_every_recipe_names_itself_says_what_to_change_and_is_listed(
    recipes: dict[str, Recipe],
) -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for name, recipe in recipes.items():
        by_hand = recipe.path.read_text(encoding="utf-8").partition(BEGIN)[0]
        assert all(line.startswith("#") for line in by_hand.splitlines())
        assert "Change first: " in by_hand
        assert recipe.config.experiment.startswith(recipe.path.stem)
        assert page.count(f"](../{RECIPES}/{name})") == 1


def test_a_figure_that_was_edited_by_hand_is_found(copies: Path) -> None:
    path = copies / RECIPES / "full-8b-8xh100.yaml"
    text = path.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("# GPU memory"))
    path.write_text(text.replace(line, line.replace("GiB (", "GiB (1")), encoding="utf-8")
    assert outdated(copies) == [path.name]
    page = copies / PAGE
    page.write_text(
        page.read_text(encoding="utf-8").replace("| full |", "| lora |", 1), encoding="utf-8"
    )
    assert outdated(copies) == [path.name, page.name]


def test_a_key_that_changes_the_plan_changes_the_figures(copies: Path) -> None:
    path = copies / RECIPES / "full-8b-8xh100.yaml"
    path.write_text(
        path.read_text(encoding="utf-8").replace("gpu: h100", "gpu: h200"), encoding="utf-8"
    )
    assert outdated(copies) == [path.name, PAGE.name]


@pytest.mark.parametrize("marker", [BEGIN, END])
def test_a_recipe_without_its_markers_is_refused(copies: Path, marker: str) -> None:
    path = copies / RECIPES / "full-8b-8xh100.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(f"{marker}\n", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match="needs the two lines"):
        recipe_files(copies)


def test_a_recipe_that_does_not_fit_is_refused(copies: Path) -> None:
    path = copies / RECIPES / "full-8b-8xh100.yaml"
    path.write_text(
        path.read_text(encoding="utf-8").replace("gpu: h100", "gpu: a10, memory_gb: 100"),
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match="fit"):
        read_recipe(path)
