"""Rendering of conversations through a model's own chat template, exactly as transformers does.

Templates come with the model and are untrusted code: they run in the sandbox and see plain data
only.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes

from pipeline_lib.config.content import TEMPLATES_FOLDER, TEMPLATES_SUFFIX
from pipeline_lib.config.template_values import SET_ELSEWHERE
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.language import _
from pipeline_lib.core.text import did_you_mean, shortened
from pipeline_lib.core.units import count
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.template_sandbox import template_environment
from pipeline_lib.data.thinking import with_thinking_apart

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# The errors that a template can raise on messages that it was not written for.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
# jinja2 writes Python, which has limits of its own on nesting and on the digits of a number.
COMPILE_FAILURES = (jinja2.TemplateError, SyntaxError, ValueError, RecursionError)


class ChatTemplate:
    """A compiled chat template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        where: str,
        source_with_tools: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile `source`; `where` names it in messages.

        Raises DataError if it is not a valid template. This runs untrusted code, because jinja2
        computes constant expressions: only a limited process may do it.

        `source_with_tools` is the separate template that some models have for conversations with
        tools. `kwargs` are further variables of every rendering; one that no template reads raises
        DataError.
        """
        self._where = where
        environment = template_environment()
        sources = [source, source_with_tools] if source_with_tools else [source]
        try:
            self._plain = environment.from_string(sources[0])
            self._with_tools = environment.from_string(sources[-1])
            if kwargs:
                self._refuse_unread(kwargs, [environment.parse(text) for text in sources])
        except COMPILE_FAILURES as error:
            raise DataError(
                f"{where}: not a chat template that can be used: {_one_line(error)}"
            ) from error
        # The variables of every rendering, built once.
        self._variables = {**self._plain.globals, "documents": None, **variables, **(kwargs or {})}

    def _refuse_unread(self, kwargs: Mapping[str, Any], trees: Sequence[nodes.Template]) -> None:
        read = set[str]()
        for tree in trees:
            read.update(meta.find_undeclared_variables(tree))
        read -= self._plain.globals.keys()
        if unread := [name for name in kwargs if name not in read]:
            # Names that the template sets itself on some paths are unlikely to be meant.
            own = set[str]()
            for tree in trees:
                names = tree.find_all(nodes.Name)
                own.update(name.name for name in names if name.ctx == "store")
            free = sorted(read - own - SET_ELSEWHERE.keys())
            raise DataError(
                f"tokenize.chat_template_kwargs: {self._where} reads no variable {unread[0]!r}"
                f"{did_you_mean(unread[0], free)}; those that can be set are "
                f"{', '.join(free) or 'none'}"
            )

    @classmethod
    def load(cls, folder: Path, kwargs: Mapping[str, Any] | None = None) -> "ChatTemplate":
        """Load the template of the model in `folder`: chat_template.jinja or tokenizer_config.json.

        Where both exist, chat_template.jinja counts. `kwargs` are variables of every rendering.
        Raises DataError if there is no template, if it cannot be read, or if it reads one of
        `kwargs` nowhere.
        """
        config = read_tokenizer_config(folder)
        source, with_tools, where = _sources(folder, config)
        if not source:
            raise no_template(folder)
        return cls(source, special_tokens(config), where, with_tools, kwargs)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return `messages` as the text of `apply_chat_template(tokenize=False)`.

        Raises DataError if that fails. A `<think>` block at the start of an answer's text is passed
        as reasoning_content if the template (Qwen3.8's) would take it for a part of the answer.
        """
        if self._takes_thinking_apart:
            messages = [with_thinking_apart(message) for message in messages]
        return self._render(
            messages, tools, {"add_generation_prompt": add_generation_prompt, **variables}
        )

    @cached_property
    def _takes_thinking_apart(self) -> bool:
        """Whether the template renders reasoning_content, and a `<think>` block differently."""
        thought = "a thought"
        question = {"role": "user", "content": "?"}
        in_text = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n!"}
        try:
            in_text_too, apart = (
                self._render(
                    [question, answer],
                    None,
                    {"add_generation_prompt": False, "enable_thinking": True},
                )
                for answer in (in_text, with_thinking_apart(in_text))
            )
        except DataError:  # the template fails on this question
            return False
        return thought in apart and apart != in_text_too

    @cached_property
    def part_separator(self) -> str:
        """What the template writes between two text parts; by default, the servers' line end.

        The default holds for a template that reads no parts.
        """
        first, second = "first part", "second part"
        parts = [{"type": "text", "text": text} for text in (first, second)]
        try:
            text = self._write([{"role": "user", "content": parts}], None, {})
        except DataError:
            return "\n"
        _, has_first, rest = text.partition(first)
        between, has_second, _ = rest.partition(second)
        # else Python's text of the list is written
        is_read = has_first and has_second and "type" not in between
        return between if is_read else "\n"

    @cached_property
    def _manner(self) -> "_Manner":
        """How the template wants messages that call a tool: the first way that renders the call."""
        for manner in _MANNERS:
            call = {
                "type": "function",
                "function": {"name": "a_name", "arguments": {"a_key": "a_value"}},
            }
            message = manner.of({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                text = self._write([{"role": "user", "content": "?"}, message], None, {})
            except DataError:
                continue
            # With single quotes it is Python's text of a dict, and no JSON.
            if "a_name" in text and "a_value" in text and "'a_key'" not in text:
                return manner
        return _MANNERS[0]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        is_calling = any(message.get("tool_calls") for message in messages)
        made = [self._manner.of(message) for message in messages] if is_calling else messages
        return self._write(made, tools, variables)

    def _write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        template = self._plain if tools is None else self._with_tools
        cleaned = []
        for message in messages:
            # Without null values, and with `thinking`, which some templates read, as
            # reasoning_content.
            values = {key: value for key, value in message.items() if value is not None}
            if "reasoning_content" in values:
                values = {"thinking": values["reasoning_content"], **values}
            cleaned.append(values)
        context = {**self._variables, "messages": cleaned, "tools": tools, **variables}
        try:
            text = "".join(template.root_render_func(template.new_context(context, shared=True)))
            text.encode()  # raises UnicodeEncodeError, a ValueError, for half a surrogate pair
        except TEMPLATE_FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{self._where}: the chat template fails on messages of {roles}: {_one_line(error)}"
            ) from error
        return text


@dataclass(frozen=True)
class _Manner:
    """How a message with calls is given to a template.

    Without text its content may be null, which transformers leaves out; arguments may be JSON text.
    """

    is_content_null: bool
    are_arguments_text: bool

    def of(self, message: Message) -> Message:
        """Return `message` in this manner; one without calls stays as it is."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        made = dict(message)
        if self.is_content_null and not message["content"]:
            made["content"] = None
        if self.are_arguments_text:
            made["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return made


# OpenAI's servers give null and text; templates are written for what they read.
_MANNERS = [_Manner(is_null, is_text) for is_text in (False, True) for is_null in (False, True)]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
        },
    }


def no_template(folder: Path) -> DataError:
    """Return the error for conversations if the model in `folder` has no chat template."""
    return DataError(
        f"{folder}: has no chat template ({TEMPLATE_NAME}); take a model that has one, or add it"
    )


def has_template(folder: Path) -> bool:
    """Return whether the model in `folder` has a chat template; raw text needs none.

    Raises DataError.
    """
    return bool(read_template(folder))


def read_template(folder: Path) -> str:
    """Return the chat template of the model in `folder`; "" if it has none. Raises DataError."""
    return _sources(folder, read_tokenizer_config(folder))[0]


def _sources(folder: Path, config: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Return the template ("" if none), a separate one for tools or None, and their file's path."""
    path = folder / TEMPLATE_NAME
    named = {
        file.stem: file for file in sorted((folder / TEMPLATES_FOLDER).glob(f"*{TEMPLATES_SUFFIX}"))
    }
    if path.is_file():
        named["default"] = path
    if named:  # as in transformers, files come before the other places
        texts = {name: _read_template(file) for name, file in named.items()}
        return texts.get("default", ""), texts.get("tool_use"), str(path)
    value = config.get("chat_template")  # a single text, or a list of named ones
    listed = {"default": value} if isinstance(value, str) else {}
    items = value if isinstance(value, list) else []
    for item in items:
        if (
            isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get("template"), str)
        ):
            listed[item["name"]] = item["template"]
    return listed.get("default", ""), listed.get("tool_use"), str(folder / TOKENIZER_CONFIG_NAME)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the chat template ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    return shortened(str(error), 500)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json of the model in `folder`, or {} if there is none.

    Raises DataError.
    """
    path = folder / TOKENIZER_CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: expected an object")
    return config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names, by role (`eos_token`, ...)."""
    tokens = {}
    for role in SPECIAL_TOKENS:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[role] = text
    return tokens


def repetition(
    conversations: int | None, samples: int | None, tokens: int | None, repeated: int | None
) -> str:
    """Return a message on how many times more tokens than with a sample per conversation there are.

    Return the empty string if the factor is below 1.05 or unknown. `repeated` counts the tokens of
    all samples of a conversation but its longest.
    """
    if not conversations or not samples or not tokens or not repeated:
        return ""
    once = tokens - repeated
    if tokens < 1.05 * once:
        return ""
    text = _(
        "{samples} of {conversations} have {times} times the tokens of one sample each ({tokens} "
        "against {once}): the chat template renders an earlier turn otherwise than the last, so each "
        "answer needs its own"
    )
    return text.format(
        samples=count(samples, _("samples")),
        conversations=count(conversations, _("conversations")),
        times=f"{tokens / once:.1f}",
        tokens=count(tokens),
        once=count(once),
    )
