"""The tools of `tokenize.tools`: what is no function's JSON schema is refused before anything runs.

The tokenize stage reads them as it reads those of a row, and takes what is let through here.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_EXPECTED = 'expected {"name": ..., "parameters": ...} or {"type": "function", "function": {"name": ...}}'


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


# Kept as JSON text: a spec is written with sorted keys, and the model is shown a tool's in the order they were given.
Tool = Annotated[str, BeforeValidator(_as_json_text), WithJsonSchema({"type": "object"})]
