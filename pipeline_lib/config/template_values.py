"""What `tokenize` gives to chat templates: tools, and variables that the template reads."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

# The tools of `tokenize.tools`: what is no function's JSON schema is refused before anything runs.
#
# The tokenize stage reads them as it reads those of a row, and takes what is let through here.

_EXPECTED = (
    'expected {"name": ..., "parameters": ...} or {"type": "function", "function": {"name": ...}}'
)


def _as_json_text(value: Any) -> Any:
    """`value` as JSON text. Raises ValueError; its message may follow the value or stand alone."""
    tool = _object(value)
    if tool is None:
        raise ValueError(f"is no object: {_EXPECTED}")
    function: dict[str, Any] | None = tool
    if "function" in tool:
        function = _object(tool["function"])
        if function is None or tool.get("type", "function") != "function":
            raise ValueError(f"is no function: {_EXPECTED}")
    name = function.get("name") if function else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"has no `name`: {_EXPECTED}")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(value: Any) -> dict[str, Any] | None:
    """An object, or the one that a JSON text holds; None if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


# Kept as JSON text: a spec is written with sorted keys, and the model is shown a tool's in the
# order they were given.
Tool = Annotated[str, BeforeValidator(_as_json_text), WithJsonSchema({"type": "object"})]


# The variables of a chat template (`tokenize.chat_template_kwargs`): what is set elsewhere is
# refused here. What the template does not read is refused when it is loaded.

SET_ELSEWHERE = {
    "enable_thinking": "it is on where an answer has thinking; see tokenize.thinking and "
    "tokenize.prompt_thinking",
    "messages": "the rows of data.train are the messages",
    "tools": "set tokenize.tools",
    "documents": "write their text into the messages",
    "add_generation_prompt": "it belongs to prompts, and each answer is rendered after its prompt",
}


def _as_variable(value: Any) -> bool | int | str:
    """Return `value`, which a chat template may take.

    Raises ValueError; its message may follow the value.
    """
    if not isinstance(value, (bool, int, str)):
        raise ValueError(
            "is no value of a template variable: expected true, false, a whole number or text"
        )
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
        raise ValueError(
            "is text, and templates do not take it for a truth value: write true or false without "
            "quotes"
        )
    return value


def free_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Return `given`. Raises ValueError if one of the variables is set elsewhere."""
    for name in given:
        if name in SET_ELSEWHERE:
            raise ValueError(f"`{name}` cannot be set here: {SET_ELSEWHERE[name]}")
    return given


# Any: of a union, each member would say by itself that a value does not fit.
Variable = Annotated[
    Any,
    BeforeValidator(_as_variable),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer"}, {"type": "string"}]}),
]
