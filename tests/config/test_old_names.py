"""Keys that have a new name: files take both, specs and digests keep the old one."""

from pathlib import Path

import pytest

from pipeline_lib.config import load
from pipeline_lib.config.compile import Experiment, open_experiments
from pipeline_lib.config.load import load_config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from tests.config import test_sweep

BASE = test_sweep.BASE.replace("lr: 1.0e-4", "strategy: fsdp, lr: 1.0e-4")
NAMES = {
    "recompute": ("activation_checkpointing", "[none, full]"),
    "reshard": ("reshard_after_forward", "[true, false]"),
}
SWEEPS = (
    "KEY: VALUES",
    "list: [{KEY: VALUE}, {train.seed: 3}]",
    "random: {experiments: 6, seed: 1, KEY: VALUES}",
)
old_and_new = pytest.mark.parametrize(
    ("old", "new", "values"), [(old, *new) for old, new in NAMES.items()]
)


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> None:
    load._warn_of_name.cache_clear()


def config_at(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value.problems


@old_and_new
def test_an_old_name_is_taken_and_the_new_one_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, values: str
) -> None:
    value = values.strip("[]").split(", ")[1]
    text = BASE.replace("lr: 1.0e-4", f"KEY: {value}")
    by_new = load_config(config_at(tmp_path, "new", text.replace("KEY", new)))
    assert capsys.readouterr().err == ""

    path = config_at(tmp_path, "old", text.replace("KEY", old))
    assert load_config(path) == load_config(path) == by_new
    assert (
        capsys.readouterr().err
        == f"warning: {path}: line 4: train.{old} is now called train.{new}\n"
    )

    assert load_config(config_at(tmp_path, "plain", BASE), [f"train.{old}={value}"]).train == (
        by_new.train.model_copy(update={"lr": 1.0e-4})
    )
    assert capsys.readouterr().err == f"warning: --what-if: train.{old} is now called train.{new}\n"


@old_and_new
@pytest.mark.parametrize("sweep", SWEEPS)
def test_a_sweep_over_either_name_has_the_same_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, values: str, sweep: str
) -> None:
    def specs_of(name: str) -> list[Experiment]:
        filled = sweep.replace("VALUES", values).replace("VALUE", values.strip("[]").split(", ")[1])
        path = config_at(
            tmp_path, name, f"{BASE}sweep: {{{filled.replace('KEY', f'train.{name}')}}}\n"
        )
        return list(open_experiments(path, Store(tmp_path / "store")))

    by_new = specs_of(new)
    assert capsys.readouterr().err == ""
    by_old = specs_of(old)

    assert len(by_new) > 1
    assert [one.specs for one in by_old] == [one.specs for one in by_new]
    assert {one.name.rpartition("=")[0] for one in by_old if "seed" not in one.name} == {
        f"demo-{old}"
    }
    assert f"train.{old} is now called train.{new}\n" in capsys.readouterr().err


@old_and_new
def test_both_names_at_once_are_an_error(tmp_path: Path, old: str, new: str, values: str) -> None:
    value = values.strip("[]").split(", ")[1]
    section = BASE.replace("lr: 1.0e-4", f"{new}: {value}, {old}: {value}")
    in_list = f"{BASE}sweep: {{list: [{{train.{old}: {value}, train.{new}: {value}}}]}}\n"

    assert problems_of(config_at(tmp_path, "section", section)) == [
        f"line 4: train.{old}: old name of {new}, which is given too; remove the old one"
    ]
    assert problems_of(config_at(tmp_path, "list", in_list)) == [
        f"line 5: sweep.list[0].'train.{old}': old name of train.{new}, which is given too; remove "
        "the old one"
    ]


def test_problems_name_the_new_key(tmp_path: Path) -> None:
    for given, problem in {
        "recompute: most": 'train.activation_checkpointing: "most" is not one of auto, none, '
        "selective, full",
        "strategy: ddp, reshard: false": "train.reshard_after_forward: has no effect with "
        "train.strategy: ddp",
        "activation_checkpoint: full": "train.activation_checkpoint: unknown key; did you mean "
        "'activation_checkp",
    }.items():
        [found] = problems_of(
            config_at(tmp_path, "config", test_sweep.BASE.replace("lr: 1.0e-4", given))
        )
        assert found.startswith(f"line 4: {problem}")
    assert problems_of(config_at(tmp_path, "config", f"{BASE}recompute: full\n")) == [
        "line 5: recompute: unknown key; here it is train.activation_checkpointing"
    ]
