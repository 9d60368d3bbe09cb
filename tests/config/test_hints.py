"""Keys of other tools lead to a key that exists here, or to the reason why there is none."""

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from pipeline_lib.config.load import load_config
from pipeline_lib.config.other_tools import HINTS, hint_for
from pipeline_lib.config.schema import Config, HubModel
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import ConfigError

# Keys that these tools document, beside those of TrainingArguments and LoraConfig, which all of
# them take.
KEYS_OF = {
    "LLaMA-Factory": (
        "model_name_or_path stage finetuning_type lora_target lora_rank template dataset "
        "dataset_dir cutoff_len max_samples mask_history train_on_prompt overwrite_cache "
        "preprocessing_num_workers val_size mix_strategy interleave_probs neat_packing "
        "quantization_bit flash_attn enable_thinking default_system plot_loss "
        "freeze_trainable_layers loraplus_lr_ratio use_galore adapter_name_or_path export_dir "
        "rope_scaling do_predict"
    ),
    "ms-swift": (
        "model_type train_type tuner_type split_dataset_ratio max_length truncation_strategy "
        "loss_scale attn_impl torch_dtype quant_bits padding_free sequence_parallel_size "
        "init_weights lora_bias use_hf system"
    ),
    "Axolotl": (
        "base_model adapter load_in_4bit load_in_8bit sequence_len sample_packing "
        "micro_batch_size val_set_size lora_r lora_modules_to_save lora_target_linear "
        "special_tokens train_on_inputs saves_per_epoch evals_per_epoch dataset_prepared_path "
        "sample_packing_bin_size wandb_project flash_attention datasets num_epochs "
        "unfrozen_parameters"
    ),
    "TRL": (
        "dataset_text_field packing packing_strategy assistant_only_loss completion_only_loss "
        "chat_template_path eos_token activation_offloading dataset_num_proc model_init_kwargs "
        "use_peft lora_task_type"
    ),
    "DeepSpeed and the launchers": (
        "zero_optimization offload_optimizer train_micro_batch_size_per_gpu gradient_clipping "
        "num_gpus hostfile nproc_per_node master_addr tensor_parallel eps device_map "
        "fp16_opt_level pipeline_parallel T_max use_orig_params"
    ),
}


def keys_of(section: str) -> set[str]:
    sections = {"train": Train, "train.lora": Lora, "model": HubModel}
    model: Any = (
        sections.get(section) or Config.model_fields[section].annotation if section else Config
    )
    return {field.validation_alias or key for key, field in model.model_fields.items()}


OURS = set().union(
    *map(keys_of, ("", "model", "tokenize", "shard", "cluster", "train", "train.lora", "tracking"))
)


@pytest.mark.parametrize(
    "hint", sorted({hint for hint in HINTS.values() if hint.startswith("here it is ")})
)
def test_a_hint_names_a_key_that_exists(hint: str) -> None:
    section, _, name = hint.removeprefix("here it is ").partition(",")[0].rpartition(".")
    assert name in keys_of(section)


@pytest.mark.parametrize("arguments", [transformers.TrainingArguments, peft.LoraConfig])
def test_every_argument_of_the_libraries_is_a_key_or_has_a_hint(arguments: Any) -> None:
    names = {field.name for field in dataclasses.fields(arguments)}
    assert len(names) > 20
    assert not {name for name in names if name not in OURS and hint_for(name) is None}


@pytest.mark.parametrize("tool", KEYS_OF)
def test_every_documented_key_of_another_tool_is_a_key_or_has_a_hint(tool: str) -> None:
    assert not {key for key in KEYS_OF[tool].split() if key not in OURS and hint_for(key) is None}


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("logging_steps", "10", "leave it out: every optimizer step is recorded"),
        ("num_gpus", "4", "here it is cluster.gpus_per_node"),
        ("Learning-Rate", "1e-4", "here it is train.lr"),
        ("gradient_checkpointing", "true", "here it is train.activation_checkpointing"),
        ("dtype", "bf16", "here it is train.precision"),
        ("context_parallel_size", "2", "here it is train.context_ranks"),
        (
            "quantization_bit",
            "4",
            "leave it out: for a base in 4 bits (QLoRA) set train.lora.base: nf4",
        ),
        ("max_tokens", "64", "here it is tokenize.max_tokens"),
        ("lr_schedul", "cosine", "did you mean 'lr_schedule'"),
    ],
)
def test_the_message_of_an_unknown_key_ends_with_the_hint(
    tmp_path: Path, key: str, value: str, hint: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        f"experiment: my\nmodel: {{source: tiny}}\ndata: {{train: [{{source: pydoc}}]}}\ntrain:\n  "
        f"{key}: {value}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"line 5: train.{key}: unknown key; {hint}")


@pytest.mark.parametrize("word", ["strategie", "foo", ""])
def test_a_word_that_nobody_uses_has_no_hint(word: str) -> None:
    assert hint_for(word) is None
