"""Rows for the tests of readers: a good one, and every kind of bad one (reliability fault F20)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline_lib.data.conversations import BadRow, Content, Reason
from pipeline_lib.data.layouts import Layout, to_content
from pipeline_lib.data.read_files import CorpusFile, Rejected, rejected, value_of
from pipeline_lib.data.read_json import RawRow

GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
}
GOOD_LINE = json.dumps(GOOD).encode()


def _chat(*turns: str) -> bytes:
    """A row of `role=content` turns; a content of {...} or [...] stands as it is."""
    pieces = []
    for turn in turns:
        role, _, content = turn.partition("=")
        text = content if content[:1] in ("{", "[", "n") else f'"{content}"'
        pieces.append(f'{{"role": "{role}", "content": {text}}}')
    return f'{{"messages": [{", ".join(pieces)}]}}'.encode()


def _call(arguments: str) -> bytes:
    calls = f'[{{"function": {{"name": "f", "arguments": {arguments}}}}}]'
    turn = f'{{"role": "assistant", "content": null, "tool_calls": {calls}}}'
    return f'{{"messages": [{{"role": "user", "content": "a"}}, {turn}]}}'.encode()


# Rows that are no JSON, so that an array which holds one cannot be read on.
BROKEN: dict[str, tuple[bytes, Reason]] = {
    "cut": (b'{"messages": [', Reason.BAD_JSON),
    "cut within text": (b'{"messages": "a', Reason.BAD_JSON),
    "no JSON at all": (b"hello", Reason.BAD_JSON),
    "single quotes": (b"{'messages': []}", Reason.BAD_JSON),
    "no value": (b'{"messages": }', Reason.BAD_JSON),
    "trailing comma": (b'{"messages": [],}', Reason.BAD_JSON),
    "bad escape": (b'{"messages": "\\x"}', Reason.BAD_JSON),
    "two rows in one": (GOOD_LINE + GOOD_LINE, Reason.BAD_JSON),
    "zeros of a crashed disk": (b"\0\0\0\0", Reason.BAD_JSON),
    "nested lists": (b"[" * 100_000, Reason.BAD_JSON),
    "nested objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, Reason.BAD_JSON),
    "UTF-16": ('{"a": "b"}'.encode("utf-16-le"), Reason.BAD_JSON),
    "not UTF-8 and cut": (b'{"messages": "\xe4\xbd', Reason.BAD_UTF8),
}
# Rows that are JSON enough to find their end.
BAD: dict[str, tuple[bytes, Reason]] = {
    "NaN": (b'{"messages": NaN}', Reason.BAD_JSON),
    "infinity": (b'{"messages": -Infinity}', Reason.BAD_JSON),
    "endless number": (b'{"messages": ' + b"9" * 5000 + b"}", Reason.BAD_JSON),
    "tab within text": (b'{"messages": "a\tb"}', Reason.BAD_JSON),
    "NUL within text": (b'{"messages": "a\0b"}', Reason.BAD_JSON),
    "key twice": (GOOD_LINE[:-1] + b', "messages": []}', Reason.BAD_JSON),
    "key twice within": (b'{"messages": [{"role": "user", "role": "assistant"}]}', Reason.BAD_JSON),
    "not UTF-8": (b'{"messages": "\xff\xfe"}', Reason.BAD_UTF8),
    "Latin-1": ('{"messages": "café"}'.encode("latin-1"), Reason.BAD_UTF8),
    "surrogate as bytes": (b'{"messages": "\xed\xa0\x80"}', Reason.BAD_UTF8),
    "list": (b"[]", Reason.NOT_AN_OBJECT),
    "null": (b"null", Reason.NOT_AN_OBJECT),
    "number": (b"17", Reason.NOT_AN_OBJECT),
    "text": (b'"hello"', Reason.NOT_AN_OBJECT),
    "no keys": (b"{}", Reason.WRONG_FORMAT),
    "another format": (b'{"instruction": "a", "output": "b"}', Reason.WRONG_FORMAT),
    "turns are an object": (b'{"messages": {}}', Reason.BAD_VALUE),
    "turn is text": (b'{"messages": ["hello"]}', Reason.BAD_VALUE),
    "no turns": (b'{"messages": []}', Reason.EMPTY),
    "unknown role": (_chat("user=a", "bot=b"), Reason.BAD_VALUE),
    "null content": (_chat("user=null", "assistant=b"), Reason.BAD_VALUE),
    "picture": (_chat('user=[{"type": "image_url"}]', "assistant=b"), Reason.BAD_VALUE),
    "blank question": (_chat("user= ", "assistant=b"), Reason.EMPTY),
    "empty answer": (_chat("user=a", "assistant="), Reason.EMPTY),
    "no assistant": (_chat("user=a"), Reason.NO_ASSISTANT_TURN),
    "assistant first": (_chat("assistant=a", "user=b"), Reason.BAD_ROLE_ORDER),
    "user twice": (_chat("user=a", "user=b", "assistant=c"), Reason.BAD_ROLE_ORDER),
    "late system": (_chat("user=a", "system=b", "assistant=c"), Reason.BAD_ROLE_ORDER),
    "result without call": (_chat("user=a", "assistant=b", "tool=c"), Reason.BAD_ROLE_ORDER),
    "lone surrogate": (_chat("user=\\ud800", "assistant=b"), Reason.BAD_TEXT),
    "escaped NUL": (_chat("user=\\u0000", "assistant=b"), Reason.BAD_TEXT),
    "arguments are no JSON": (_call('"{"'), Reason.BAD_VALUE),
    "arguments are endless": (_call('{"a": 1e999}'), Reason.BAD_VALUE),
    "thousands of turns": (_chat(*["user=a", "assistant=b"] * 1000), Reason.TOO_MANY_TURNS),
}


def understand(row: RawRow, layout: Layout) -> Content | Rejected:
    """What the stage makes of `row`."""
    try:
        return to_content(value_of(row), layout)
    except BadRow as bad:
        return rejected(row, bad)


def read(path: Path, layout: Layout | None = None) -> tuple[list[Content], list[Rejected]]:
    """All rows of `path`, by default of messages: those that can be used, and those that cannot."""
    layout = layout or Layout("messages")
    rows = [understand(row, layout) for row in CorpusFile(path)]
    good = [row for row in rows if not isinstance(row, Rejected)]
    return good, [row for row in rows if isinstance(row, Rejected)]


# Prints how far the memory of a process grows while it reads, beyond what importing and a small
# file take. The peak is that of /proc: the one of getrusage begins with the memory of the process
# that started this one.
MEASURE = """
import sys
from pathlib import Path
from pipeline_lib.data.read_files import CorpusFile, value_of
small, large = map(Path, sys.argv[1:])
def read(path):
    return sum(len(value_of(row)["text"]) for row in CorpusFile(path))
def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
read(small)
before = peak_bytes()
characters = read(large)
print(characters, peak_bytes() - before)
"""


def memory_growth(small: Path, large: Path) -> tuple[int, int]:
    """Characters of all texts of `large`, and by how many bytes a process that reads them grows.

    It reads `small` first, so that what every reading takes is not counted.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large], capture_output=True, text=True, check=True
    )
    characters, growth_bytes = map(int, done.stdout.split())
    return characters, growth_bytes
