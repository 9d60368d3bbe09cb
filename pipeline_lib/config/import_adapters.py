"""Which parameters are trained: all, or adapters, on a base that may be in 4 bits: `train.lora`."""

from pipeline_lib.config.import_draft import LINEAR_NAMES, Draft
from pipeline_lib.config.import_tools import LLAMA_FACTORY, Origin
from pipeline_lib.config.strategies import with_key

_ALL = ("all", "all-linear")
_QLORA = "qlora"


def convert_adapters(draft: Draft, origin: Origin) -> None:
    """Convert the method, and the adapters; `origin` is of a whole training."""
    kind = draft.text("finetuning_type", origin.default("finetuning_type"))
    if draft.truth("use_peft"):
        kind = "lora"
    keys = (
        "lora_rank lora_alpha lora_dropout lora_target lora_target_linear use_rslora use_dora "
        "loraplus_lr_ratio"
    )
    if kind not in ("lora", _QLORA, "full", "freeze"):
        name = draft.called("finetuning_type")
        draft.problems.append(f"{name}: {kind} does not exist here; it may be lora, full or freeze")
    if kind == "freeze":
        why = (
            "all weights would be trained: list those that stay as they are in train.freeze, by "
            "glob"
        )
        draft.without(
            "finetuning_type freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
            why,
        )
    if kind not in ("lora", _QLORA):
        draft.taken("finetuning_type use_peft", {"train.method": "full"})
        draft.taken(keys, why="without effect there, too: no adapters are trained")
        return
    draft.taken("finetuning_type use_peft", {"train.method": "lora"})
    draft.same("lora_rank", "train.lora.rank", origin.default("lora_rank"))
    _alpha(draft, origin)
    draft.same("lora_dropout", "train.lora.dropout", origin.default("lora_dropout"))
    _targets(draft, origin)
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if draft.has(theirs):
            draft.taken(theirs, {f"train.lora.{ours}": draft.truth(theirs)})
    if draft.has("loraplus_lr_ratio"):
        draft.same("loraplus_lr_ratio", "train.lora.lr_ratio")


def _alpha(draft: Draft, origin: Origin) -> None:
    if draft.value("lora_alpha", 0) or origin.tool != LLAMA_FACTORY:
        draft.same("lora_alpha", "train.lora.alpha", origin.default("lora_alpha"))
        return
    rank = draft.whole("lora_rank", 8) or 8
    why = "lora_alpha follows 2 x lora_rank there, and not here, so it is written out"
    draft.changed("lora_alpha", {"train.lora.alpha": 2 * rank}, why)


def _targets(draft: Draft, origin: Origin) -> None:
    key = "lora_target"
    names = draft.words(key) or origin.default(key) or list(_ALL[:1])
    if draft.truth("lora_target_linear") or any(name in _ALL for name in names):
        draft.taken(f"{key} lora_target_linear", {"train.lora.targets": "all-linear"})
        return
    known = [name for name in names if name in LINEAR_NAMES]
    if unknown := [name for name in names if name not in LINEAR_NAMES]:
        may = f"they may be all, or {', '.join(LINEAR_NAMES)}"
        draft.problems.append(
            f"{draft.called(key)}: {', '.join(unknown)}: not linear modules of a Qwen3 layer; {may}"
        )
    draft.taken(f"{key} lora_target_linear", {"train.lora.targets": known})


def convert_base(draft: Draft) -> None:
    """Convert a base in 4 bits, once the strategy is known: few strategies have one."""
    is_in_4_bits = (
        draft.truth("load_in_4bit")
        or draft.value("quantization_bit") == 4
        or draft.value("finetuning_type") == _QLORA
    )
    if not is_in_4_bits:
        return
    keys = (
        "load_in_4bit quantization_bit quant_method quantization_method quantization_type "
        "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant double_quantization "
        "use_bnb_nested_quant"
    )
    strategy = draft.values.get("train.strategy", "ddp")
    if draft.values.get("train.method") != "lora":
        draft.without(keys, "only the frozen base of adapters can be in 4 bits here")
    elif strategy not in with_key("lora.base: nf4") or "train.offload" in draft.values:
        why = f"4 bits do not work with {strategy} and offloading as they are here; the base stays"
        draft.changed(keys, {"train.lora.base": "unquantized"}, f"{why} in bf16")
    else:
        draft.taken(keys, {"train.lora.base": "nf4"}, "needs the extra `nf4`")
