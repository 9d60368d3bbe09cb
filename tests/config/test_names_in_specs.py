"""Keys whose name in specs is another than in files: files take one, digests keep the other."""

from pathlib import Path

import pytest

from pipeline_lib.config.compile import open_experiments
from pipeline_lib.config.load import load_config
from pipeline_lib.config.train import RENAMED
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from tests.config import test_sweep

BASE = test_sweep.BASE.replace("lr: 1.0e-4", "strategy: fsdp, lr: 1.0e-4")
VALUES = {"recompute": "full", "reshard": "false"}
keys = pytest.mark.parametrize(("in_specs", "in_files"), RENAMED.items())


def config_at(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


@keys
def test_files_and_flags_take_only_the_name_of_files(
    tmp_path: Path, in_specs: str, in_files: str
) -> None:
    value = VALUES[in_specs]
    named = config_at(tmp_path, BASE.replace("lr: 1.0e-4", f"{in_files}: {value}"))
    assert in_specs in load_config(named).train.model_fields_set
    expected = f"train.{in_specs}: unknown key; here it is train.{in_files}"
    old = config_at(tmp_path, BASE.replace("lr: 1.0e-4", f"{in_specs}: {value}"))
    assert problems_of(old) == [f"line 4: {expected}"]
    plain = config_at(tmp_path, BASE)
    flag = f"train.{in_specs}={value}"
    assert problems_of(plain, flag) == [f"--what-if {flag}: {expected}"]


@keys
def test_a_sweep_names_its_experiments_as_specs_do(
    tmp_path: Path, in_specs: str, in_files: str
) -> None:
    value = VALUES[in_specs]
    sweep = "sweep: {{list: [{{train.seed: 3}}, {{train.{key}: {value}}}]}}\n"
    swept = config_at(tmp_path, BASE + sweep.format(key=in_files, value=value))
    _, experiment = open_experiments(swept, Store(tmp_path / "store"))
    assert experiment.name == f"demo-{in_specs}={value}"
    settings = experiment.specs["plan"].settings["train"]
    assert in_specs in settings
    assert in_files not in settings
    old = config_at(tmp_path, BASE + sweep.format(key=in_specs, value=value))
    [problem] = problems_of(old)
    assert in_files in problem
