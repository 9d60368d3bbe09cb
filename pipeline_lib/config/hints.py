"""What to say of a key that is not known where it stands: it belongs elsewhere, or is another tool's word for one."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from pipeline_lib.config.schema import ConfigFile

# Words of Hugging Face's Trainer and peft, LLaMA-Factory, ms-swift and Axolotl, and the keys that do as much here,
# with what is different about them.
OTHERS_WORDS = {
    "model_name_or_path": "model.name",
    "base_model": "model.name",
    "dataset": "data.train",
    "datasets": "data.train",
    "val_size": "data.validation_fraction",
    "val_set_size": "data.validation_fraction",
    "cutoff_len": "tokenize.max_tokens",
    "max_length": "tokenize.max_tokens",
    "max_seq_length": "tokenize.max_tokens",
    "sequence_len": "shard.block_tokens",
    "packing_length": "shard.block_tokens",
    "finetuning_type": "train.method",
    "train_type": "train.method",
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.until_step, which leaves the learning rate's course as it is",
    "per_device_train_batch_size": "train.micro_batch_blocks, in blocks",
    "micro_batch_size": "train.micro_batch_blocks, in blocks",
    "gradient_accumulation_steps": "train.global_batch_tokens, in tokens",
    "global_batch_size": "train.global_batch_tokens, in tokens",
    "lr_scheduler_type": "train.lr_schedule",
    "lr_scheduler": "train.lr_schedule",
    "warmup_ratio": "train.warmup_fraction",
    "optim": "train.optimizer",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "fp8": "train.precision",
    "gradient_checkpointing": "train.recompute",
    "torch_compile": "train.compile",
    "attn_implementation": "train.attention",
    "attn_impl": "train.attention",
    "flash_attn": "train.attention",
    "flash_attention": "train.attention",
    "deepspeed": "train.strategy",
    "fsdp": "train.strategy",
    "fsdp_config": "train.strategy",
    "save_steps": "train.save_every_steps",
    "save_total_limit": "train.keep_last",
    "load_best_model_at_end": "train.keep_best",
    "early_stopping_patience": "train.early_stop_validations",
    "eval_steps": "train.validate_every_steps",
    "router_aux_loss_coef": "train.router_aux_loss",
    "aux_loss_coef": "train.router_aux_loss",
    "lora_rank": "train.lora.rank",
    "lora_r": "train.lora.rank",
    "r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "lora_target": "train.lora.targets",
    "target_modules": "train.lora.targets",
    "lora_target_modules": "train.lora.targets",
    "use_dora": "train.lora.dora",
    "use_rslora": "train.lora.rslora",
    "loraplus_lr_ratio": "train.lora.lr_ratio",
    "report_to": "tracking.to",
}


def belongs_to(word: str) -> list[str]:
    """The key that does what other tools call `word`, as `train.lora.rank`; else those called so in other sections."""
    if hint := OTHERS_WORDS.get(word.lower().replace("-", "_")):
        return [hint]
    return [key for key in _keys(ConfigFile) if key.rpartition(".")[2] == word]


def _keys(section: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key of `section` and of those within it; not of what may be one of several kinds, as a model is."""
    for name, field in section.model_fields.items():
        yield above + name
        kinds: list[Any] = [one for one in (field.annotation, *get_args(field.annotation)) if _is_section(one)]
        if len(kinds) == 1:
            yield from _keys(kinds[0], f"{above}{name}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
