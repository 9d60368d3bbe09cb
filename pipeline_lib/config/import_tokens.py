"""How long a sample is, what of it is trained on, and how much of the thinking: `tokenize`."""

from typing import Any

from pipeline_lib.config.import_draft import Draft
from pipeline_lib.config.import_tools import LLAMA_FACTORY, SWIFT, TRL, Origin

# What becomes of a sample that is too long: their words, and ours.
_OVER_LONG = {
    "drop": "drop",
    "delete": "drop",
    "raise": "drop",
    "truncate": "truncate",
    "right": "truncate",
    "keep_start": "truncate",
    "left": "truncate",
    "keep_end": "truncate",
    "split": "split",
}


def convert_tokens(draft: Draft, origin: Origin) -> None:
    """Convert what the stage `tokenize` needs to know; `origin` is of a whole training."""
    stage = draft.text("stage", "sft")
    if stage not in ("sft", "pt"):
        text = (
            "preference and reward training do not exist here, only sft (conversations) and pt "
            "(raw text)"
        )
        draft.problems.append(f"stage: {stage}: {text}; take a file of one of these stages")
    task = str(draft.value("task_type", "causal_lm"))
    if task.lower() != "causal_lm":
        text = "models that write text are trained here, none that classify or embed it"
        draft.problems.append(f"task_type: {task}: {text}; take a file of causal_lm")
    draft.taken("task_type", why="a model that writes text, as here")
    draft.taken("stage", why="conversations or texts: the rows of the data decide")
    if origin.tool == LLAMA_FACTORY:
        _length_and_rest(draft, stage)
        _thinking(draft)
    else:
        _length(draft, origin)
    _trained_tokens(draft, origin)
    if system := draft.text("default_system"):
        draft.taken("default_system", {"tokenize.system": system})
    if draft.truth("streaming"):
        why = "data are tokenized once, before the training, and read from memory-mapped files"
        draft.without("streaming", why)


def _length(draft: Draft, origin: Origin) -> None:
    """Convert the length of a sample, and what becomes of a longer one."""
    limit = draft.whole("cutoff_len", origin.default("cutoff_len"))
    if limit is not None:
        block = draft.whole("packing_length", limit)
        lengths = {"tokenize.max_tokens": limit, "shard.block_tokens": block}
        why = "tokens of a sample, and of a packed sequence"
        draft.taken("cutoff_len packing_length", lengths, why)
    key = "truncation_strategy"
    there = draft.text(key, origin.default(key)) or ""
    ours = _OVER_LONG.get(there)
    if ours is None:
        draft.problems.append(f"{draft.called(key)}: {there} is not one of {', '.join(_OVER_LONG)}")
        return
    values = {"tokenize.over_long": ours}
    if there in ("left", "keep_end"):
        draft.changed(key, values, "a longer sample loses its beginning there, here its end")
    elif there == "raise":
        draft.changed(key, values, "a longer sample ends the run there, here it is left out")
    else:
        draft.taken(key, values)


def _length_and_rest(draft: Draft, stage: str | None) -> None:
    """Convert LLaMA-Factory's length, whose effect on longer samples depends on the packing."""
    limit = draft.whole("cutoff_len", 2048) or 2048
    values: dict[str, Any] = {"tokenize.max_tokens": limit, "shard.block_tokens": limit}
    if stage == "pt" and draft.truth("packing", True):
        values["tokenize.over_long"] = "split"
        why = (
            "texts are joined and cut into pieces of this length there; here a longer text is "
            "cut into such pieces"
        )
    elif is_packed(draft):
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


_ANSWERS_ONLY = "questions are never trained on here, only the assistant's answers"


def _trained_tokens(draft: Draft, origin: Origin) -> None:
    """Convert which tokens the loss counts."""
    if draft.truth("mask_history"):
        draft.taken("mask_history", {"tokenize.train_on": "last_assistant"})
    else:
        draft.taken("mask_history", why="every answer of a conversation is trained on, as here")
    if draft.truth("train_on_prompt"):
        draft.without("train_on_prompt", _ANSWERS_ONLY)
    draft.taken("train_on_prompt", why="only answers are trained on, as here")
    if origin.tool == SWIFT:
        _loss_scale(draft)
    if origin.tool == TRL:
        _loss_of_trl(draft)


def _loss_scale(draft: Draft) -> None:
    key = "loss_scale"
    parts = (draft.text(key, "default") or "").split("+")
    others = [part for part in parts if part not in ("default", "last_round", "ignore_empty_think")]
    values = {"tokenize.train_on": "last_assistant"} if "last_round" in parts else {}
    if "all" in others:
        draft.changed(key, values, _ANSWERS_ONLY)
    elif others:
        why = f"tokens of answers have equal weights here: {', '.join(others)} is left out"
        draft.changed(key, values, why)
    else:
        draft.taken(key, values, "the answers, without an empty thinking block, as here")


def _loss_of_trl(draft: Draft) -> None:
    key = "assistant_only_loss"
    if draft.truth(key):
        draft.taken(key, why="only answers are trained on, as here")
    else:
        why = "without it, conversations are trained on with their questions there; here only"
        draft.default_of_tool(key, f"{why} the assistant's answers are")
    if draft.has("completion_only_loss") and not draft.truth("completion_only_loss"):
        draft.changed("completion_only_loss", None, _ANSWERS_ONLY)
    draft.taken("completion_only_loss", why="only the completion is trained on, as here")


def is_packed(draft: Draft) -> bool:
    """Return whether samples are packed there, so that a batch counts packed sequences."""
    by_default = draft.text("stage", "sft") == "pt"
    return draft.truth("packing", by_default) or draft.truth("neat_packing")


# templates whose default prompt opens a thinking block
_OPENS_THINKING = ("qwen3_5", "qwen3_6", "qwen3_8")


def _thinking(draft: Draft) -> None:
    template = draft.text("template") or ""
    own = "the model's own chat template is used"
    is_of_qwen3 = template.startswith("qwen3")
    if not is_of_qwen3 or template.endswith("_nothink"):
        if is_of_qwen3:
            own += (
                "; that of a hybrid Qwen3 writes an empty thinking block before an answer without "
                f"thinking, which {template} leaves out; of an Instruct-2507 model both are the "
                "same"
            )
        draft.changed("template", None, own)
        draft.taken("enable_thinking", why="without effect under this template there")
        return
    draft.taken("template", why=own)
    given = [one.value for one in draft.given.get("enable_thinking", [])]
    is_on = draft.truth("enable_thinking", True)
    if given == [None]:
        why = "answers with thinking train it, others the mode without, as here"
        draft.taken("enable_thinking", why=why)
    elif is_on and template.startswith(_OPENS_THINKING):
        why = (
            "the prompt of this template opens a thinking block; answers without thinking train "
            "the mode without"
        )
        draft.changed("enable_thinking", None, why)
    elif is_on:
        why = (
            "with enable_thinking, true by default, an answer without thinking learns to write "
            "the empty block itself"
        )
        draft.taken("enable_thinking", {"tokenize.prompt_thinking": "on"}, why)
    else:
        why = "thinking is removed from the answers"
        draft.taken("enable_thinking", {"tokenize.thinking": "strip"}, why)
