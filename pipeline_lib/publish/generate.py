"""Answers to held-out prompts and to the user's own, greedily, through the model's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.data.chat.calling import Mode
from pipeline_lib.data.chat.encoder import default_tools, load_tokenizer
from pipeline_lib.data.chat.template import has_template
from pipeline_lib.data.document import Document, first_answer, question
from pipeline_lib.data.tokenize.rendering import render_prompts
from pipeline_lib.train.samples import question_of


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
