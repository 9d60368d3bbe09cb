"""Tools and calls of them, in the one form in which an OpenAI-compatible server hands them to a chat template.

Rows have them in many forms: arguments as an object or as JSON text, calls and schemas with and without
{"type": "function", "function": ...} around them.
"""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.data.rows.conversation import OPENS_THINKING, BadRow, Reason, type_name
from pipeline_lib.data.rows.fields import Fields, as_object, parsed

# What others call the arguments of a call; `parameters` beside arguments are the schema of the function.
_OTHER_ARGUMENTS = ("parameters", "args", "kwargs", "params", "input")


def tools_of(row: Fields) -> list[dict[str, Any]] | None:
    """The JSON schemas of the tools that `row` brings; None if it brings none. Raises BadRow."""
    tools = []
    for number, item in enumerate(row.items("tools")):
        where = f"{row.shown('tools')}[{number}]"
        tool = as_object(item, where)
        if "function" in tool:
            _check_type(tool, where)
            function = as_object(tool["function"], f"{where}.function")
            tool = {**tool, "type": "function", "function": function}
        else:
            function = tool
            tool = {"type": "function", "function": function}
        _name_of(function, where)
        tools.append(tool)
    return tools or None


def conversation_tools(row: Fields) -> list[dict[str, Any]] | None:
    """The tools of a row, which may stand in its first turn, the system's. Raises BadRow if both have other ones."""
    tools = tools_of(row)
    for _, turn in row.turns[:1]:
        of_turn = tools_of(turn)
        if tools and of_turn and of_turn != tools:
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown('tools')}: differ from the `tools` of the row; remove one")
        tools = tools or of_turn
    return tools


def calls_of(turn: Fields) -> list[dict[str, Any]]:
    """The calls under `tool_calls` of a turn, in order; empty if there are none. Raises BadRow."""
    return [
        _call(item, f"{turn.shown('tool_calls')}[{number}]") for number, item in enumerate(turn.items("tool_calls"))
    ]


def calls_in(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls in the turn of a role that only calls: one {"name", "arguments"} or a list. Raises BadRow."""
    if isinstance(value, str) and value.lstrip().startswith(OPENS_THINKING):
        remedy = f"write it as reasoning_content of the turn, and the calls alone as {where}"
        raise BadRow(Reason.BAD_VALUE, f"{where}: holds thinking ({OPENS_THINKING}) beside its calls: {remedy}")
    value = parsed(value, where)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise BadRow(Reason.EMPTY, f"{where}: calls no tool")
    return [_call(item, where if calls is not value else f"{where}[{number}]") for number, item in enumerate(calls)]


def _call(item: Any, where: str) -> dict[str, Any]:
    call = as_object(item, where)
    if "function" in call:
        _check_type(call, where)
        outer, call = call, as_object(call["function"], f"{where}.function")
        _refuse_misplaced(call, outer, ("arguments", *_OTHER_ARGUMENTS), where)
    _refuse_misplaced(call, call, _OTHER_ARGUMENTS, where)
    name = _name_of(call, where)
    # No arguments at all are written as null, as an empty text or not at all.
    arguments = as_object(call.get("arguments") or {}, f"{where}.arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse_misplaced(call: Mapping[str, Any], holder: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise BadRow if `call` has no arguments, and `holder` has them under one of the `keys`."""
    found = None if call.get("arguments") else next((key for key in keys if holder.get(key)), None)
    if found is not None:
        raise BadRow(Reason.BAD_VALUE, f"{where}.{found}: not read; write it as `arguments` beside the function's name")


def _check_type(holder: dict[str, Any], where: str) -> None:
    if holder.get("type", "function") != "function":
        raise BadRow(Reason.BAD_VALUE, f"{where}.type: {holder['type']!r:.40}; only functions are known")


def _name_of(function: dict[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        found = "an empty text" if isinstance(name, str) else type_name(name)
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected the name of a function, found {found}")
    return name
