"""Rendering through a model's chat template in a limited process, and the errors for a lost worker.

jinja2 computes constant expressions while it compiles a template, so a template is compiled within
the limits too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.config.section import MOST_TOKENS
from pipeline_lib.core.errors import DataError, Interrupted
from pipeline_lib.data.batches import RowBatch
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.encode import Encoder
from pipeline_lib.data.pool import Guard, Limits, LossCause, Pool, WorkerLost


def _no_state() -> None:
    """Return the state of a worker that compiles the template: what it loads has no limits."""


def _check_template(folder: Path, state: None, guard: Guard) -> None:
    question: Message = {"role": "user", "content": "?"}
    with guard.at(0):
        template = ChatTemplate.load(folder)
        with suppress(DataError):  # it may want another conversation
            template.render([question], add_generation_prompt=True)


def check_template(folder: Path, limits: Limits | None = None) -> None:
    """Compile the template of the model in `folder` in a limited process; render a question.

    Raises DataError if it does not compile or exceeds its limits, Interrupted if the process is
    killed.
    """
    with losses_explained(folder), Pool(_no_state, 1, limits) as pool:
        list(pool.map([partial(_check_template, folder)]))


def _prompts(
    load: Callable[[], ChatTemplate],
    conversations: Sequence[Sequence[Message]],
    variables: Mapping[str, Any],
    state: None,
    guard: Guard,
) -> list[str]:
    with guard.at(0):
        template = load()
    prompts = []
    for number, messages in enumerate(conversations):
        with guard.at(number):
            prompts.append(template.render(messages, add_generation_prompt=True, **variables))
    return prompts


def render_prompts(
    folder: Path,
    conversations: Sequence[Sequence[Message]],
    limits: Limits | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **variables: Any,
) -> list[str]:
    """Return each conversation's generation prompt for the model in `folder`.

    It is rendered in a limited process. `variables` are passed to the template, and `kwargs` too,
    which it has to read. Raises DataError if the template fails or exceeds its limits, Interrupted
    if the process is killed.
    """
    load = partial(ChatTemplate.load, folder, kwargs)
    with losses_explained(folder), Pool(_no_state, 1, limits) as pool:
        (prompts,) = pool.map([partial(_prompts, load, conversations, variables)])
    return prompts


def end_of_turn(folder: Path, limits: Limits | None = None) -> int | None:
    """Return the token id that ends an answer of the model in `folder`, by a limited process.

    Return None if the chat template ends no answer with a control token, fails or exceeds its
    limits: then no conversation was trained. Raises Interrupted if the process is killed.
    """
    load = partial(Encoder, folder, Tokenize(max_tokens=MOST_TOKENS), fast=False)
    try:
        with losses_explained(folder), Pool(load, 1, limits) as pool:
            (end,) = pool.map([_end_of_turn])
    except DataError:
        return None
    return end


def _end_of_turn(state: Encoder, guard: Guard) -> int | None:
    with guard.at(0):
        return state.end_of_turn()


def refuse_unrendered_defaults(
    folder: Path, settings: Tokenize, limits: Limits | None = None
) -> None:
    """Raise DataError if the template in `folder` omits the system message or tools of `settings`.

    It is rendered in a limited process. Raises Interrupted if the process is killed.
    """
    with (
        losses_explained(folder),
        Pool(partial(Encoder, folder, settings, fast=False), 1, limits) as pool,
    ):
        list(pool.map([_refuse_unrendered_defaults]))


def _refuse_unrendered_defaults(state: Encoder, guard: Guard) -> None:
    with guard.at(0):
        state.refuse_unrendered_defaults()


@contextmanager
def losses_explained(model: Path) -> Iterator[None]:
    """Convert WorkerLost to DataError or Interrupted, with template or row and a remedy."""
    try:
        yield
    except WorkerLost as lost:
        place = f"{lost.task.place_of(lost.position)}: " if isinstance(lost.task, RowBatch) else ""
        if lost.cause is LossCause.KILLED:
            raise Interrupted(
                f"{place}a worker process was {lost.detail}, most likely because memory ran out: "
                "give the job more, or fewer cores, and run again"
            ) from lost
        if lost.position is None:
            doing = "tokenizing"
            remedy = "Look for rows of many megabytes there, or for a template that writes as much"
        else:
            doing = f"rendering the chat template of {model}"
            remedy = "Take the template of the model's publisher"
            if place:
                remedy = (
                    f"Look at the row; if it is in order, the template is not. {remedy}, or allow "
                    "such rows to be put aside with tokenize.max_quarantined_fraction"
                )
        raise DataError(
            f"{place}a worker process was ended while {doing}: {lost.detail}. {remedy}"
        ) from lost
