import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import Conversation, Reason, Text
from pipeline_lib.data.layouts import Layout
from pipeline_lib.data.read_csv import records
from tests.data.corpus_rows import read

ALPACA = Layout("alpaca")
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
@pytest.mark.parametrize("mark", [b"", read_json.BOM])
def test_quotes_newlines_and_blank_lines_are_understood(
    tmp_path: Path, name: str, mark: bytes
) -> None:
    content = mark + b'instruction,output\r\n"a, ""b""\nc",d\r\n\r\n"e",\xe4\xbd\xa0\r\nf,"g"'
    good, refused = read(write(tmp_path / name, content), ALPACA)

    assert [
        [message["content"] for message in row.messages]
        for row in good
        if isinstance(row, Conversation)
    ] == [
        ['a, "b"\nc', "d"],
        ["e", "你"],
        ["f", "g"],
    ]
    assert refused == []


def test_lists_come_as_json_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    tools = [{"name": "now"}]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "tools"])
        writer.writerow([json.dumps(MESSAGES), json.dumps(tools)])
        writer.writerow([json.dumps(MESSAGES), ""])
        writer.writerow(["[", ""])
    good, refused = read(path)

    assert good == [
        Conversation(MESSAGES, [{"type": "function", "function": {"name": "now"}}], (1,)),
        Conversation(MESSAGES, None, (1,)),
    ]
    assert [row.reason for row in refused] == [Reason.BAD_VALUE]


BAD_RECORDS: dict[bytes, tuple[Reason, str]] = {
    b"a": (Reason.BAD_CSV, "1 fields where the header has 2"),
    b'"a"x,b': (Reason.BAD_CSV, "expected after"),
    b"a,\xff": (Reason.BAD_UTF8, "field 2 is not UTF-8"),
    b"a,b\0": (Reason.BAD_TEXT, "NUL"),
    b"a,": (Reason.EMPTY, "the assistant's message has no text"),
    b"a,b\rc": (Reason.BAD_CSV, "new-line character"),
}


def test_a_bad_record_costs_no_good_one(tmp_path: Path) -> None:
    content = b"instruction,output\n" + b"".join(
        b'"good\nquestion",b\n' + bad + b"\n" for bad in BAD_RECORDS
    )
    good, refused = read(write(tmp_path / "rows.csv", content), ALPACA)

    assert len(good) == len(BAD_RECORDS)
    assert [row.reason for row in refused] == [reason for reason, _ in BAD_RECORDS.values()]
    assert [row.place.line for row in refused] == [
        4 + 3 * number for number in range(len(BAD_RECORDS))
    ]
    for row, (bad, (_, detail)) in zip(refused, BAD_RECORDS.items(), strict=True):
        assert detail in row.detail
        assert row.place.byte_offset is not None and content[row.place.byte_offset :].startswith(
            bad
        )
        json.dumps(row.to_json(), ensure_ascii=False).encode()


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_another_separator_is_told(tmp_path: Path, mark: str) -> None:
    content = f"instruction{mark}output\na{mark}b\n".encode()
    with pytest.raises(
        DataError, match=r"rows\.csv:1: the header is one column, .*: it is probably separated by '"
    ):
        read(write(tmp_path / "rows.csv", content), ALPACA)


def test_lines_that_end_in_cr_alone_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"rows\.csv:1: cannot read the header: its lines end in CR alone, .* end in LF",
    ):
        read(write(tmp_path / "rows.csv", b"instruction,output\ra,b\rc,d\r"), ALPACA)


def test_another_encoding_is_told(tmp_path: Path) -> None:
    good, refused = read(
        write(tmp_path / "rows.csv", "instruction,output\n你好吗,很好\n".encode("gbk")), ALPACA
    )
    assert good == [] and refused[0].detail.endswith(
        "the file is probably GBK: iconv -f GB18030 -t UTF-8"
    )
    with pytest.raises(
        DataError, match="cannot read the header: .* is not UTF-8; the file is probably GBK"
    ):
        read(write(tmp_path / "rows.csv", "问题,回答\n你好吗,很好\n".encode("gbk")), ALPACA)


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    content = b"instruction,output,,\r\na,b,,\r\na,b and,more,\r\nc,d, ,\r\n"
    good, refused = read(write(tmp_path / "rows.csv", content), ALPACA)

    assert [row.messages[1]["content"] for row in good if isinstance(row, Conversation)] == [
        "b",
        "d",
    ]
    assert [(row.reason, row.place.line) for row in refused] == [(Reason.BAD_CSV, 3)]
    assert refused[0].detail == "'more' stands in a column without a name; name it or empty it"


def test_one_column_without_a_name_may_number_the_rows(tmp_path: Path) -> None:
    good, refused = read(
        write(tmp_path / "rows.csv", b",instruction,output\n0,a,b\n1,c,d\n"), ALPACA
    )

    assert (len(good), refused) == (2, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'text\na\n"b\nc\nd\n',
            r"rows\.csv:3: unexpected end of data up to line 5: cannot tell where the row ends",
        ),
        (
            b'text\na\n"b\nc\n"d\ne"\nf\n',
            r"rows\.csv:3: ',' expected after '\"' up to line 5: .*; mend its quotes",
        ),
        (b'text\na\n"b"c"\nd\n', r"rows\.csv:3: ',' expected after '\"': cannot tell"),
    ],
)
def test_quotes_that_do_not_match_are_an_error_and_never_make_up_rows(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "rows.csv", content), Layout("text"))


def test_records_of_any_length_within_the_limit_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"text\n" + b"x" * 1_000_000 + b"\nshort\n" + b'"' + b"y\n" * 200_000 + b'"\nlast\n'
    path = write(tmp_path / "rows.csv", content)
    assert [len(row.text) for row in read(path, Layout("text"))[0] if isinstance(row, Text)] == [
        10**6,
        5,
        400_000,
        4,
    ]

    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 999_999)
    with pytest.raises(
        DataError, match=r"rows\.csv:2: a row of more than 999999 bytes: cannot tell"
    ):
        read(path, Layout("text"))
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 399_999)
    path.write_bytes(content.replace(b"x" * 1_000_000, b"x"))
    with pytest.raises(
        DataError, match=r"rows\.csv:4: a row of more than 399999 bytes up to line 200003"
    ):
        read(path, Layout("text"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\n", r"rows\.csv: holds no rows"),
        (b"a,text,a\nb,c,d\n", r"rows\.csv:1: the header has 'a' twice"),
        (b"a,text,,a,\nb,c,,d,\n", r"rows\.csv:1: the header has 'a' twice"),
        (
            b"t\xff\nb\n",
            r"rows\.csv:1: cannot read the header: .* not UTF-8; .*; save the file as csv in UTF-8",
        ),
        (
            "问题,回答\n你,好\n".encode("utf-16-le"),
            r"rows\.csv: the header holds .* UTF-16: iconv -f UTF-16LE -t UTF-8",
        ),
        (
            "问题,回答\n你,好\n".encode("utf-16-be"),
            r"rows\.csv: the header holds .* UTF-16: iconv -f UTF-16BE -t UTF-8",
        ),
        ("text\nb\n".encode("utf-16"), r"rows\.csv: the text is UTF-16; convert the file to UTF-8"),
        (b'"text\nb\n', r"rows\.csv:1: unexpected end of data up to line 2: cannot tell"),
    ],
)
def test_a_file_without_usable_header_is_one_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "rows.csv", content), Layout("text"))


FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=5), st.sampled_from(["\n", "\r\n"]))
def test_whatever_was_written_as_csv_is_read_as_it_was(
    rows: list[tuple[str, str]], end: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *rows])

    read_rows = list(records(io.BytesIO(text.getvalue().encode()), "rows.csv"))
    assert [row.value for row in read_rows] == [{"a": first, "b": second} for first, second in rows]
    assert [row.bad for row in read_rows] == [None] * len(rows)
