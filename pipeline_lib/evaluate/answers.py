"""Answers to prompts, by a model on the device that has room for it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.config.schema import Evaluate
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.data.batches import render_prompts
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.chat_template import Mode, has_template
from pipeline_lib.data.documents import Document, first_answer, prompt_length, question
from pipeline_lib.data.encode import default_tools, load_tokenizer
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.memory import can_evaluate
from pipeline_lib.train.validation import question_of

# Where a whole model is scored and answers.


def device_for(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.device:
    """One GPU, if there is one with room for the model in `folder` in `dtype`, else the CPUs. Raises DataError."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what torch keeps of a model before this one counts as taken
        free_bytes, _ = torch.cuda.mem_get_info()
        if can_evaluate(Geometry.from_folder(folder).parameters, free_bytes, dtype.itemsize):
            return torch.device("cuda")
    return torch.device("cpu")


# Answers to held-out prompts and to the user's own, greedily, through the model's chat template.


@dataclass(frozen=True)
class Context:
    """What conversations of the training begin with, where they bring nothing of their own, and how they are asked."""

    system: str | None = None
    tools: Sequence[str] = ()  # JSON texts
    thinking: bool = False

    @staticmethod
    def of(settings: Mapping[str, Any], modes: Sequence[Mode] = ()) -> "Context":
        """That which a spec holds (config/compile.py); with thinking where all answers were trained so."""
        thinking = bool(modes) and all(mode.enable_thinking for mode in modes)
        return Context(settings.get("system"), settings.get("tools", ()), thinking)


def generate_all(
    model: PreTrainedModel, folder: Path, documents: Sequence[Document], settings: Evaluate, context: Context
) -> list[dict[str, Any]]:
    """One {prompt, reference, answer} for each of the user's prompts and for documents spread over those held out.

    `folder` holds the tokenizer and the chat template.
    """
    tokenizer = load_tokenizer(folder)
    found = []
    for asked, text in zip(settings.prompts, rendered(folder, settings.prompts, context), strict=True):
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        found.append({"prompt": asked, "reference": None, "answer": answer_to(model, tokenizer, prompt, settings)})
    for document in documents[:: max(1, len(documents) // max(1, settings.generations))][: settings.generations]:
        prompt, reference = question(document, tokenizer), first_answer(document)
        found.append(
            {
                "prompt": question_of(tokenizer.decode(prompt, skip_special_tokens=False)),
                "reference": tokenizer.decode(reference, skip_special_tokens=True).strip(),
                "answer": answer_to(model, tokenizer, prompt, settings),
            }
        )
    return found


def rendered(folder: Path, prompts: Sequence[str], context: Context) -> Sequence[str]:
    """What the model is given; the prompts themselves where it has no chat template, having learned from texts."""
    if not prompts or not has_template(folder):
        return prompts
    before = [{"role": "system", "content": context.system}] if context.system else []
    asked = [[*before, {"role": "user", "content": prompt}] for prompt in prompts]
    return render_prompts(folder, asked, tools=default_tools(context.tools), enable_thinking=context.thinking)


def answer_to(model: PreTrainedModel, tokenizer: Tokenizer, prompt: list[int], settings: Evaluate) -> str:
    """What the model generates after the tokens of `prompt`, the likeliest each time. Raises DataError."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    try:
        with torch.no_grad():
            output = model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=settings.max_new_tokens,
                do_sample=False,
                num_beams=1,
                num_return_sequences=1,
                temperature=None,
                top_p=None,
                top_k=None,
            )
    except (ValueError, TypeError) as error:
        raise DataError(f"the model cannot answer as its generation_config.json asks: {error}") from error
    return str(tokenizer.decode(output[0, len(prompt) :].tolist(), skip_special_tokens=True)).strip()


# Opens a model folder as its users will, with transformers alone, and lets it answer a held-out prompt.

NEW_TOKENS = 16


@dataclass(frozen=True)
class Loaded:
    """What came of it: the answer to the first held-out prompt."""

    duration_s: float
    prompt_tokens: int
    answer: str


def load_and_answer(folder: Path, shard: Path) -> Loaded:
    """Load the model in `folder` and generate a few tokens. Raises TrainingError if it cannot be loaded."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    start_s = time.monotonic()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(f"{folder}: transformers cannot load the merged model: {reason}") from error
    model.to(device_for(folder, model.dtype))
    model.train(False)
    document = next(documents_of(BlockReader(shard / "validation")[0]))
    prompt = document.tokens[: prompt_length(document) or 1].tolist()
    answer = answer_to(model, load_tokenizer(folder), prompt, Evaluate(max_new_tokens=NEW_TOKENS))
    return Loaded(time.monotonic() - start_s, len(prompt), answer)
