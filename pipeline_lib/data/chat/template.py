"""Renders conversations through a model's own chat template, exactly as transformers does.

Templates come with the model and are code of others: they run in jinja2's immutable sandbox and see plain
text only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.redact import shortened
from pipeline_lib.data.chat.sandbox import template_environment
from pipeline_lib.data.rows.layout import Message

TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What a template can raise by itself, on messages that it was not written for.
TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(
        self, source: str, variables: Mapping[str, str], where: str, source_with_tools: str | None = None
    ) -> None:
        """Compile `source`; `where` names it in messages. Raises DataError if it is no template.

        Some models have another template for conversations with tools: `source_with_tools`.
        """
        self._where = where
        environment = template_environment()
        try:
            self._plain = environment.from_string(source)
            self._with_tools = environment.from_string(source_with_tools) if source_with_tools else self._plain
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"{where}: not a chat template that can be used: {_shown(error)}") from error
        # What every rendering sees, put together once.
        self._variables = {**self._plain.globals, "documents": None, **variables}

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """The template of the model in `folder`: chat_template.jinja, else that of tokenizer_config.json.

        Raises DataError if there is none or it cannot be read.
        """
        config = read_tokenizer_config(folder)
        source, with_tools, where = _sources(folder, config)
        if not source:
            raise DataError(f"{folder}: has no chat template ({TEMPLATE_NAME}); take a model that has one, or add it")
        return cls(source, special_tokens(config), where, with_tools)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of `messages`, as `apply_chat_template(tokenize=False)` gives it. Raises DataError."""
        template = self._plain if tools is None else self._with_tools
        seen = {
            **self._variables,
            "messages": [_as_templates_see(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            text = "".join(template.root_render_func(template.new_context(seen, shared=True)))
            text.encode()  # half a surrogate pair is no text
        except TEMPLATE_FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{self._where}: the chat template fails on messages of {roles}: {_shown(error)}"
            ) from error
        return text


def has_template(folder: Path) -> bool:
    """Whether the model in `folder` brings a chat template; raw text can be learned without. Raises DataError."""
    return bool(_sources(folder, read_tokenizer_config(folder))[0])


def _sources(folder: Path, config: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """The template, empty if there is none; another for conversations with tools; and where it stands."""
    path = folder / TEMPLATE_NAME
    if path.is_file():
        return _read(path), None, str(path)
    named = _named_templates(config.get("chat_template"))
    return named.get("default", ""), named.get("tool_use"), str(folder / TOKENIZER_CONFIG_NAME)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the chat template ({_shown(error)})") from error


def _shown(error: Exception) -> str:
    """What a template says of itself, in one line that moves no cursor."""
    return shortened(str(error), 500)


def _as_templates_see(message: Message) -> Message:
    """`message` without what is null, and its thinking by the other name that templates know it by as well."""
    seen = {key: value for key, value in message.items() if value is not None}
    return {"thinking": seen["reasoning_content"], **seen} if "reasoning_content" in seen else seen


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of the model in `folder`, or nothing if it has none. Raises DataError."""
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
    """The special tokens that a tokenizer_config.json names, by their role (`eos_token`, ...)."""
    tokens = {}
    for role in SPECIAL_TOKENS:
        token = config.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[role] = text
    return tokens


def _named_templates(value: Any) -> dict[str, str]:
    """Older models keep one template as text, or several by name."""
    if isinstance(value, str):
        return {"default": value}
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    return {
        item["name"]: item["template"]
        for item in items
        if isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
    }
