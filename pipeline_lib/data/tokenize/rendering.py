"""Rendering through a model's chat template where it can do no harm, and what to say if it tries."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DataError, Interrupted
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.config.section import MOST_TOKENS
from pipeline_lib.data.chat.encoder import Sample
from pipeline_lib.data.chat.template import ChatTemplate
from pipeline_lib.data.rows.layout import Conversation, Message
from pipeline_lib.data.tokenize.batches import Batch, Encoding
from pipeline_lib.data.tokenize.pool import Cause, Pool, WorkerLost
from pipeline_lib.data.tokenize.worker import Guard, Limits


@dataclass(frozen=True)
class _Prompts:
    conversations: Sequence[Sequence[Message]]
    variables: Mapping[str, Any]

    def run(self, state: ChatTemplate, guard: Guard) -> list[str]:
        """The prompt of each conversation."""
        prompts = []
        for number, messages in enumerate(self.conversations):
            with guard.at(number):
                prompts.append(state.render(messages, add_generation_prompt=True, **self.variables))
        return prompts


def render_prompts(
    folder: Path, conversations: Sequence[Sequence[Message]], limits: Limits | None = None, **variables: Any
) -> list[str]:
    """What the model in `folder` is given to answer each conversation, rendered in a limited process of its own.

    `variables` are passed to the template. Raises DataError if the template fails or outgrows its limits,
    Interrupted if the process is killed.
    """
    with losses_explained(folder), Pool(partial(ChatTemplate.load, folder), 1, limits) as pool:
        (prompts,) = pool.map([_Prompts(conversations, variables)])
    return prompts


@dataclass(frozen=True)
class _EndOfTurn:
    def run(self, state: Encoding, guard: Guard) -> int | None:
        """The last token of an answer, if there is one."""
        # It thinks, because some templates let every turn begin with thinking.
        answer: Message = {"role": "assistant", "content": "!", "reasoning_content": "?"}
        conversation = Conversation([{"role": "user", "content": "?"}, answer], tools=None, supervised=(1,))
        with guard.at(0):
            sample = state.encoder.encode([conversation])[0][-1]
        return int(sample.tokens[-1]) if isinstance(sample, Sample) else None


def end_of_turn(folder: Path, limits: Limits | None = None) -> int:
    """The id of the token that ends an answer of the model in `folder`, found in a limited process of its own.

    Raises DataError if there is none, or if the template fails or outgrows its limits; Interrupted if the process is
    killed.
    """
    load = partial(Encoding, folder, Tokenize(max_tokens=MOST_TOKENS), fast=False)
    with losses_explained(folder), Pool(load, 1, limits) as pool:
        (end,) = pool.map([_EndOfTurn()])
    if end is None:
        raise DataError(f"{folder}: the chat template has no end of turn")
    return end


@contextmanager
def losses_explained(model: Path) -> Iterator[None]:
    """Turn the loss of a worker into an error that says which template and row it was at, and what to do."""
    try:
        yield
    except WorkerLost as lost:
        place = f"{lost.task.place_of(lost.position)}: " if isinstance(lost.task, Batch) else ""
        if lost.cause is Cause.KILLED:
            raise Interrupted(
                f"{place}a worker process was {lost.detail}, most likely because memory ran out: give the job more, "
                "or fewer cores, and run again"
            ) from lost
        if lost.position is None:
            doing, remedy = "tokenizing", "Look for rows of many megabytes there, or for a template that writes as much"
        else:
            doing = f"rendering the chat template of {model}"
            remedy = "Look at the row; if it is in order, the template is not: take that of the model's publisher"
        raise DataError(f"{place}a worker process was ended while {doing}: {lost.detail}. {remedy}") from lost
