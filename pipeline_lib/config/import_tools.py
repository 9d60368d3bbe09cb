"""The tools whose configs are imported: what tells their files, their names and their defaults.

The names and defaults are those of Axolotl 0.19, ms-swift 4.6, TRL 1.16, accelerate 1.15,
transformers 5 and LLaMA-Factory, as of November 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA_FACTORY = "LLaMA-Factory"
AXOLOTL = "Axolotl"
SWIFT = "ms-swift"
TRL = "TRL"
ARGUMENTS = "TrainingArguments"
DEEPSPEED = "DeepSpeed"
ACCELERATE = "accelerate"
ADAPTER = "peft's config of an adapter"

# The tools whose files hold a whole training: a model, data and arguments.
OF_TRAININGS = (LLAMA_FACTORY, AXOLOTL, SWIFT, TRL)
# The same, or the arguments alone.
WITH_ARGUMENTS = (*OF_TRAININGS, ARGUMENTS)

# Keys that tell a tool's file. The tool of most of them is it; of several, the first one here.
_TELLING = {
    LLAMA_FACTORY: (
        "model_name_or_path finetuning_type stage cutoff_len template dataset dataset_dir "
        "lora_target val_size overwrite_cache plot_loss preprocessing_num_workers"
    ),
    AXOLOTL: (
        "base_model sequence_len micro_batch_size sample_packing val_set_size adapter datasets "
        "num_epochs lora_target_linear dataset_prepared_path rl"
    ),
    SWIFT: (
        "model train_type tuner_type dataset val_dataset split_dataset_ratio truncation_strategy "
        "agent_template torch_dtype attn_impl loss_scale rlhf_type target_modules quant_method"
    ),
    TRL: (
        "model_name_or_path dataset_name dataset_config dataset_train_split use_peft lora_r "
        "lora_target_modules dataset_text_field assistant_only_loss completion_only_loss "
        "max_length packing_strategy attn_implementation dtype"
    ),
    ACCELERATE: (
        "compute_environment distributed_type num_machines machine_rank num_processes "
        "main_training_function downcast_bf16 mixed_precision"
    ),
    ADAPTER: "peft_type base_model_name_or_path target_modules inference_mode",
}
TELLING = {tool: tuple(words.split()) for tool, words in _TELLING.items()}
_TELLING_ARGUMENTS = (
    "output_dir per_device_train_batch_size gradient_accumulation_steps learning_rate "
    "num_train_epochs max_steps lr_scheduler_type warmup_steps warmup_ratio weight_decay "
    "logging_steps save_steps adam_beta1 adam_beta2 adam_epsilon max_grad_norm save_strategy "
    "eval_strategy optim seed"
)
TELLING_ARGUMENTS = tuple(_TELLING_ARGUMENTS.split())

# A tool's key, and the common name of it: that of TrainingArguments or of LLaMA-Factory.
NAMES: Mapping[str, Mapping[str, str]] = {
    AXOLOTL: {
        "base_model": "model_name_or_path",
        "revision_of_model": "model_revision",
        "sequence_len": "cutoff_len",
        "excess_length_strategy": "truncation_strategy",
        "sample_packing": "packing",
        "micro_batch_size": "per_device_train_batch_size",
        "num_epochs": "num_train_epochs",
        "adapter": "finetuning_type",
        "lora_r": "lora_rank",
        "lora_target_modules": "lora_target",
        "peft_use_dora": "use_dora",
        "peft_use_rslora": "use_rslora",
        "optimizer": "optim",
        "lr_scheduler": "lr_scheduler_type",
        "cosine_min_lr_ratio": "cos_min_ratio",
        "val_set_size": "val_size",
        "test_datasets": "eval_dataset",
        "train_on_inputs": "train_on_prompt",
        "default_system_message": "default_system",
        "early_stopping_patience": "early_stopping_steps",
        "mlflow_run_name": "run_name",
        "wandb_name": "run_name",
        "mlflow_experiment_name": "project",
        "wandb_project": "project",
        "bfloat16": "bf16",
        "bf16": "bf16",
        "float16": "fp16",
        "fp16": "fp16",
    },
    SWIFT: {
        "model": "model_name_or_path",
        "train_type": "finetuning_type",
        "tuner_type": "finetuning_type",
        "max_length": "cutoff_len",
        "target_modules": "lora_target",
        "lorap_lr_ratio": "loraplus_lr_ratio",
        "split_dataset_ratio": "val_size",
        "val_dataset": "eval_dataset",
        "eval_dataset": "benchmarks",
        "system": "default_system",
        "quant_bits": "quantization_bit",
        "swanlab_exp_name": "swanlab_run_name",
        "early_stop_interval": "early_stopping_steps",
    },
    TRL: {
        "max_seq_length": "cutoff_len",
        "max_length": "cutoff_len",
        "truncation_mode": "truncation_strategy",
        "dtype": "torch_dtype",
        "lora_r": "lora_rank",
        "lora_target_modules": "lora_target",
        "test_split_size": "val_size",
    },
    ACCELERATE: {
        "offload_optimizer_device": "offload_optimizer.device",
        "offload_param_device": "offload_param.device",
        "gradient_clipping": "max_grad_norm",
        "deepspeed_config_file": "deepspeed",
    },
}

# By common name, what a tool takes if no file says it; a key without an entry has no effect then.
_TRAINER = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "eval_strategy": "no",
}
DEFAULTS_THERE: Mapping[str, Mapping[str, Any]] = {
    ARGUMENTS: _TRAINER,
    LLAMA_FACTORY: _TRAINER
    | {"cutoff_len": 2048, "finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.0},
    AXOLOTL: _TRAINER
    | {
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "bf16": True,
        "save_strategy": "epoch",
        "cutoff_len": 512,
        "truncation_strategy": "drop",
        "finetuning_type": "full",
        "lora_dropout": 0.0,
    },
    SWIFT: _TRAINER
    | {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": None,  # by the number of GPUs
        "learning_rate": 1e-4,  # 1e-5 without adapters
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "cosine",
        "eval_strategy": None,  # as save_strategy
        "bf16": True,
        "truncation_strategy": "delete",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
    },
    TRL: _TRAINER
    | {
        "learning_rate": 2e-5,
        "bf16": True,
        "cutoff_len": 1024,
        "truncation_strategy": "keep_start",
        "finetuning_type": "full",
        "lora_rank": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target": ["q_proj", "v_proj"],  # peft's, for Qwen3
    },
}

# Keys that only configs of preference or reward training hold, if they have a value.
_PREFERENCES = (
    "rl rlhf_type reward_model process_reward_model reward_funcs num_generations precompute_ref_log_probs beta "
    "rl_beta dpo_beta desirable_weight max_prompt_length max_completion_length "
    "center_rewards_coefficient reward_model_path"
)
PREFERENCES = tuple(_PREFERENCES.split())
NO_PREFERENCES = (
    "preference and reward training do not exist here; take a config that trains on examples to "
    "follow (sft)"
)


@dataclass(frozen=True)
class Origin:
    """What kinds of files there are, which decides whose defaults apply."""

    tool: str | None  # one of WITH_ARGUMENTS, or None if no file has arguments
    has_deepspeed: bool
    folder: Path  # of the first file: paths in it may be relative to this
    hub: str  # that a name without one means

    @property
    def has_arguments(self) -> bool:
        """Return whether a file has the arguments of a training."""
        return self.tool is not None

    @property
    def is_of_training(self) -> bool:
        """Return whether the files are a tool's, with a model and data."""
        return self.tool in OF_TRAININGS

    def default(self, key: str) -> Any:
        """Return what the tool takes for `key`, a common name; None if it has no default."""
        return DEFAULTS_THERE[self.tool].get(key) if self.tool is not None else None
