"""Strict JSON parsing: no NaN, and no duplicate keys in an object.

The json module keeps the last of duplicate keys, so a row would silently lose a value. One decoder
serves the whole process, because json.loads with options builds a new one at every call.
"""

import json
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """Return the value of the JSON `text`.

    Raises ValueError with a one-line reason, also for deep nesting.
    """
    try:
        return _STRICT.decode(text)
    except json.JSONDecodeError as error:
        place = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno}, column {error.colno}"
        )
        raise ValueError(f"{error.msg.removesuffix(' at')} at {place}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            "a number of thousands of digits" if "digits" in reason else reason
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
