"""Tools and tool calls, in the form that an OpenAI-compatible server passes to a template.

Rows have arguments as an object or as JSON text, and calls and schemas with or without an enclosing
{"type": "function", "function": ...}.
"""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.data.conversations import OPENS_THINKING, BadRow, Reason, type_name
from pipeline_lib.data.row_fields import Fields, as_object, parsed

# Other names for the arguments of a call; `parameters` beside `arguments` are the schema of the
# function.
# of a call, beside its function: they connect a call with its result
_CALL_KEYS = ("type", "id", "index")
_OTHER_ARGUMENTS = ("parameters", "args", "kwargs", "params", "input")


# Other names for the schema of a tool's arguments: Anthropic's, MCP's, and others, without `_` and
# in lower case.
_OTHER_SCHEMAS = frozenset(
    {"inputschema", "argsschema", "parametersjsonschema", "schema", "arguments", "args", "params"}
)


def tools_of(row: Fields) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools of `row`; None if it has none. Raises BadRow."""
    tools = []
    for number, item in enumerate(row.items("tools")):
        where = f"{row.shown('tools')}[{number}]"
        tool = as_object(item, where)
        if "function" in tool:
            _check_type(tool, where)
            where = f"{where}.function"
            function = as_object(tool["function"], where)
        else:
            function, tool = tool, {}
            if function.get("type") == "function":  # OpenAI's Responses API has it beside the name
                function = {key: value for key, value in function.items() if key != "type"}
        _name_of(function, where)
        tools.append({**tool, "type": "function", "function": _with_parsed_schema(function, where)})
    return tools or None


def _with_parsed_schema(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `function` with `parameters` as an object, as clients send it.

    Raises BadRow if they are anything else.
    """
    parameters = function.get("parameters")
    if parameters is None:
        for key, value in function.items():
            if key.replace("_", "").lower() in _OTHER_SCHEMAS and isinstance(value, (dict, str)):
                raise BadRow(
                    Reason.BAD_VALUE, f"{where}.{key}: not read; write the schema as `parameters`"
                )
        return function
    where = f"{where}.parameters"
    parameters = as_object(parameters, where)
    if isinstance(parameters.get("properties"), str):
        parameters = {
            **parameters,
            "properties": as_object(parameters["properties"], f"{where}.properties"),
        }
    return {**function, "parameters": parameters}


def conversation_tools(row: Fields) -> list[dict[str, Any]] | None:
    """Return the tools of a row or of its first turn.

    Raises BadRow if both have tools and they differ.
    """
    tools = tools_of(row)
    for _, turn in row.turns[:1]:
        of_turn = tools_of(turn)
        if tools and of_turn and of_turn != tools:
            raise BadRow(
                Reason.BAD_VALUE,
                f"{turn.shown('tools')}: differ from the `tools` of the row; remove one",
            )
        tools = tools or of_turn
    return tools


def calls_of(turn: Fields) -> list[dict[str, Any]]:
    """Return the calls under `tool_calls` of a turn, in order; empty if there are none.

    Raises BadRow.
    """
    where = turn.shown("tool_calls")
    place = turn.name_of("tool_calls")
    return [
        _call(turn, item, f"{where}[{number}]", f"{place}[]")
        for number, item in enumerate(turn.items("tool_calls"))
    ]


def calls_in(turn: Fields, key: str) -> list[dict[str, Any]]:
    """Return the calls of a `function_call` turn: one {"name", "arguments"} or a list of them.

    Raises BadRow.
    """
    value = turn.value(key)
    where = turn.shown(key)
    place = turn.name_of(key)
    if isinstance(value, str) and value.lstrip().startswith(OPENS_THINKING):
        remedy = f"write it as reasoning_content of the turn, and the calls alone as {where}"
        raise BadRow(
            Reason.BAD_VALUE,
            f"{where}: holds thinking ({OPENS_THINKING}) beside its calls: {remedy}",
        )
    value = parsed(value, where)
    if not isinstance(value, list):
        return [_call(turn, value, where, place)]
    if not value:
        raise BadRow(Reason.EMPTY, f"{where}: calls no tool")
    return [
        _call(turn, item, f"{where}[{number}]", f"{place}[]") for number, item in enumerate(value)
    ]


def _call(turn: Fields, item: Any, where: str, place: str) -> dict[str, Any]:
    call = as_object(item, where)
    if "function" in call:
        _check_type(call, where)
        outer = call
        call = as_object(call["function"], f"{where}.function")
        _refuse_misplaced(call, outer, ("arguments", *_OTHER_ARGUMENTS), where)
        turn.add_part(outer, where, place, ("function", *_CALL_KEYS))
        turn.add_part(call, f"{where}.function", f"{place}.function", ("name", "arguments"))
    else:
        turn.add_part(call, where, place, ("name", "arguments", *_CALL_KEYS))
    _refuse_misplaced(call, call, _OTHER_ARGUMENTS, where)
    name = _name_of(call, where)
    # A call without arguments has null, an empty text, or no key.
    arguments = as_object(call.get("arguments") or {}, f"{where}.arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse_misplaced(
    call: Mapping[str, Any], holder: Mapping[str, Any], keys: tuple[str, ...], where: str
) -> None:
    """Raise BadRow if `call` has no arguments but `holder` has a value under one of the `keys`."""
    found = None if call.get("arguments") else next((key for key in keys if holder.get(key)), None)
    if found is not None:
        raise BadRow(
            Reason.BAD_VALUE,
            f"{where}.{found}: not read; write it as `arguments` beside the function's name",
        )


def _check_type(holder: dict[str, Any], where: str) -> None:
    if holder.get("type", "function") != "function":
        raise BadRow(
            Reason.BAD_VALUE, f"{where}.type: {holder['type']!r:.40}; only functions are supported"
        )


def _name_of(function: dict[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        found = "an empty text" if isinstance(name, str) else type_name(name)
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected the name of a function, found {found}")
    return name
