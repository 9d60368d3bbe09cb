import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.data import corpus
from pipeline_lib.data.corpus import Conversation, CorpusFile, Rejected
from pipeline_lib.data.rows import Reason

GOOD: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
GOOD_LINE = json.dumps(GOOD).encode()

BAD_LINES: list[tuple[bytes, Reason]] = [
    (b'{"messages": [', Reason.BAD_JSON),
    (b"hello", Reason.BAD_JSON),
    (b"{'messages': []}", Reason.BAD_JSON),
    (GOOD_LINE + b",", Reason.BAD_JSON),
    (GOOD_LINE + GOOD_LINE, Reason.BAD_JSON),
    (b'{"messages": NaN}', Reason.BAD_JSON),
    (b'{"messages": -Infinity}', Reason.BAD_JSON),
    (b'{"messages": ' + b"9" * 5000 + b"}", Reason.BAD_JSON),
    (b'{"messages": "a\tb"}', Reason.BAD_JSON),
    (b"\0\0\0\0", Reason.BAD_JSON),
    (b"[" * 100_000, Reason.BAD_JSON),
    (b'{"a":' * 100_000, Reason.BAD_JSON),
    (b'{"messages": "\xff\xfe"}', Reason.BAD_UTF8),
    (b'{"messages": "\xe4\xbd', Reason.BAD_UTF8),
    (b"[]", Reason.NOT_AN_OBJECT),
    (b"null", Reason.NOT_AN_OBJECT),
    (b"17", Reason.NOT_AN_OBJECT),
    (b"{}", Reason.WRONG_FORMAT),
    (b'{"instruction": "a", "output": "b"}', Reason.WRONG_FORMAT),
    (b'{"messages": {}}', Reason.BAD_VALUE),
    (b'{"messages": []}', Reason.EMPTY),
    (b'{"messages": [{"role": "user", "content": "a"}]}', Reason.NO_ASSISTANT_TURN),
    (b'{"messages": [{"role": "assistant", "content": "a"}]}', Reason.BAD_ROLE_ORDER),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}', Reason.BAD_TEXT),
    (b'{"messages": [{"role": "user", "content": "\\u0000"}, {"role": "assistant", "content": "b"}]}', Reason.BAD_TEXT),
]


def read(path: Path) -> tuple[list[Conversation], list[Rejected]]:
    rows = list(CorpusFile(path))
    return (
        [row for row in rows if isinstance(row, Conversation)],
        [row for row in rows if isinstance(row, Rejected)],
    )


def test_every_bad_line_is_accounted_for_and_costs_no_good_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [GOOD_LINE]
    for bad, _ in BAD_LINES:
        lines += [bad, GOOD_LINE]
    path.write_bytes(b"\n".join(lines))  # and no newline at the end
    good, rejected = read(path)
    assert len(good) == len(BAD_LINES) + 1
    assert [row.reason for row in rejected] == [reason for _, reason in BAD_LINES]
    assert [row.place.line for row in rejected] == [2 * number + 2 for number in range(len(BAD_LINES))]
    content = path.read_bytes()
    for row, (bad, _) in zip(rejected, BAD_LINES, strict=True):
        assert row.place.byte_offset is not None
        assert content[row.place.byte_offset :].startswith(bad)
        assert len(row.excerpt) <= 200
        assert json.loads(json.dumps(row.to_json(), ensure_ascii=False).encode())["line"] == row.place.line


@pytest.mark.parametrize(("bad", "reason"), BAD_LINES)
def test_the_same_in_an_array_where_it_is_json(tmp_path: Path, bad: bytes, reason: Reason) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"[" + GOOD_LINE + b",\n" + bad + b"]")
    if reason in (Reason.BAD_JSON, Reason.BAD_UTF8):
        with pytest.raises(DataError, match=r"rows\.json"):
            list(CorpusFile(path))
        return
    good, rejected = read(path)
    assert len(good) == 1
    assert [(row.reason, row.place.row, row.place.line) for row in rejected] == [(reason, 2, None)]
    assert "line" not in rejected[0].to_json()


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD_LINE + b"\n" + GOOD_LINE,
        GOOD_LINE + b"\r\n" + GOOD_LINE + b"\r\n",
        b"\n\n" + GOOD_LINE + b"\n  \n" + GOOD_LINE + b"\n\n",
    ],
    ids=["byte order mark", "CRLF", "blank lines"],
)
def test_harmless_differences_are_harmless(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    good, rejected = read(path)
    assert (len(good), rejected) == (2, [])
    assert good[0].messages == GOOD["messages"]


def test_an_array_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf[" + GOOD_LINE + b"]")
    assert len(read(path)[0]) == 1


def test_the_format_is_that_of_the_first_usable_row(jsonl: Callable[..., Path]) -> None:
    alpaca = {"instruction": "hello", "output": "hi"}
    path = jsonl([{"messages": []}, {"prompt": 1}, alpaca, GOOD, alpaca])
    file = CorpusFile(path)
    assert Counter(type(row).__name__ for row in file) == {"Rejected": 3, "Conversation": 2}
    assert (file.format, file.rows, file.fraction_read) == ("alpaca", 5, 1.0)


def test_a_given_format_is_kept(jsonl: Callable[..., Path]) -> None:
    path = jsonl([GOOD, {"instruction": "hello", "output": "hi"}])
    rows = list(CorpusFile(path, "alpaca"))
    assert isinstance(rows[0], Rejected) and rows[0].reason == Reason.WRONG_FORMAT
    assert isinstance(rows[1], Conversation)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"[]", "holds no rows"),
        (b'{"messages": []}', "expected an array of rows, found an object"),
        (b'[\n{"a": 1},\n{"a": }\n]', r"rows\.json:3:7: not JSON: Expecting value"),
        (b'[{"a": 1}', r"rows\.json:1:10: not JSON"),
        (b'{"a": 1}\n{"a": 2}\n', r"rows\.json:2:1: not JSON: Extra data; if it holds one object a line, call it"),
        (b'[\n"\xff"]', r"rows\.json:2:2: not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[NaN]", "NaN is not JSON"),
    ],
)
def test_a_corrupt_array_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(CorpusFile(path))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_lines_without_a_row_are_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.jsonl: holds no rows"):
        list(CorpusFile(path))


def test_a_line_without_end_is_rejected_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 4500 + b"\n" + GOOD_LINE + b"\n" + b"x" * 1000)
    good, rejected = read(path)
    assert [row.place.byte_offset for row in good] == [4501]
    assert [(row.reason, row.place.line) for row in rejected] == [
        (Reason.LINE_TOO_LONG, 1),
        (Reason.LINE_TOO_LONG, 3),
    ]


def test_lines_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"messages": [*GOOD["messages"], {"role": "user", "content": "x" * 2000}]}).encode() + b"\n"
    with path.open("wb") as file:
        for _ in range(10_000):
            file.write(row)
    tracemalloc.start()
    try:
        rows = sum(1 for _ in CorpusFile(path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == 10_000
    assert path.stat().st_size > 20_000_000 and peak_bytes < 1_000_000
