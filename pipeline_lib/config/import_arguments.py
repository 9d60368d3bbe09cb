"""From the arguments of other tools, under their common names, to keys of this project.

A default of the tool that differs from ours is written out, so that the imported config trains
alike.
"""

from pathlib import Path

from pipeline_lib.config.import_adapters import convert_adapters, convert_base
from pipeline_lib.config.import_batch import convert_batch
from pipeline_lib.config.import_datasets import holds_nothing_out
from pipeline_lib.config.import_draft import Draft
from pipeline_lib.config.import_placement import convert_placement
from pipeline_lib.config.import_tokens import convert_tokens
from pipeline_lib.config.import_tools import AXOLOTL, SWIFT, Origin
from pipeline_lib.config.optimizers import ADAPTERS, DEEPSPEED, DEFAULT, OPTIMIZERS, OptimizerName
from pipeline_lib.config.train import AUTO, EPOCH

NEVER_CLIPS = 1e9  # a norm that no gradient has


def convert_arguments(draft: Draft, origin: Origin) -> None:
    """Convert all but the data: model, tokens, batch, optimizer, schedule, adapters, placement."""
    _model(draft, origin)
    if origin.is_of_training:
        convert_tokens(draft, origin)
        convert_adapters(draft, origin)
    convert_batch(draft, origin)
    _length(draft, origin)
    _optimizer(draft, origin)
    _schedule(draft, origin)
    _precision(draft, origin)
    convert_placement(draft)
    convert_base(draft)
    _saving(draft, origin)
    _validation(draft, origin)
    _tracking(draft, origin)


def _model(draft: Draft, origin: Origin) -> None:
    name = draft.text("model_name_or_path")
    revision = draft.text("model_revision")
    if name is None:
        return
    path = Path(name).expanduser()
    places = (path, origin.folder / path)
    folder = next((place for place in places if place.is_dir()), None)
    if folder is not None or name.startswith(("/", "~", "./", "../")):
        model = {"source": "local", "path": str(folder or path)}
        draft.taken("model_name_or_path", {"model": model})
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


def _length(draft: Draft, origin: Origin) -> None:
    steps = draft.whole("max_steps", origin.default("max_steps"))
    if steps is not None and steps > 0:
        draft.taken("max_steps", {"train.max_steps": steps}, "the schedule ends there")
        draft.taken("num_train_epochs", why="without effect there, too: max_steps decides")
    else:
        draft.same("num_train_epochs", "train.epochs", origin.default("num_train_epochs"))
        draft.taken("max_steps", why="none: the epochs decide")
    end = draft.whole("total_num_steps")
    if end is not None and not origin.has_arguments:
        why = "the training ends where the schedule does"
        draft.changed("total_num_steps", {"train.max_steps": end}, why)
    why = "the schedule ends with the training here, as it does under the Trainer"
    draft.changed("total_num_steps", None, why)
    if draft.has("seed"):
        why = "another order than there: the generators differ"
        draft.changed("seed", {"train.seed": draft.whole("seed")}, why)


def _optimizer(draft: Draft, origin: Origin) -> None:
    draft.same("learning_rate", "train.lr", _rate(draft, origin))
    for theirs, ours in (
        ("weight_decay", "train.weight_decay"),
        ("adam_beta1", "train.beta1"),
        ("adam_beta2", "train.beta2"),
        ("adam_epsilon", "train.adam_eps"),
    ):
        draft.same(theirs, ours, origin.default(theirs))
    if draft.number("max_grad_norm", 1.0):
        draft.same("max_grad_norm", "train.max_grad_norm", origin.default("max_grad_norm"))
    else:
        why = "0 does not clip there; no gradient reaches this norm"
        draft.changed("max_grad_norm", {"train.max_grad_norm": NEVER_CLIPS}, why)
    _optimizer_by_name(draft)


def _rate(draft: Draft, origin: Origin) -> float | None:
    """Return the peak of the learning rate there, if no file says it."""
    if origin.tool == SWIFT and draft.values["train.method"] == "full":
        return 1e-5
    rate: float | None = origin.default("learning_rate")
    return rate


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


_SCHEDULES = {
    "linear": "linear",
    "warmupdecaylr": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmuplr": "constant",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmupcosinelr": "cosine",
}


def _schedule(draft: Draft, origin: Origin) -> None:
    key = "deepspeed_scheduler" if draft.has("deepspeed_scheduler") else "lr_scheduler_type"
    if key != "lr_scheduler_type":
        why = "without effect there, too: the DeepSpeed JSON names a schedule"
        draft.taken("lr_scheduler_type", why=why)
    name = draft.text(key, origin.default("lr_scheduler_type"))
    if name is None:
        return
    kind = name.lower()
    ours = _SCHEDULES.get(kind)
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
    if ours == "cosine":
        _end_of_cosine(draft, origin)
    _warmup(draft, origin, is_used=kind != "constant")


def _end_of_cosine(draft: Draft, origin: Origin) -> None:
    """Convert the rate at which the schedule ends, if it is not 0."""
    given = draft.value("lr_scheduler_kwargs", {})
    options = given if isinstance(given, dict) else {}
    fraction = options.get("min_lr_rate", draft.value("cos_min_ratio"))
    if fraction is None and isinstance(options.get("min_lr"), int | float):
        peak = draft.number("learning_rate", _rate(draft, origin)) or 5e-5
        fraction = options["min_lr"] / peak
    if isinstance(fraction, int | float) and fraction:
        values = {"train.min_lr_fraction": float(f"{fraction:.6g}")}
        draft.taken("lr_scheduler_kwargs cos_min_ratio", values, "a fraction of the peak")


def _warmup(draft: Draft, origin: Origin, *, is_used: bool) -> None:
    steps = draft.number("warmup_steps", 0)
    ratio = draft.number("warmup_ratio", origin.default("warmup_ratio") or 0)
    keys = "warmup_steps warmup_ratio"
    if not is_used:
        why = "the constant schedule has no warm-up there"
        draft.taken(keys, {"train.warmup_fraction": 0}, why)
    elif steps is not None and steps >= 1:
        draft.taken("warmup_steps", {"train.warmup_steps": int(steps)})
        draft.taken("warmup_ratio", why="without effect there, too: warmup_steps decides")
    elif steps or ratio:
        is_given = draft.has("warmup_steps") or draft.has("warmup_ratio")
        why = "" if is_given else "at most 100 steps there"
        draft.taken(keys, {"train.warmup_fraction": steps or ratio}, why)
    elif origin.has_arguments or any(draft.has(key) for key in keys.split()):
        draft.taken(keys, {"train.warmup_fraction": 0})
    if draft.text("warmup_type", "linear") != "linear":
        why = "the warm-up rises linearly here, there with the logarithm of the step"
        values = {"train.warmup_steps": int(steps)} if steps else None
        draft.changed("warmup_type", values, why)
    draft.taken("warmup_type", why="linear, as here")
    if draft.number("warmup_min_lr"):
        draft.changed("warmup_min_lr", None, "the warm-up begins at 0 here")
    draft.taken("warmup_min_lr", why="the warm-up begins at 0, as here")


_PRECISIONS = "bf16 fp16 fp8 pure_bf16 mixed_precision"


def _precision(draft: Draft, origin: Origin) -> None:
    chosen = _chosen_precisions(draft, origin)
    if {"bf16", "fp16"} <= set(chosen):
        draft.problems.append("bf16 and fp16: both are true; keep one of them")
    bf16 = {"train.precision": "bf16"}
    is_full = draft.values.get("train.method", "full") == "full"
    if "fp8" in chosen and (not is_full or draft.has("zero_stage")):
        draft.changed(_PRECISIONS, bf16, "fp8 is for full fine-tuning without DeepSpeed here")
    elif "fp8" in chosen:
        draft.taken(_PRECISIONS, {"train.precision": "fp8"}, "needs the extra `fp8`")
    elif "pure_bf16" in chosen:
        why = "the trained weights are kept in fp32 here, there in bf16"
        draft.changed(_PRECISIONS, bf16, why)
    elif chosen:
        draft.taken(_PRECISIONS, {"train.precision": chosen[0]})
    elif origin.has_deepspeed and not origin.has_arguments:
        _precision_of_deepspeed(draft)
    else:
        why = (
            "neither bf16 nor fp16 there: the arithmetic is in the type of the model's weights, "
            "bf16 for Qwen3"
        )
        draft.changed(_PRECISIONS, bf16, why)
    why = "weights that are trained are kept in fp32; train.precision is that of the arithmetic"
    draft.changed("torch_dtype", None, why)


def _chosen_precisions(draft: Draft, origin: Origin) -> list[str]:
    """Return the keys of precisions that are switched on; by default, those of the tool."""
    chosen = [key for key in ("fp8", "bf16", "pure_bf16", "fp16") if draft.truth(key)]
    dtype = draft.text("torch_dtype")
    mixed = draft.text("mixed_precision", "no")
    if not chosen:
        if origin.tool == SWIFT and dtype in ("float16", "float32"):
            chosen = ["fp16"]
        elif origin.default("bf16") and draft.value("bf16") is None:
            chosen = ["bf16"]
        elif mixed in ("bf16", "fp16", "fp8"):
            chosen = [mixed]
    if chosen and mixed not in chosen:
        why = "without effect there, too: the arguments of the training decide"
        draft.taken("mixed_precision", why=why)
    return chosen


def _precision_of_deepspeed(draft: Draft) -> None:
    """Convert a DeepSpeed JSON without arguments that enables neither bf16 nor fp16."""
    given = draft.given.get("bf16", []) + draft.given.get("fp16", [])
    if any(one.value == AUTO for one in given):
        why = "the Trainer's arguments decide, and no file has them; bf16 is our default"
        draft.changed(_PRECISIONS, {"train.precision": "bf16"}, why)
    else:
        why = "neither bf16 nor fp16 is enabled, so it is fp32 there"
        draft.changed(_PRECISIONS, {"train.precision": "fp32"}, why)


def _saving(draft: Draft, origin: Origin) -> None:
    steps = draft.number("save_steps")
    strategy = _when_saved(draft, origin)
    if draft.has("saves_per_epoch"):
        _a_number_an_epoch(draft, "saves_per_epoch", "train.save_every_steps")
    elif strategy == EPOCH:
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
    limit = draft.number("save_total_limit")
    if limit is not None and limit < 1:
        draft.changed("save_total_limit", None, "all are kept there; here train.keep_last of them")
    elif limit is not None:
        draft.same("save_total_limit", "train.keep_last")


def _when_saved(draft: Draft, origin: Origin) -> str:
    """Return `steps`, `epoch` or `no`."""
    key = "save_strategy"
    by_default = origin.default(key) or "steps"
    if origin.tool == AXOLOTL and draft.has("save_steps"):
        by_default = "steps"
    return str(draft.value(key, by_default)).lower()


def _a_number_an_epoch(draft: Draft, key: str, ours: str) -> None:
    """Convert Axolotl's number of checkpoints or validations in an epoch."""
    number = draft.whole(key)
    if number == 1:
        draft.taken(key, {ours: EPOCH})
    elif number:
        why = f"{number} times an epoch there; here once, or set {ours} to a number of steps"
        draft.changed(key, {ours: EPOCH}, why)


def _validation(draft: Draft, origin: Origin) -> None:
    strategy, steps = _when_validated(draft, origin)
    keys = "eval_strategy evaluation_strategy eval_steps evals_per_epoch"
    every: str | int | None = None
    if strategy == EPOCH:
        every = EPOCH
    elif strategy == "steps" and steps is not None and steps >= 1:
        every = int(steps)
    if every is not None and holds_nothing_out(draft):
        share = draft.called("val_size")
        why = f"neither {share} nor {draft.called('eval_dataset')} holds data out"
        draft.changed(keys, None, f"{why}, so there is nothing to validate on")
        return
    if every is not None and draft.has("evals_per_epoch"):
        _a_number_an_epoch(draft, "evals_per_epoch", "train.validate_every_steps")
    elif every is not None:
        draft.taken(keys, {"train.validate_every_steps": every})
    elif strategy in ("no", "false"):
        draft.taken(keys, why="the held-out loss is taken at the end only, as here by default")
    else:
        why = (
            "a number of steps or `epoch` here: set train.validate_every_steps; now only the end "
            "is validated"
        )
        draft.changed(keys, None, why)
    if every is not None and draft.truth("load_best_model_at_end"):
        draft.taken("load_best_model_at_end", {"train.keep_best": True})
    if every is not None and draft.has("early_stopping_steps"):
        draft.same("early_stopping_steps", "train.early_stop_validations")
    if draft.value("metric_for_best_model", "loss") in ("loss", "eval_loss"):
        draft.taken("metric_for_best_model greater_is_better", why="the held-out loss, as here")


def _when_validated(draft: Draft, origin: Origin) -> tuple[str, float | None]:
    """Return `steps`, `epoch` or `no`, and the number of steps."""
    by_default = origin.default("eval_strategy") or "no"
    steps = draft.number("eval_steps", draft.number("logging_steps", 500))
    if origin.tool == SWIFT:
        by_default = _when_saved(draft, origin)
        steps = draft.number("eval_steps", draft.number("save_steps", 500))
    elif draft.has("evals_per_epoch"):
        by_default = EPOCH
    elif origin.tool == AXOLOTL and draft.has("eval_steps"):
        by_default = "steps"
    given = draft.value("eval_strategy", draft.value("evaluation_strategy", by_default))
    return str(given).lower(), steps


_SWITCHES = {f"use_{name}": name for name in ("swanlab", "wandb", "mlflow", "tensorboard")}
_TRACKERS = ("tensorboard", "swanlab", "wandb", "mlflow")


def _tracking(draft: Draft, origin: Origin) -> None:
    wanted = [word.lower() for word in draft.words("report_to")]
    wanted += [name for switch, name in _SWITCHES.items() if draft.truth(switch)]
    if origin.tool == AXOLOTL and draft.has("project"):
        wanted.append("wandb")
    chosen = [name for name in _TRACKERS if name in wanted or "all" in wanted]
    keys = " ".join(("report_to", *_SWITCHES))
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
