"""DeepSpeed's config follows from ours, and a user's own may not change what is computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.deepspeed_json import json_problems, read_deepspeed_json
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.train.deepspeed_config import zero_config


def written(folder: Path, value: Any) -> Path:
    path = folder / "deepspeed.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_it_follows_from_our_keys() -> None:
    train = Train(
        strategy="zero3", offload="optimizer+params", micro_batch_blocks=2, max_grad_norm=0.5
    )
    config = zero_config(train, world_size=4, accumulation=3, chosen={})
    assert config["train_batch_size"] == 24
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5
    assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(("stage", "offload"), [(1, "none"), (2, "optimizer"), (3, "optimizer")])
def test_no_more_is_offloaded_than_asked_for(stage: int, offload: Any) -> None:
    strategy: Any = f"zero{stage}"
    zero = zero_config(Train(strategy=strategy, offload=offload), 2, 1, {})["zero_optimization"]
    assert ("offload_optimizer" in zero) == (offload == "optimizer")
    assert "offload_param" not in zero


def test_placement_keys_of_a_user_are_merged_over_ours(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "zero_optimization": {
                "stage": "auto",
                "reduce_bucket_size": 5e8,
                "stage3_max_live_parameters": 1e9,
                "overlap_comm": False,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
            "train_batch_size": "auto",
            "fp16": {"enabled": "auto"},
            "comms_logger": {"enabled": True},
        },
    )
    chosen = read_deepspeed_json(str(path), "zero2", "optimizer")
    config = zero_config(Train(strategy="zero2", offload="optimizer"), 2, 1, chosen)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (2, False)
    assert zero["reduce_bucket_size"] == 500_000_000
    assert isinstance(zero["reduce_bucket_size"], int)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert config["comms_logger"] == {"enabled": True}
    assert config["fp16"] == {"enabled": False}


def test_every_key_that_is_not_of_placement_is_refused_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "train_batch_size": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "comms_loger": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "zero_quantized_gradients": True,
                "offload_param": {"device": "nvme"},
                "overlap_comm": "yes",
                "sub_group_size": 1.5,
            },
        },
    )
    problems = json_problems(str(path), "zero2", "none")
    assert [problem.split(": ", 2)[1] for problem in problems] == [
        *(
            "train_batch_size",
            "optimizer",
            "bf16",
            "gradient_clipping",
            "comms_loger",
            "zero_optimization.stage",
        ),
        *("zero_optimization.zero_quantized_gradients", "zero_optimization.offload_param.device"),
        *("zero_optimization.overlap_comm", "zero_optimization.sub_group_size"),
    ]
    assert "train.global_batch_samples" in problems[0]
    assert "train.lr" in problems[1]
    assert "train.precision" in problems[2]
    assert "train.max_grad_norm" in problems[3]
    assert "'comms_logger'" in problems[4]
    assert "train.strategy" in problems[5]
    assert "train.offload" in problems[7]
    with pytest.raises(ConfigError, match="10 problems"):
        read_deepspeed_json(str(path), "zero2", "none")


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"zero_optimization": 3}', '{"zero_optimization": {"offload_param": 1}}']
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    assert len(json_problems(str(written(tmp_path, text)), "zero2", "none")) == 1


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_the_stage_may_be_named_if_it_is_that_of_the_strategy(
    tmp_path: Path, strategy: str
) -> None:
    path = str(written(tmp_path, {"zero_optimization": {"stage": int(strategy[-1])}}))
    assert json_problems(path, strategy, "none") == []
    for other in {"zero1", "zero2", "zero3"} - {strategy}:
        [problem] = json_problems(path, other, "none")
        assert f"contradicts train.strategy: {other}" in problem


def test_no_key_that_deepspeed_knows_is_called_unknown(tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = config.DeepSpeedZeroConfig.model_fields.items()
    names = sorted(
        {field.alias or name for name, field in fields}
        - {"stage", "offload_optimizer", "offload_param"}
    )
    found = json_problems(
        str(written(tmp_path, {"zero_optimization": dict.fromkeys(names, 1)})), "zero2", "none"
    )
    assert found
    assert not [problem for problem in found if "unknown" in problem]


def test_keys_of_ours_lead_to_the_command_that_converts_them(tmp_path: Path) -> None:
    path = written(tmp_path, {"gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}})
    assert [
        f"qwen3 import {path}" in problem for problem in json_problems(str(path), "zero2", "none")
    ] == [
        False,
        True,
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.json"):
        read_deepspeed_json(str(tmp_path / "gone.json"), "zero2", "none")
