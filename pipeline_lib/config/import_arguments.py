"""From the arguments of transformers' Trainer, LLaMA-Factory and DeepSpeed to keys of this project.

The defaults are those of transformers 5 (TrainingArguments) and of LLaMA-Factory (its hparams), as
of August 2026. One that differs from ours is written out, so that the imported config trains alike.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.import_datasets import holds_nothing_out
from pipeline_lib.config.import_draft import LINEAR_NAMES, Draft, shown
from pipeline_lib.config.optimizers import ADAPTERS, DEEPSPEED, DEFAULT, OPTIMIZERS, OptimizerName
from pipeline_lib.config.train import EPOCH, Train

NEVER_CLIPS = 1e9  # a norm that no gradient has
MOST_GPUS = 64  # of one node, by the schema


@dataclass(frozen=True)
class Origin:
    """What kinds of files there are, which decides whose defaults apply."""

    is_llama_factory: bool
    has_arguments: bool  # LLaMA-Factory's or the Trainer's
    has_deepspeed: bool
    folder: Path  # of the first file: paths in it may be relative to this
    hub: str  # that a name without one means

    def default(self, value: Any) -> Any:
        """Return the Trainer's default `value`, or None if no file here has its arguments."""
        return value if self.has_arguments else None


def convert_arguments(draft: Draft, origin: Origin) -> None:
    """Convert all but the data: model, tokens, batch, optimizer, schedule, adapters, placement."""
    _model(draft, origin)
    if origin.is_llama_factory:
        _tokens(draft)
        _thinking(draft)
        _adapters(draft)
    _batch(draft, origin)
    _length(draft, origin)
    _optimizer(draft, origin)
    _schedule(draft, origin)
    _precision(draft, origin)
    _placement(draft)
    _saving(draft)
    _validation(draft)
    _tracking(draft)


def _model(draft: Draft, origin: Origin) -> None:
    name = draft.text("model_name_or_path")
    revision = draft.text("model_revision")
    if name is None:
        return
    places = (Path(name).expanduser(), origin.folder / Path(name).expanduser())
    folder = next((place for place in places if place.is_dir()), None)
    if folder is not None or name.startswith(("/", "~", "./", "../")):
        draft.taken(
            "model_name_or_path", {"model": {"source": "local", "path": str(folder or places[0])}}
        )
        draft.without("model_revision", "a folder has no revisions")
        return
    model = {"source": origin.hub, "name": name}
    if revision in (None, "main"):
        draft.taken("model_revision", why="the main branch, as here")
    else:
        model["revision"] = revision
    draft.taken("model_name_or_path model_revision", {"model": model})
    other = "modelscope" if origin.hub == "huggingface" else "huggingface"
    draft.comments["model"] = (
        f"no such folder is here, so it is a hub's name; for the other hub write source: {other}"
    )


def _tokens(draft: Draft) -> None:
    stage = draft.text("stage", "sft")
    if stage not in ("sft", "pt"):
        text = (
            "preference and reward training do not exist here, only sft (conversations) and pt "
            "(raw text)"
        )
        draft.problems.append(f"stage: {stage}: {text}; take a file of one of these stages")
    draft.taken("stage", why="conversations or texts: the rows of the data decide")
    limit = draft.whole("cutoff_len", 2048) or 2048
    values: dict[str, Any] = {"tokenize.max_tokens": limit, "shard.block_tokens": limit}
    if stage == "pt" and draft.truth("packing", True):
        values["tokenize.over_long"] = "split"
        why = (
            "texts are joined and cut into pieces of this length there; here a longer text is "
            "cut into such pieces"
        )
    elif _is_packed(draft):
        why = "with packing, longer samples are dropped there, and here too"
    else:
        values["tokenize.over_long"] = "truncate"
        why = (
            "longer samples are truncated there, so over_long is truncate, not our default drop. "
            "There the question may be shortened, too; here the end is lost, and a sample whose "
            "question alone fills it is dropped. More than tokenize.max_dropped_fraction (5%) cut "
            "or dropped stops the stage"
        )
    draft.changed("cutoff_len", values, why)
    if draft.truth("mask_history"):
        draft.taken("mask_history", {"tokenize.train_on": "last_assistant"})
    else:
        draft.taken("mask_history", why="every answer of a conversation is trained on, as here")
    if draft.truth("train_on_prompt"):
        draft.without(
            "train_on_prompt", "questions are never trained on here, only the assistant's answers"
        )
    if system := draft.text("default_system"):
        draft.taken("default_system", {"tokenize.system": system})
    if draft.truth("streaming"):
        draft.without(
            "streaming",
            "data are tokenized once, before the training, and read from memory-mapped files",
        )


def _is_packed(draft: Draft) -> bool:
    by_default = draft.text("stage", "sft") == "pt"
    return draft.truth("packing", by_default) or draft.truth("neat_packing")


# templates whose default prompt opens a thinking block
_OPENS_THINKING = ("qwen3_5", "qwen3_6", "qwen3_8")


def _thinking(draft: Draft) -> None:
    template = draft.text("template")
    own = "the model's own chat template is used"
    thinks = (
        template is not None and template.startswith("qwen3") and not template.endswith("_nothink")
    )
    if not thinks:
        if template and template.startswith("qwen3"):
            own += (
                "; that of a hybrid Qwen3 writes an empty thinking block before an answer without "
                "thinking,"
                f" which {template} leaves out; of an Instruct-2507 model both are the same"
            )
        draft.changed("template", None, own)
        draft.taken("enable_thinking", why="without effect under this template there")
        return
    draft.taken("template", why=own)
    given = [one.value for one in draft.given.get("enable_thinking", [])]
    if given == [None]:
        draft.taken(
            "enable_thinking",
            why="answers with thinking train it, others the mode without, as here",
        )
    elif (
        draft.truth("enable_thinking", True)
        and template is not None
        and template.startswith(_OPENS_THINKING)
    ):
        why = (
            "the prompt of this template opens a thinking block; answers without thinking train "
            "the mode without"
        )
        draft.changed("enable_thinking", None, why)
    elif draft.truth("enable_thinking", True):
        why = (
            "with enable_thinking, true by default, an answer without thinking learns to write "
            "the empty block itself"
        )
        draft.taken("enable_thinking", {"tokenize.prompt_thinking": "on"}, why)
    else:
        draft.taken(
            "enable_thinking",
            {"tokenize.thinking": "strip"},
            "thinking is removed from the answers",
        )


def _adapters(draft: Draft) -> None:
    kind = draft.text("finetuning_type", "lora")
    keys = "lora_rank lora_alpha lora_dropout lora_target use_rslora use_dora loraplus_lr_ratio"
    if kind not in ("lora", "full", "freeze"):
        draft.problems.append(
            f"finetuning_type: {kind} does not exist here; it may be lora, full or freeze"
        )
    if kind == "freeze":
        why = (
            "all weights would be trained: list those that stay as they are in train.freeze, by "
            "glob"
        )
        draft.without(
            "finetuning_type freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
            why,
        )
    if kind != "lora":
        draft.taken("finetuning_type", {"train.method": "full"})
        draft.taken(keys, why="without effect there, too: no adapters are trained")
        return
    draft.taken("finetuning_type", {"train.method": "lora"})
    rank = draft.whole("lora_rank", 8) or 8
    draft.same("lora_rank", "train.lora.rank", 8)
    if draft.value("lora_alpha", 0):
        draft.same("lora_alpha", "train.lora.alpha")
    else:
        why = "lora_alpha follows 2 x lora_rank there, and not here, so it is written out"
        draft.changed("lora_alpha", {"train.lora.alpha": 2 * rank}, why)
    draft.same("lora_dropout", "train.lora.dropout", 0.0)
    _targets(draft)
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if draft.has(theirs):
            draft.taken(theirs, {f"train.lora.{ours}": draft.truth(theirs)})
    if draft.has("loraplus_lr_ratio"):
        draft.same("loraplus_lr_ratio", "train.lora.lr_ratio")


def _targets(draft: Draft) -> None:
    names = draft.words("lora_target") or ["all"]
    if names == ["all"]:
        draft.taken("lora_target", {"train.lora.targets": "all-linear"})
        return
    known = [name for name in names if name in LINEAR_NAMES]
    if unknown := [name for name in names if name not in LINEAR_NAMES]:
        may = f"they may be all, or {', '.join(LINEAR_NAMES)}"
        draft.problems.append(
            f"lora_target: {', '.join(unknown)}: not linear modules of a Qwen3 layer; {may}"
        )
    draft.taken("lora_target", {"train.lora.targets": known})


_BATCH = (
    "per_device_train_batch_size gradient_accumulation_steps train_batch_size ray_num_workers "
    "packing neat_packing"
)


def _batch(draft: Draft, origin: Origin) -> None:
    """Convert the batch: micro-batch x accumulation x GPUs, or the total in DeepSpeed's JSON."""
    micro = draft.whole("per_device_train_batch_size", origin.default(8))
    accumulation = draft.whole(
        "gradient_accumulation_steps", origin.default(1) or (1 if micro else None)
    )
    total = draft.whole("train_batch_size")
    gpus = draft.whole("ray_num_workers")
    if any(number is not None and number < 1 for number in (micro, accumulation, total, gpus)):
        draft.problems.append("the batch: its numbers have to be at least 1")
        return
    if draft.truth("use_cpu") or draft.truth("no_cuda"):
        draft.taken("use_cpu no_cuda", {"cluster.gpus_per_node": 0})
    if micro is None or accumulation is None:
        _batch_of_total(draft, total)
        return
    said = f"{micro} a GPU x {accumulation} accumulated x "
    is_exact = draft.has("per_device_train_batch_size") and (
        draft.has("gradient_accumulation_steps") or total is None
    )
    if gpus is None and total is not None and is_exact:
        gpus, rest = divmod(total, micro * accumulation)
        if rest or not gpus:
            text = (
                f"train_batch_size {total} is not {micro} x {accumulation} x a whole number of GPUs"
            )
            draft.problems.append(f"{text}; DeepSpeed refuses it, too")
            return
    known = gpus if gpus is not None and gpus <= MOST_GPUS else None
    samples = total if total is not None else micro * accumulation * (known or 1)
    if known:
        said += f"{known} GPUs" if known > 1 else "1 GPU"
    else:
        said += (
            "1 GPU, since the files do not say how many there are. With N, set "
            "cluster.gpus_per_node: N"
            f"{'' if total else ' and N times this batch'}"
        )
    values: dict[str, Any] = {"train.global_batch_samples": samples}
    if _is_packed(draft) and origin.is_llama_factory:
        block = draft.values["shard.block_tokens"]
        values = {"train.global_batch_tokens": samples * block}
        said += f"; with packing, a sample there is a packed sequence of cutoff_len {block} tokens"
    else:
        draft.taken(
            "packing neat_packing",
            why="off there, so a batch counts samples; none sees another here",
        )
    if not draft.values.get("cluster.gpus_per_node", 1):
        known = None
        said = f"{micro} x {accumulation} accumulated, on the CPU"
    else:
        values["cluster.gpus_per_node"] = known or 1
    draft.changed(_BATCH, values, f"samples of an optimizer step over all ranks: {said}")


def _batch_of_total(draft: Draft, total: int | None) -> None:
    """Convert the batch of a DeepSpeed JSON whose micro-batch is not given."""
    values = {"cluster.gpus_per_node": draft.values.get("cluster.gpus_per_node", 1)}
    if total is not None:
        why = (
            "samples of an optimizer step over all GPUs; no file says how many GPUs there are, so 1"
        )
        draft.changed(_BATCH, {"train.global_batch_samples": total, **values}, why)
        return
    why = "the Trainer's arguments decide, and no file has them: give them as another FILE, or set"
    draft.changed(_BATCH, values, f"{why} train.global_batch_samples and cluster.gpus_per_node")


def _length(draft: Draft, origin: Origin) -> None:
    steps = draft.whole("max_steps", origin.default(-1))
    if steps is not None and steps > 0:
        draft.taken("max_steps", {"train.max_steps": steps}, "the schedule ends there")
        draft.taken("num_train_epochs", why="without effect there, too: max_steps decides")
    else:
        draft.same("num_train_epochs", "train.epochs", origin.default(3.0))
        draft.taken("max_steps", why="none: the epochs decide")
    end = draft.whole("total_num_steps")
    if end is not None and not origin.has_arguments:
        draft.changed(
            "total_num_steps", {"train.max_steps": end}, "the training ends where the schedule does"
        )
    draft.changed(
        "total_num_steps",
        None,
        "the schedule ends with the training here, as it does under the Trainer",
    )
    if draft.has("seed"):
        draft.changed(
            "seed",
            {"train.seed": draft.whole("seed")},
            "another order than there: the generators differ",
        )


def _optimizer(draft: Draft, origin: Origin) -> None:
    for theirs, ours, there in (
        ("learning_rate", "train.lr", 5e-5),
        ("weight_decay", "train.weight_decay", 0.0),
        ("adam_beta1", "train.beta1", 0.9),
        ("adam_beta2", "train.beta2", 0.999),
        ("adam_epsilon", "train.adam_eps", 1e-8),
    ):
        draft.same(theirs, ours, origin.default(there))
    if draft.number("max_grad_norm", 1.0):
        draft.same("max_grad_norm", "train.max_grad_norm", origin.default(1.0))
    else:
        why = "0 does not clip there; no gradient reaches this norm"
        draft.changed("max_grad_norm", {"train.max_grad_norm": NEVER_CLIPS}, why)
    _optimizer_by_name(draft)


def _optimizer_by_name(draft: Draft) -> None:
    key, ours = _key_and_optimizer(draft)
    if key == "deepspeed_optimizer":
        draft.taken("optim", why="without effect there, too: the DeepSpeed JSON names an optimizer")
    elif key != "optim":
        draft.taken("optim", why=f"without effect there, too: {key} names the optimizer")
    if ours is None:
        draft.without(key, f"the optimizers here are {', '.join(OPTIMIZERS)}; {DEFAULT} is taken")
        return
    row = OPTIMIZERS[ours]
    is_used = {
        DEEPSPEED: str(draft.value("zero_stage", 0)) in ("1", "2", "3"),
        ADAPTERS: draft.values.get("train.method") == "lora",
    }
    for refused, why in row.refuses.items():
        if is_used.get(refused, False):
            text = f"{ours} does not work with {refused} here: {why}"
            draft.changed(key, {"train.optimizer": DEFAULT}, text)
            return
    needs = f"needs the extra `{row.extra.name}`" if row.extra else ""
    draft.taken(key, {"train.optimizer": ours}, needs)


def _key_and_optimizer(draft: Draft) -> tuple[str, OptimizerName | None]:
    """Return the key that decides on the optimizer, and what that is here; None if it is not."""
    key = "deepspeed_optimizer" if draft.has("deepspeed_optimizer") else "optim"
    theirs = (draft.text(key, "adamw_torch") or "").lower()
    for ours, row in OPTIMIZERS.items():
        switched_on = [switch for switch in row.switches if draft.truth(switch)]
        if switched_on and key == "optim":
            return switched_on[0], ours
    for ours, row in OPTIMIZERS.items():
        if theirs in row.known_as:
            return key, ours
    return key, None


_LINEAR = ("linear", "warmupdecaylr")
_CONSTANT = ("constant", "constant_with_warmup", "warmuplr")
_COSINE = ("cosine", "cosine_with_min_lr", "warmupcosinelr")


def _schedule(draft: Draft, origin: Origin) -> None:
    key = "deepspeed_scheduler" if draft.has("deepspeed_scheduler") else "lr_scheduler_type"
    if key != "lr_scheduler_type":
        draft.taken(
            "lr_scheduler_type",
            why="without effect there, too: the DeepSpeed JSON names a schedule",
        )
    name = draft.text(key, origin.default("linear"))
    if name is None:
        return
    kind = name.lower()
    last = draft.value("lr_scheduler_kwargs", {})
    options = last if isinstance(last, dict) else {}
    known = {**dict.fromkeys(_LINEAR, "linear"), **dict.fromkeys(_CONSTANT, "constant")}
    known |= dict.fromkeys(_COSINE, "cosine")
    ours = known.get(kind)
    if ours is None and kind == "warmup_stable_decay":
        why = (
            "decays linearly here over the last train.decay_fraction of the steps; there over "
            "num_decay_steps"
        )
        draft.changed(f"{key} lr_scheduler_kwargs", {"train.lr_schedule": "wsd"}, why)
    elif ours is None:
        why = (
            "this schedule does not exist here; cosine, linear, constant and wsd do, and cosine "
            "is taken"
        )
        draft.changed(key, {"train.lr_schedule": "cosine"}, why)
    else:
        draft.taken(key, {"train.lr_schedule": ours})
    peak = draft.number("learning_rate", 5e-5) or 5e-5
    least = options.get("min_lr_rate", draft.value("cos_min_ratio"))
    if least is None and isinstance(options.get("min_lr"), int | float):
        least = options["min_lr"] / peak
    if ours == "cosine" and isinstance(least, int | float) and least:
        values = {"train.min_lr_fraction": float(f"{least:.6g}")}
        draft.taken("lr_scheduler_kwargs cos_min_ratio", values, "a fraction of the peak")
    _warmup(draft, origin, is_used=kind != "constant")


def _warmup(draft: Draft, origin: Origin, *, is_used: bool) -> None:
    steps = draft.number("warmup_steps", 0)
    ratio = draft.number("warmup_ratio", 0)
    keys = "warmup_steps warmup_ratio"
    if not is_used:
        draft.taken(
            keys, {"train.warmup_fraction": 0}, "the constant schedule has no warm-up there"
        )
    elif steps is not None and steps >= 1:
        draft.taken("warmup_steps", {"train.warmup_steps": int(steps)})
        draft.taken("warmup_ratio", why="without effect there, too: warmup_steps decides")
    elif steps or ratio:
        draft.taken(keys, {"train.warmup_fraction": steps or ratio})
    elif origin.has_arguments or any(draft.has(key) for key in keys.split()):
        draft.taken(keys, {"train.warmup_fraction": 0})
    if draft.text("warmup_type", "linear") != "linear":
        why = "the warm-up rises linearly here, there with the logarithm of the step"
        draft.changed("warmup_type", {"train.warmup_steps": int(steps)} if steps else None, why)
    draft.taken("warmup_type", why="linear, as here")
    if draft.number("warmup_min_lr"):
        draft.changed("warmup_min_lr", None, "the warm-up begins at 0 here")
    draft.taken("warmup_min_lr", why="the warm-up begins at 0, as here")


def _precision(draft: Draft, origin: Origin) -> None:
    keys = "bf16 fp16 fp8 pure_bf16"
    chosen = [key for key in ("fp8", "bf16", "pure_bf16", "fp16") if draft.truth(key)]
    if {"bf16", "fp16"} <= set(chosen):
        draft.problems.append("bf16 and fp16: both are true; keep one of them")
    values = {"train.precision": "bf16"}
    is_full = draft.values.get("train.method", "full") == "full"
    if "fp8" in chosen and (not is_full or draft.has("zero_stage")):
        draft.changed(keys, values, "fp8 is for full fine-tuning without DeepSpeed here")
    elif "fp8" in chosen:
        draft.taken(keys, {"train.precision": "fp8"}, "needs the extra `fp8`")
    elif "pure_bf16" in chosen:
        draft.changed(keys, values, "the trained weights are kept in fp32 here, there in bf16")
    elif chosen:
        draft.taken(keys, {"train.precision": chosen[0]})
    elif origin.has_deepspeed and not origin.has_arguments:
        if any(one.value == "auto" for key in ("bf16", "fp16") for one in draft.given.get(key, [])):
            why = "the Trainer's arguments decide, and no file has them; bf16 is our default"
            draft.changed(keys, values, why)
        else:
            draft.changed(
                keys,
                {"train.precision": "fp32"},
                "neither bf16 nor fp16 is enabled, so it is fp32 there",
            )
    else:
        why = (
            "neither bf16 nor fp16 there: the arithmetic is in the type of the model's weights, "
            "bf16 for Qwen3"
        )
        draft.changed(keys, values, why)


def _placement(draft: Draft) -> None:
    """Convert what decides where the model lies and how fast it is, not what is computed."""
    stage = draft.value("zero_stage")
    optimizer, params = (
        draft.value(f"offload_{part}.device", "none") for part in ("optimizer", "param")
    )
    if stage is not None:
        _zero(draft, stage, optimizer not in (None, "none"), params not in (None, "none"))
    elif draft.value("fsdp"):
        words = str(draft.value("fsdp")).lower()
        values = {"train.strategy": "fsdp"}
        if "offload" in words:
            values["train.offload"] = "optimizer+params"
        why = (
            "hybrid sharding needs several replicas: see hsdp and train.shard_ranks"
            if "hybrid" in words
            else ""
        )
        draft.changed("fsdp", values, why) if why else draft.taken("fsdp", values)
    else:
        draft.taken("fsdp", why="replicated on each GPU (ddp), as here by default")
    how = "auto takes what is fastest and fits the memory; the result does not depend on it"
    keys = (
        "gradient_checkpointing gradient_checkpointing_kwargs disable_gradient_checkpointing "
        "use_reentrant_gc"
    )
    draft.changed(
        f"{keys} activation_checkpointing", None, f"train.activation_checkpointing: {how}"
    )
    draft.changed(
        "torch_compile torch_compile_mode torch_compile_backend", None, f"train.compile: {how}"
    )
    draft.changed(
        "flash_attn attn_implementation",
        None,
        "train.attention: auto takes the fastest kernel there is",
    )
    limit = Train.model_fields["timeout_s"].default
    draft.changed(
        "ddp_timeout",
        None,
        f"train.timeout_s stays {limit} s: data are tokenized before the ranks start",
    )


def _zero(draft: Draft, stage: Any, has_optimizer: bool, has_params: bool) -> None:
    if stage not in (0, 1, 2, 3):
        draft.problems.append(f"zero_optimization.stage: {shown(stage)} is not 0, 1, 2 or 3")
        return
    draft.taken("zero_stage", {"train.strategy": f"zero{stage}" if stage else "ddp"})
    keys = "offload_optimizer.device offload_param.device"
    if has_params and stage == 3:
        draft.taken(keys, {"train.offload": "optimizer+params"}, "into host memory")
    elif has_optimizer and stage:
        draft.taken(keys, {"train.offload": "optimizer"}, "into host memory")
    elif has_optimizer or has_params:
        draft.without(keys, f"stage {stage} does not offload this")
    else:
        draft.taken(keys, why="nothing is offloaded, as here")


def _saving(draft: Draft) -> None:
    steps = draft.number("save_steps")
    strategy = str(draft.value("save_strategy", "steps")).lower()
    if strategy == EPOCH:
        draft.taken("save_strategy save_steps", {"train.save_every_steps": EPOCH})
    elif strategy != "steps":
        why = (
            "here a training is saved as often as hardly costs time; the last step is always saved"
        )
        draft.changed("save_strategy save_steps", None, why)
    elif steps is not None and steps >= 1:
        draft.taken("save_steps save_strategy", {"train.save_every_steps": int(steps)})
    elif steps is not None:
        why = "a number of steps here, train.save_every_steps, or `auto`, our default"
        draft.changed("save_steps save_strategy", None, why)
    if draft.has("save_total_limit"):
        draft.same("save_total_limit", "train.keep_last")


def _validation(draft: Draft) -> None:
    strategy = str(draft.value("eval_strategy", draft.value("evaluation_strategy", "no"))).lower()
    keys = "eval_strategy evaluation_strategy eval_steps"
    steps = draft.number("eval_steps", draft.number("logging_steps", 500))
    is_on = strategy == EPOCH or (strategy == "steps" and steps is not None and steps >= 1)
    if is_on and holds_nothing_out(draft):
        draft.changed(
            keys,
            None,
            "neither val_size nor eval_dataset holds data out, so there is nothing to validate on",
        )
        return
    if is_on:
        draft.taken(
            keys, {"train.validate_every_steps": EPOCH if strategy == EPOCH else int(steps or 1)}
        )
    elif strategy in ("no", "false"):
        draft.taken(keys, why="the held-out loss is taken at the end only, as here by default")
    else:
        why = (
            "a number of steps or `epoch` here: set train.validate_every_steps; now only the end "
            "is validated"
        )
        draft.changed(keys, None, why)
    if is_on and draft.truth("load_best_model_at_end"):
        draft.taken("load_best_model_at_end", {"train.keep_best": True})
    if is_on and draft.has("early_stopping_steps"):
        draft.same("early_stopping_steps", "train.early_stop_validations")
    if draft.value("metric_for_best_model", "loss") in ("loss", "eval_loss"):
        draft.taken("metric_for_best_model greater_is_better", why="the held-out loss, as here")


_TRACKERS = ("tensorboard", "swanlab", "wandb", "mlflow")


def _tracking(draft: Draft) -> None:
    wanted = [word.lower() for word in draft.words("report_to")]
    if draft.truth("use_swanlab"):
        wanted.append("swanlab")
    chosen = [name for name in _TRACKERS if name in wanted or "all" in wanted]
    keys = "report_to use_swanlab"
    if others := [name for name in wanted if name not in (*_TRACKERS, "none", "all")]:
        draft.changed(keys, {"tracking.to": chosen}, f"no tracker here: {', '.join(others)}")
    elif chosen:
        draft.taken(keys, {"tracking.to": chosen}, "each needs the extra of its name")
    else:
        draft.taken(keys, why="no tracker, as here by default")
    draft.taken("plot_loss", why="the report draws the loss")
    projects = [key for key in ("project", "swanlab_project") if draft.has(key)]
    if chosen and projects:
        draft.taken(" ".join(projects), {"tracking.project": draft.text(projects[-1])})
    draft.without(
        "project swanlab_project", "no tracker is fed, and nothing else needs the project's name"
    )
