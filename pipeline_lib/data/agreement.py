"""Whether transformers takes a model's config and agrees on its tokenizer and template.

A tokenizer can be stored in many layouts, and transformers reads some files that are not read here.
Instead of a list of layouts, the ids of a text that holds every added token are compared, and what
the template renders.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline_lib.config.content import tokenizer_files
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, sha256_file
from pipeline_lib.core.processes import unseen
from pipeline_lib.core.text import shortened
from pipeline_lib.data.chat_template import TEMPLATE_FAILURES, ChatTemplate, has_template
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.data.pool import Guard, Limits, Pool
from pipeline_lib.data.template_worker import losses_explained

TEXTS = (
    'Hello, world!  It\'s 12345 words\n\n and\tmore\r\n  code: {"a": [1, 2]}',
    "北京的天气 e\u0301 ő \U0001f1e9\U0001f1ea ١٢ Ünïcode",
)
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a <place>", "parameters": _PARAMETERS},
    }
]
_MESSAGES: Sequence[Sequence[Message]] = (
    ({"role": "user", "content": "A question."},),
    (
        {"role": "system", "content": "A system message."},
        {"role": "user", "content": "A question."},
    ),
    ({"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."}),
)
CONFIG_NAME = "config.json"
_SUFFIXES = (".json", ".txt", ".jinja", ".model")  # of the files that transformers may read
# What transformers raises of files that it does not take.
_FAILURES = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    RecursionError,
)


@dataclass(frozen=True)
class _Both:
    """A model's tokenizer and template as they are read here, and transformers' tokenizer."""

    ours: Tokenizer
    template: ChatTemplate | None
    theirs: Any

    @classmethod
    def load(cls, folder: Path, origin: Path) -> "_Both":
        """Load the files taken to `folder`, and with transformers those of `origin`.

        Raises DataError. Without torch where transformers needs none to judge the config: importing
        it takes seconds.
        """
        with nullcontext() if _needs_torch(folder) else unseen("torch"):
            from transformers import AutoTokenizer

            _refuse_untaken_config(folder)
        try:
            theirs = AutoTokenizer.from_pretrained(
                origin, trust_remote_code=False, local_files_only=True
            )
        except _FAILURES as error:
            message = shortened(str(error), 200)
            raise DataError(
                f"{folder}: transformers does not take its tokenizer ({message})"
            ) from error
        template = ChatTemplate.load(folder) if has_template(folder) else None
        return cls(load_tokenizer(folder), template, theirs)


# What transformers takes for these keys of config.json without torch. For other values torch is
# asked.
_TAKEN = {
    "hidden_act": ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu"),
    **dict.fromkeys(("dtype", "torch_dtype"), (None, "bfloat16", "float16", "float32")),
}


def _needs_torch(folder: Path) -> bool:
    """Return whether transformers needs torch to judge config.json in `folder`; False if none."""
    try:
        waiting = [read_json(folder / CONFIG_NAME)]
    except (OSError, ValueError, RecursionError):
        return False
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if any(part[key] not in taken for key, taken in _TAKEN.items() if key in part):
                return True
            waiting += part.values()
    return False


def _refuse_untaken_config(folder: Path) -> None:
    """Raise DataError if transformers rejects config.json, for example for a key unread here."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if not (folder / CONFIG_NAME).is_file():
        return
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        activation = config.get_text_config().hidden_act
        if activation not in _TAKEN["hidden_act"]:
            from transformers.activations import get_activation  # loads torch

            get_activation(activation)  # type: ignore[no-untyped-call]
    except (StrictDataclassError, *_FAILURES) as error:
        reason = shortened(str(error), 200)
        raise DataError(
            f"{folder / CONFIG_NAME}: transformers does not take it ({reason})"
        ) from error


def refuse_differences(
    folder: Path, origin: Path | None = None, limits: Limits | None = None
) -> None:
    """Raise DataError if transformers does not take the config of the model in `folder`.

    So also if the model gives other ids or prompts here than with transformers.

    `origin` is the folder that its files were taken from, if it holds others beside. The template
    is rendered in a limited process. Raises Interrupted if that is killed.
    """
    origin = origin or folder
    files = {folder / name for name in tokenizer_files(folder)}
    files |= {origin / name for name in tokenizer_files(origin)}
    files |= {path for path in origin.iterdir() if path.suffix in _SUFFIXES and path.is_file()}
    files |= {path for path in (folder / CONFIG_NAME,) if path.is_file()}
    contents = tuple(sorted((file.name, sha256_file(file)) for file in files))
    if problem := _difference(_ModelOrigin(contents, folder, origin), limits):
        raise DataError(
            f"{folder}: {problem}. The model would be trained with what inference does not see: "
            "save it again with transformers "
            "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), and take that"
        )


@dataclass(frozen=True)
class _ModelOrigin:
    """A model's folder and where its files came from; places of the same `contents` are equal.

    Contents are names and hashes.
    """

    contents: tuple[tuple[str, str], ...]
    folder: Path = field(compare=False)
    origin: Path = field(compare=False)


@lru_cache(maxsize=64)
def _difference(place: _ModelOrigin, limits: Limits | None) -> str | None:
    """Return how the model differs from what transformers makes of it; None if it does not."""
    folder = place.folder
    with (
        losses_explained(folder),
        Pool(partial(_Both.load, folder, place.origin), 1, limits) as pool,
    ):
        problems = [*pool.map([_other_ids, _other_prompts])]
    return next(filter(None, problems), None)


def _other_ids(state: _Both, guard: Guard) -> str | None:
    added = {token.content for token in state.ours.get_added_tokens_decoder().values()}
    added |= {token.content for token in state.theirs.added_tokens_decoder.values()}
    with guard.at(0):
        for text in [*TEXTS, *(f"a {token} b{token}c\n{token}" for token in sorted(added))]:
            ours = state.ours.encode(text, add_special_tokens=False).ids
            theirs = state.theirs(text, add_special_tokens=False)["input_ids"]
            if ours != theirs:
                return (
                    f"tokenizer.json gives other ids than transformers for {text!r:.80}: {ours} "
                    f"and {theirs}"
                )
    return None


def _other_prompts(state: _Both, guard: Guard) -> str | None:
    if state.template is None:
        is_alone = state.theirs.chat_template is not None
        if not is_alone:
            return None
        return "transformers finds a chat template in a file that is not read here"
    with guard.at(0):
        for messages, tools, prompt in product(_MESSAGES, (None, _TOOLS), (False, True)):
            ours = _or_none(partial(state.template.render, messages, tools, prompt))
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
            theirs = _or_none(partial(state.theirs.apply_chat_template, list(messages), **options))
            if ours != theirs and ours is not None:
                given = "with tools" if tools else "without tools"
                return (
                    f"the chat template renders a conversation {given} otherwise than with "
                    "transformers"
                )
    return None


def _or_none(render: Callable[[], str]) -> str | None:
    """Return what `render` returns; None if it fails."""
    with suppress(DataError, *TEMPLATE_FAILURES):
        return render()
    return None
