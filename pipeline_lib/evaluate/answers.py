"""Greedy answers to held-out prompts and to the user's own, through the model's chat template."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Evaluate, Tokenize
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Manifest
from pipeline_lib.core.text import Progress
from pipeline_lib.core.units import count
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.chat_template import has_template
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.documents import Document, first_answer, prompt_length, question
from pipeline_lib.data.encode import default_tools, load_tokenizer
from pipeline_lib.data.how_to_call import Mode, modes_in
from pipeline_lib.data.template_worker import render_prompts
from pipeline_lib.data.thinking import last_question
from pipeline_lib.evaluate.loading import answers_here, load_to_answer
from pipeline_lib.lineage.record import LINEAGE_NAME, parse_manifest, read_lineage, settings_in
from pipeline_lib.plan.evaluation import (
    ANSWERING_BYTES,
    Answers,
    answers_at_once,
)
from pipeline_lib.records.evaluation import BaseAnswer


@dataclass(frozen=True)
class Context:
    """The default system prompt, tools and template variables of the training's conversations.

    `thinking` says whether thinking is enabled; `chat_template_kwargs` are the other variables.
    `max_tokens` is the length that no sample of the training exceeds.
    """

    system: str | None = None
    tools: Sequence[str] = ()  # JSON texts
    thinking: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = Tokenize().max_tokens

    @staticmethod
    def of(settings: Mapping[str, Any], modes: Sequence[Mode] = ()) -> "Context":
        """Build the context from a spec's settings; thinking is on if all `modes` had it.

        These are the modes that were trained.
        """
        thinking = bool(modes) and all(mode.enable_thinking for mode in modes)
        keys = ("system", "tools", "chat_template_kwargs", "max_tokens")
        known = {key: settings[key] for key in keys if key in settings}
        return Context(**known, thinking=thinking)

    @staticmethod
    def trained(folder: Path) -> "Context":
        """Return the context of the training that the lineage of the model in `folder` records."""
        tokenize = _tokenize_of(folder)
        return Context.of(settings_in(tokenize) if tokenize else {}, modes_of(folder))


def modes_of(folder: Path) -> list[Mode]:
    """Return the thinking modes trained in the model in `folder`; empty if lineage is silent."""
    tokenize = _tokenize_of(folder)
    return modes_in(tokenize) if tokenize else []


def _tokenize_of(folder: Path) -> Manifest | None:
    record = read_lineage(folder)
    if record is None or "tokenize" not in record.links:
        return None
    return parse_manifest(record.links["tokenize"].manifest, LINEAGE_NAME)


def bounded(settings: Evaluate, answers: Answers) -> Evaluate:
    """Return `settings` with at most `answers`' number and length; users' prompts come first."""
    prompts = settings.prompts[: answers.answers]
    update = {
        "prompts": prompts,
        "generations": min(settings.generations, answers.answers - len(prompts)),
        "max_new_tokens": answers.new_tokens,
    }
    return settings.model_copy(update=update)


def generate_all(
    model: PreTrainedModel,
    folder: Path,
    documents: Sequence[Document],
    settings: Evaluate,
    context: Context,
    say: Say,
) -> list[BaseAnswer]:
    """Return the answers to the user's prompts and to those of sampled held-out documents.

    The sample is spread evenly over `documents`. `folder` holds the tokenizer and the chat
    template.
    """
    tokenizer = load_tokenizer(folder)
    prompts: list[list[int]] = []
    asked_for: list[tuple[str, str | None]] = []  # prompt and reference
    for asked, text in zip(
        settings.prompts, rendered(folder, settings.prompts, context, say), strict=True
    ):
        prompts.append(tokenizer.encode(text, add_special_tokens=False).ids)
        asked_for.append((asked, None))
    for document in documents[:: max(1, len(documents) // max(1, settings.generations))][
        : settings.generations
    ]:
        prompt = question(document, tokenizer)
        prompts.append(prompt)
        shown = last_question(tokenizer.decode(prompt, skip_special_tokens=False))
        reference = tokenizer.decode(first_answer(document), skip_special_tokens=True).strip()
        asked_for.append((shown, reference))
    if prompts:
        say(
            f"evaluate: answers to {count(len(prompts), 'prompts')}, of up to "
            f"{settings.max_new_tokens} tokens"
        )
    answers = answers_to(model, tokenizer, prompts, settings.max_new_tokens, read_geometry(folder))
    return [
        BaseAnswer(prompt=prompt, reference=reference, answer=answer)
        for (prompt, reference), answer in zip(asked_for, answers, strict=True)
    ]


def rendered(folder: Path, prompts: Sequence[str], context: Context, say: Say) -> Sequence[str]:
    """Return prompts rendered by the template in `folder`; unchanged if there is none or it fails.

    A model that was trained on raw text may have a template that cannot be used.
    """
    if not prompts or not has_template(folder):
        return prompts
    try:
        return render(
            folder, [[{"role": "user", "content": prompt}] for prompt in prompts], context
        )
    except DataError as error:
        say(f"evaluate: the prompts are asked as they are, without the chat template: {error}")
        return prompts


def render(folder: Path, conversations: Sequence[Sequence[Message]], context: Context) -> list[str]:
    """Return each conversation's generation prompt, by the template in `folder` and `context`."""
    before = [{"role": "system", "content": context.system}] if context.system else []
    asked = [[*before, *messages] for messages in conversations]
    kwargs = context.chat_template_kwargs
    return render_prompts(
        folder,
        asked,
        kwargs=kwargs,
        tools=default_tools(context.tools),
        enable_thinking=context.thinking,
    )


# Without cuDNN's, torch's first choice on Hopper: it is planned anew for each length, so for each
# token of an answer.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


# Keys of a generation config whose effect on an answer does not depend on padding or on the other
# prompts of a batch. Others may: an n-gram that must not be repeated, or a least length, counts the
# padding too.
_BATCHED_KEYS = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "repetition_penalty",
        "max_length",
        "max_new_tokens",
        # a greedy answer has none of these
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        # `generate` sets these itself
        "num_beams",
        "num_return_sequences",
        "use_cache",
        "transformers_version",
        "_from_model_config",
    }
)


def answers_to(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    geometry: Geometry,
) -> list[str]:
    """Return the texts that the model, of `geometry`, generates greedily after each of `prompts`.

    Raises as `tokens_of_answers`.
    """
    found = tokens_of_answers(model, prompts, max_new_tokens, geometry)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)).strip() for tokens in found]


def tokens_of_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    geometry: Geometry,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Return the tokens that the model generates greedily after each of `prompts`.

    A token that ends an answer is its last. Prompts are asked in batches of similar lengths, or one
    by one if the model's generation config has a key whose effect may depend on the batch. Raises
    DataError if the generation config cannot be used.
    """
    config: Any = model.generation_config
    room_bytes = ANSWERING_BYTES
    if model.device.type == "cpu":
        room_bytes = min(room_bytes, host_free_bytes() // 2)
    effective = {
        key
        for key, value in config.to_diff_dict().items()
        if value is not None and value is not False
    }
    if not effective <= _BATCHED_KEYS:
        room_bytes = 0
    waiting = sorted(range(len(prompts)), key=lambda number: len(prompts[number]), reverse=True)
    found: list[list[int]] = [[] for _ in prompts]
    while waiting:
        longest = len(prompts[waiting[0]])
        at_once = answers_at_once(
            geometry, longest, max_new_tokens, model.dtype.itemsize, room_bytes
        )
        batch = waiting[:at_once]
        waiting = waiting[at_once:]
        answers = generate(model, [prompts[number] for number in batch], max_new_tokens, **GREEDY)
        for number, tokens in zip(batch, answers, strict=True):
            found[number] = tokens
        if progress is not None:
            done = len(prompts) - len(waiting)
            progress.update(done, done / len(prompts))
    return found


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of the first part that has one.

    Of a model that is spread over GPUs and the host's memory, the parts in the latter have the
    device `meta`.
    """
    return next(parameter.device for parameter in model.parameters() if not parameter.is_meta)


def stops_of(model: PreTrainedModel) -> list[int | None]:
    """Return the tokens that end an answer of the model, by its generation config."""
    config: Any = model.generation_config
    stops = config.eos_token_id
    return stops if isinstance(stops, list) else [stops]


def generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """Return the tokens of an answer to each of `prompts`, with the token that ends it.

    `options` are those of transformers' `generate`. Raises DataError if the model's generation
    config cannot be used.
    """
    device = device_of(model)
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    # The padding is masked. It repeats a token of the prompt, so that a penalty on what occurs
    # applies to no other.
    rows = [
        list(prompt[:1]) * missing + list(prompt)
        for missing, prompt in zip(padding, prompts, strict=True)
    ]
    mask = [[0] * missing + [1] * (longest - missing) for missing in padding]
    try:
        with torch.no_grad(), sdpa_kernel(_ATTENTION):
            output = model.generate(  # type: ignore[operator]
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max_new_tokens,
                num_beams=1,
                num_return_sequences=1,
                **options,
            )
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the model cannot answer as its generation_config.json asks: {error}"
        ) from error
    stops = stops_of(model)
    return [_ended(tokens, stops) for tokens in output[:, longest:].tolist()]


def _ended(tokens: list[int], stops: Sequence[int | None]) -> list[int]:
    """Return `tokens` up to the first of `stops`: the rest fills a batch with longer answers."""
    end = next(
        (number for number, token in enumerate(tokens, start=1) if token in stops), len(tokens)
    )
    return tokens[:end]


# A load test: open a model folder as users do, with transformers alone, and generate an answer to a
# prompt of the data.

NEW_TOKENS = 16


@dataclass(frozen=True)
class Loaded:
    """A load test's result: the answer to the first prompt, or why there is none, and the time."""

    duration_s: float
    prompt_tokens: int
    answer: str


def load_and_answer(folder: Path, shard: Path) -> Loaded:
    """Load the model in `folder` and answer `shard`'s first prompt with up to NEW_TOKENS tokens.

    The prompt is a held-out one or, if nothing is held out, one of the training. Raises
    TrainingError if transformers cannot load the model.
    """
    start_s = time.monotonic()
    asked = Evaluate(generations=1, max_new_tokens=NEW_TOKENS)
    place = answers_here(folder, asked)
    if not place.answers:
        return Loaded(0.0, 0, str(place))
    try:
        model = load_to_answer(folder, place)
    except DataError as error:
        raise TrainingError(f"the merged model is not usable: {error}") from error
    held_out = BlockReader(shard / "validation")
    reader = held_out if len(held_out) else BlockReader(shard / "train")
    document = next(documents_of(reader[0]))
    prompt = document.tokens[: prompt_length(document) or 1].tolist()
    (answer,) = answers_to(
        model, load_tokenizer(folder), [prompt], NEW_TOKENS, read_geometry(folder)
    )
    return Loaded(time.monotonic() - start_s, len(prompt), answer)
