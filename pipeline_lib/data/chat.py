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
from pipeline_lib.data.rows import Message
from pipeline_lib.data.sandbox import template_environment

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

    def __init__(self, source: str, variables: Mapping[str, str], where: str) -> None:
        """Compile `source`; `where` names it in messages. Raises DataError if it is no template."""
        self._variables = dict(variables)
        self._where = where
        try:
            self._template = template_environment().from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"{where}: not a chat template that can be used: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """The template of the model in `folder`: chat_template.jinja, else that of tokenizer_config.json.

        Raises DataError if there is none or it cannot be read.
        """
        config = read_tokenizer_config(folder)
        path = folder / TEMPLATE_NAME
        if path.is_file():
            source, where = path.read_text(encoding="utf-8"), str(path)
        else:
            source, where = _default_template(config.get("chat_template")), str(folder / TOKENIZER_CONFIG_NAME)
        if not source:
            raise DataError(f"{folder}: has no chat template ({TEMPLATE_NAME}); take a model that has one, or add it")
        return cls(source, special_tokens(config), where)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of `messages`, as `apply_chat_template(tokenize=False)` gives it. Raises DataError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **variables},
            )
        except TEMPLATE_FAILURES as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"{self._where}: the chat template fails on messages of {roles}: {error}") from error


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of the model in `folder`, or nothing if it has none. Raises DataError."""
    path = folder / TOKENIZER_CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
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


def _default_template(value: Any) -> str:
    """Older models keep one template as text, or several by name."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
