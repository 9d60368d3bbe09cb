"""The plan's arithmetic, against counts made another way."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import write_json
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.plan.arithmetic import checkpoint_bytes, plan_batches, state_memory
from pipeline_lib.plan.geometry import Geometry

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Published sizes: config.json of the Qwen3 checkpoints, and the parameters that their model cards give.
PUBLISHED = {
    "Qwen3-0.6B": ((151936, 1024, 3072, 28, 16, 8, 128, True), 0.596e9),
    "Qwen3-8B": ((151936, 4096, 12288, 36, 32, 8, 128, False), 8.191e9),
    "Qwen3-32B": ((151936, 5120, 25600, 64, 64, 8, 128, False), 32.762e9),
}


def geometry_of(name: str) -> Geometry:
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = PUBLISHED[name][0]
    return Geometry(vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied, 40960)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_real_model(tied: bool) -> None:
    config = Qwen3Config(**SMALL, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(config)
    assert Geometry.from_config(config.to_dict()).parameters == model.num_parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    assert geometry_of(name).parameters == pytest.approx(PUBLISHED[name][1], rel=1e-3)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_adapter_parameters_are_those_that_peft_makes(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = Qwen3Config(**SMALL)
    names = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    made = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lora = Lora(rank=4, targets=targets)
    assert Geometry.from_config(config.to_dict()).adapter_parameters(lora) == made


def test_another_kind_of_model_is_refused_by_name(tmp_path: Any) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    with pytest.raises(DataError, match="model_type 'llama' is not one of qwen3"):
        Geometry.from_folder(tmp_path)


def test_full_training_state_is_16_bytes_a_parameter_and_fsdp_divides_it() -> None:
    geometry = geometry_of("Qwen3-8B")
    whole = state_memory(geometry, Train(), "ddp", 8)
    assert whole.total_bytes == 16 * geometry.parameters
    assert state_memory(geometry, Train(), "fsdp", 8).total_bytes == pytest.approx(whole.total_bytes / 8, rel=1e-9)


def test_lora_state_is_the_frozen_base_and_16_bytes_an_adapter_parameter() -> None:
    geometry, train = geometry_of("Qwen3-8B"), Train(method="lora")
    adapters = geometry.adapter_parameters(train.lora)
    assert adapters == 43_646_976
    assert state_memory(geometry, train, "ddp", 1).total_bytes == 2 * geometry.parameters + 16 * adapters
    assert checkpoint_bytes(geometry, train) == 12 * adapters


@given(
    blocks=st.integers(1, 5000),
    ranks=st.integers(1, 16),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epochs=st.integers(1, 3),
)
def test_steps_use_every_block_of_every_epoch(
    blocks: int, ranks: int, micro: int, accumulation: int, epochs: int
) -> None:
    batch_blocks = ranks * micro * accumulation
    train = Train(global_batch_tokens=batch_blocks * 64, micro_batch_blocks=micro, epochs=epochs)
    plan = plan_batches(train, 64, ranks, blocks, 1, blocks * 64)
    assert plan.accumulation == accumulation
    assert (plan.steps_per_epoch - 1) * batch_blocks + plan.last_step_blocks == blocks
    assert 1 <= plan.last_step_blocks <= batch_blocks
    assert plan.steps == plan.steps_per_epoch * epochs


def test_until_step_shortens_the_run_and_never_lengthens_it() -> None:
    train = Train(global_batch_tokens=640, until_step=3)
    assert plan_batches(train, 64, 1, 100, 1, 6400).steps == 3
    assert plan_batches(train, 64, 1, 11, 1, 704).steps == 2
