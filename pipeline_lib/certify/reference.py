"""The reference of a certificate: what the model in the folder answers, and how probable it is."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from pipeline_lib.certify.questions import ServerQuestion
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.evaluate.answers import GREEDY, device_of, generate, stops_of
from pipeline_lib.evaluate.chat_model import load_base_of, load_to_chat, place_for


@dataclass(frozen=True)
class Expected:
    """The greedy answer that a model gives to a question.

    `answer` has the token that ends it, if `has_ended`. `nats` are the log-probabilities of its
    tokens, and `leads` how many nats the likeliest token at each place is before the second one.
    """

    question: ServerQuestion
    prompt: list[int]
    answer: list[int]
    nats: list[float]
    leads: list[float]
    has_ended: bool


@dataclass(frozen=True)
class BaseReference:
    """The base model's own answers, and its log-probabilities of the tuned model's answers."""

    answers: list[Expected]
    nats: list[list[float]]


@dataclass(frozen=True)
class ModelReference:
    """What the model in the folder answers, and its base; `base` is a reason if it is not known."""

    tokenizer: Tokenizer
    expected: list[Expected]
    base: BaseReference | str


def reference_of(
    folder: Path, store: Store, questions: Sequence[ServerQuestion], max_new_tokens: int, say: Say
) -> ModelReference:
    """Load the model in `folder`, and its base if it is in the store, and ask both.

    Raises DataError if the model cannot be loaded or has no room.
    """
    tokenizer = load_tokenizer(folder)
    place = place_for(folder)
    say(f"loading {folder}, {place.text}")
    model = load_to_chat(folder, place)
    expected = [_expected(model, tokenizer, each, max_new_tokens) for each in questions]
    del model
    gc.collect()  # before the base takes memory
    base = _base(folder, store, tokenizer, expected, max_new_tokens, say)
    return ModelReference(tokenizer, expected, base)


def _base(
    folder: Path,
    store: Store,
    tokenizer: Tokenizer,
    expected: Sequence[Expected],
    max_new_tokens: int,
    say: Say,
) -> BaseReference | str:
    try:
        model = load_base_of(folder, store, say)
    except (DataError, IntegrityError) as error:
        return str(error)
    return BaseReference(
        answers=[_expected(model, tokenizer, each.question, max_new_tokens) for each in expected],
        nats=[_nats_and_leads(model, each.prompt, each.answer)[0] for each in expected],
    )


def _expected(
    model: PreTrainedModel, tokenizer: Tokenizer, question: ServerQuestion, max_new_tokens: int
) -> Expected:
    prompt = tokenizer.encode(question.prompt, add_special_tokens=False).ids
    (answer,) = generate(model, [prompt], max_new_tokens, **GREEDY)
    nats, leads = _nats_and_leads(model, prompt, answer)
    return Expected(question, prompt, answer, nats, leads, answer[-1] in stops_of(model))


@torch.no_grad()
def _nats_and_leads(
    model: PreTrainedModel, prompt: list[int], answer: list[int]
) -> tuple[list[float], list[float]]:
    """Return the log-probabilities of the answer's tokens [A], and the lead at each place [A]."""
    tokens = torch.tensor([prompt + answer], device=device_of(model))
    logits: Tensor = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    nats = logits.float().log_softmax(-1)  # [A, V]
    best = nats.topk(2).values
    chosen = nats.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
    return chosen.tolist(), (best[:, 0] - best[:, 1]).tolist()
