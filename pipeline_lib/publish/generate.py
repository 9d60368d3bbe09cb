"""Answers to held-out prompts and to the user's own, greedily, through the model's chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from pipeline_lib.config.schema import Evaluate
from pipeline_lib.data.chat.encoder import load_tokenizer
from pipeline_lib.data.document import Document, first_answer, prompt_length
from pipeline_lib.data.tokenize.rendering import render_prompts
from pipeline_lib.train.samples import question_of


def generate_all(
    model: PreTrainedModel, folder: Path, documents: Sequence[Document], settings: Evaluate
) -> list[dict[str, Any]]:
    """One {prompt, reference, answer} for each of the user's prompts and for documents spread over those held out.

    `folder` holds the tokenizer and the chat template.
    """
    tokenizer = load_tokenizer(folder)
    asked = [[{"role": "user", "content": question}] for question in settings.prompts]
    texts = render_prompts(folder, asked, enable_thinking=False) if asked else []
    found = []
    for question, text in zip(settings.prompts, texts, strict=True):
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        found.append({"prompt": question, "reference": None, "answer": answer_to(model, tokenizer, prompt, settings)})
    for document in documents[:: max(1, len(documents) // max(1, settings.generations))][: settings.generations]:
        prompt, reference = document.tokens[: prompt_length(document)].tolist(), first_answer(document)
        found.append(
            {
                "prompt": question_of(tokenizer.decode(prompt, skip_special_tokens=False)),
                "reference": tokenizer.decode(reference, skip_special_tokens=True).strip(),
                "answer": answer_to(model, tokenizer, prompt, settings),
            }
        )
    return found


def answer_to(model: PreTrainedModel, tokenizer: Tokenizer, prompt: list[int], settings: Evaluate) -> str:
    """What the model generates after the tokens of `prompt`, the likeliest each time."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=settings.max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
    return str(tokenizer.decode(output[0, len(prompt) :].tolist(), skip_special_tokens=True)).strip()
