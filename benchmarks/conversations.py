"""Conversations that the project makes, in shapes of real data: plain, thinking, tools, very long.

Deterministic: the same numbers give the same rows. Every answer can be checked by hand, so that a
reader of the decoded samples sees at once whether something is missing. Used by tests and
benchmarks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.data.documents import bits, key_of

Row = dict[str, Any]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Adds or multiplies two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "operation": {"type": "string", "enum": ["add", "multiply"]},
                "a": {"type": "integer"},
                "b": {"type": "integer"},
            },
            "required": ["operation", "a", "b"],
        },
    },
}
SUBJECTS = ("apples", "steps", "tokens", "letters", "bricks", "pages", "birds", "coins")


def plain(number: int) -> Row:
    """One short question and its answer, in alpaca's layout: tens of tokens."""
    a, b, subject = _draw(number)
    return {
        "instruction": f"I have {a} {subject} and get {b} more.",
        "input": "How many are there now?",
        "output": f"{a} and {b} make {a + b} {subject}.",
    }


def thinking(number: int) -> Row:
    """Three turns, two of which think before they answer, as OpenAI's messages."""
    a, b, subject = _draw(number)
    return {
        "messages": [
            {"role": "system", "content": "You count carefully."},
            {
                "role": "user",
                "content": f"There are {a} boxes with {b} {subject} each. How many {subject} are "
                "there?",
            },
            {
                "role": "assistant",
                "reasoning_content": f"Boxes: {a}. In each: {b}. {a} * {b} = {a * b}.",
                "content": f"There are {a * b} {subject}.",
            },
            {"role": "user", "content": f"And if I take away {a}?"},
            {
                "role": "assistant",
                "reasoning_content": f"From {a * b} I take {a}: {a * b - a}.",
                "content": f"Then {a * b - a} {subject} are left.",
            },
            {"role": "user", "content": "Thank you!"},
            {"role": "assistant", "content": "You are welcome."},
        ]
    }


def tools(number: int) -> Row:
    """A question that takes two calls of a tool, in ShareGPT's layout."""
    a, b, subject = _draw(number)
    first = {"name": "calculate", "arguments": {"operation": "multiply", "a": a, "b": b}}
    second = {"name": "calculate", "arguments": {"operation": "add", "a": a * b, "b": b}}
    turns = [
        ("human", f"{a} rows of {b} {subject} and one more row: how many {subject}?"),
        ("function_call", json.dumps(first)),
        ("observation", json.dumps({"result": a * b})),
        ("function_call", json.dumps(second)),
        ("observation", json.dumps({"result": a * b + b})),
        ("gpt", f"{a * b + b} {subject}."),
    ]
    return {
        "conversations": [{"from": who, "value": text} for who, text in turns],
        "tools": json.dumps([CALCULATOR["function"]]),
    }


def long(number: int) -> Row:
    """A list of a few thousand numbers to repeat in reverse: longer than most samples may be."""
    count = 2000 + number % 7 * 500
    numbers = [str(value % 1000) for value in bits(key_of(2, number), count).tolist()]
    return {
        "prompt": "Reverse this list: " + " ".join(numbers),
        "completion": " ".join(reversed(numbers)),
    }


def essay(number: int) -> Row:
    """A question with an answer of some 300 tokens."""
    a, b, subject = _draw(number)
    lines = [
        f"After {day} days there are {a + day * b} {subject}, {b} more than the day before."
        for day in range(16)
    ]
    return {
        "messages": [
            {
                "role": "user",
                "content": f"I have {a} {subject} and get {b} every day. Count them for me, day by "
                "day.",
            },
            {"role": "assistant", "content": "\n".join(lines)},
        ]
    }


KINDS: Mapping[str, Callable[[int], Row]] = {
    "plain": plain,
    "thinking": thinking,
    "tools": tools,
    "long": long,
    "essay": essay,
}


def rows(kind: str, count: int) -> Iterator[Row]:
    """The first `count` rows of `kind`, all different."""
    return (KINDS[kind](number) for number in range(count))


def write_rows(path: Path, kind: str, count: int) -> Path:
    """The same as a .jsonl file."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(kind, count))
    return path


def _draw(number: int) -> tuple[int, int, str]:
    """Two numbers and a subject; the first number alone tells all rows apart."""
    value = int(bits(key_of(1, number), 1)[0])
    return 2 + number, 2 + value % 97, SUBJECTS[value // 97 % len(SUBJECTS)]
