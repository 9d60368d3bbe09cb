"""Adapters of others beside a base: which are taken, and what their settings have to be."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import open_experiment
from pipeline_lib.config.load import load_config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.preflight import wrong_with

PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 32,
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "Qwen/Qwen3-0.6B",
}
CONFIG = """\
experiment: on
model: {{source: local, path: {base}, adapter: {{source: local, path: {adapter}}}}}
data: {{train: [{{source: pydoc}}]}}
train: {{method: lora, lora: {{rank: 8, alpha: 32}}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a base and of adapters, whose files exist and hold no weights."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (base / name).write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps(PEFT))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(base=base, adapter=adapter))
    return path


def found(config: Path, **changed: object) -> list[str]:
    """What is wrong with the adapters if peft's config has `changed`."""
    path = config.parent / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(PEFT | changed))
    store = Store(config.parent / "store")
    lines = [one.line for one in wrong_with(load_config(config), store)]
    return [line for line in lines if "model.adapter" in line or "train.lora" in line]


def test_the_training_reads_them_beside_the_base(config: Path) -> None:
    specs = open_experiment(config, Store(config.parent / "store")).specs

    assert specs["train"].inputs["adapter"] == specs["adapter"].ref
    assert specs["train"].inputs["model"] == specs["model"].ref
    assert specs["baseline"].inputs["model"] == specs["model"].ref
    assert "adapter" not in specs["model"].settings
    assert specs["adapter"].where == {"path": str(config.parent / "adapter")}
    assert sorted(specs["adapter"].settings["content"]) == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
    ]


def test_their_content_decides_and_not_their_place(config: Path) -> None:
    store = Store(config.parent / "store")
    before = open_experiment(config, store).ref("train")
    (config.parent / "adapter").rename(config.parent / "moved")
    text = config.read_text().replace(str(config.parent / "adapter"), str(config.parent / "moved"))
    config.write_text(text)

    assert open_experiment(config, store).ref("train") == before
    (config.parent / "moved" / "adapter_model.safetensors").write_bytes(b"other")
    assert open_experiment(config, store).ref("train") != before


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 16}, "train.lora.rank: 8, and the adapters in "),
        ({"lora_alpha": 8}, "train.lora.alpha: 32, and the adapters in "),
        ({"use_rslora": True}, "train.lora.rslora: False, and the adapters in "),
        ({"use_dora": True}, "train.lora.dora: False, and the adapters in "),
        ({"peft_type": "IA3"}, "model.adapter.path: peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "model.adapter.path: modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "model.adapter.path: rank_pattern is"),
        ({"bias": "all"}, "model.adapter.path: bias is 'all'"),
    ],
)
def test_adapters_that_are_not_trained_here_are_refused(
    config: Path, changed: dict[str, object], said: str
) -> None:
    assert found(config) == []
    [line] = found(config, **changed)
    assert said in line


def test_those_of_another_base_are_refused(config: Path) -> None:
    text = config.read_text().replace(
        f"source: local, path: {config.parent / 'base'}", "source: huggingface, name: Qwen/Qwen3-4B"
    )
    config.write_text(text)

    [line] = found(config)
    assert "they were trained on Qwen/Qwen3-0.6B, and model.name is Qwen/Qwen3-4B" in line
    assert found(config, base_model_name_or_path="Qwen/Qwen3-4B") == []
    assert found(config, base_model_name_or_path="/home/me/Qwen3-4B") == []


def test_a_folder_without_them_is_named(config: Path) -> None:
    (config.parent / "adapter" / "adapter_model.safetensors").unlink()

    with pytest.raises(ConfigError) as caught:
        open_experiment(config, Store(config.parent / "store"))
    [problem] = caught.value.problems
    assert "model.adapter.path: no adapter_model.safetensors in " in problem


def test_they_need_adapters_to_be_trained(config: Path) -> None:
    config.write_text(config.read_text().partition("train: {method")[0])

    with pytest.raises(ConfigError) as caught:
        load_config(config)
    [problem] = caught.value.problems
    assert problem.startswith("line 2: model.adapter: is trained on only with train.method: lora")
