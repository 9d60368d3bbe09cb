import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pipeline_lib.config.content import DATA_SUFFIXES
from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import BadRow, Conversation, Reason
from pipeline_lib.data.encodings import utf_16_name
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.read_files import CorpusFile, excerpt, rejected, value_of
from pipeline_lib.data.read_json import RawRow, RowPosition
from tests.data.conftest import SHARED
from tests.data.corpus_rows import BAD, BROKEN, GOOD, GOOD_LINE, memory_growth, read

KINDS = {**BROKEN, **BAD}
SIZE_BYTES = 60 << 20


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines and rows may have a thousand bytes."""
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.json.gz", "ROWS.JSONL"]
)
def test_every_bad_line_is_accounted_for_and_costs_no_good_one(tmp_path: Path, name: str) -> None:
    # and no newline at the end
    content = b"\n".join(line for bad, _ in KINDS.values() for line in (GOOD_LINE, bad))
    good, refused = read(write(tmp_path / name, content))

    assert len(good) == len(KINDS) >= 40
    assert [row.reason for row in refused] == [reason for _, reason in KINDS.values()]
    assert [row.place.line for row in refused] == [2 * number + 2 for number in range(len(KINDS))]
    for row, (bad, _) in zip(refused, KINDS.values(), strict=True):
        assert row.place.byte_offset is not None
        assert content[row.place.byte_offset :].startswith(bad)
        assert len(row.excerpt) <= 200 and row.detail
        entry = json.loads(json.dumps(row.to_json(), ensure_ascii=False).encode())
        assert (entry["file"], entry["line"]) == (row.place.file, row.place.line)


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz"])
def test_in_an_array_a_bad_row_costs_no_good_one(tmp_path: Path, name: str) -> None:
    content = b"[" + b",\n".join(row for bad, _ in BAD.values() for row in (GOOD_LINE, bad)) + b"]"
    good, refused = read(write(tmp_path / name, content))

    assert len(good) == len(BAD)
    assert [(row.reason, row.place.row) for row in refused] == [
        (reason, 2 * number + 2) for number, (_, reason) in enumerate(BAD.values())
    ]
    for row, (bad, _) in zip(refused, BAD.values(), strict=True):
        assert row.place.byte_offset is not None
        assert content[row.place.byte_offset :].startswith(bad)
        assert "line" not in row.to_json()


@pytest.mark.parametrize("kind", BROKEN)
def test_an_array_that_is_no_json_is_one_error_with_its_place(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "rows.json", b"[" + GOOD_LINE + b",\n" + BROKEN[kind][0] + b"]")
    with pytest.raises(DataError, match=r"rows\.json:2:\d+: not JSON: .*; mend the file"):
        read(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD_LINE + b"\n" + GOOD_LINE,
        GOOD_LINE + b"\r\n" + GOOD_LINE + b"\r\n",
        b"\n\n" + GOOD_LINE + b"\n  \n" + GOOD_LINE + b"\n\n",
        b'{"id": 1, ' + GOOD_LINE[1:] + b'\n{"id": 1, ' + GOOD_LINE[1:],
    ],
    ids=["byte order mark", "CRLF", "blank lines", "equal ids"],
)
def test_harmless_differences_are_harmless(tmp_path: Path, name: str, content: bytes) -> None:
    good, refused = read(write(tmp_path / name, content))

    assert good == [Conversation(GOOD["messages"], None, (1,))] * 2
    assert refused == []


def test_a_row_of_ten_megabytes_is_a_row(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x" * 10_000_000}, GOOD["messages"][1]]}
    for name, content in {
        "rows.jsonl": json.dumps(row),
        "rows.json": json.dumps([row, GOOD]),
    }.items():
        good, refused = read(write(tmp_path / name, content.encode()))
        assert isinstance(good[0], Conversation) and good[0].messages == row["messages"]
        assert refused == []


def test_a_line_without_end_is_refused_and_the_next_one_is_read(
    tmp_path: Path, short_lines: None
) -> None:
    content = b"x" * 4500 + b"\n" + GOOD_LINE + b"\n" + b"x" * 1000 + b"\n" + b"x" * 1001
    rows = list(CorpusFile(write(tmp_path / "rows.jsonl", content)))

    assert [row.place.byte_offset for row in rows] == [
        0,
        4501,
        4502 + len(GOOD_LINE),
        5503 + len(GOOD_LINE),
    ]
    assert [row.bad.reason if row.bad else None for row in rows] == [
        Reason.LINE_TOO_LONG,
        None,
        Reason.LINE_TOO_LONG,
        Reason.LINE_TOO_LONG,
    ]


@pytest.mark.parametrize("suffix", DATA_SUFFIXES)
def test_a_file_without_rows_is_an_error(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(DataError, match=f"rows{suffix}: "):
        read(write(tmp_path / f"rows{suffix}", b""))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_lines_without_a_row_are_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: holds no rows; remove it"):
        read(write(tmp_path / "rows.jsonl", content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", r"rows\.json: the file is empty; expected an array"),
        (b"hello", r"rows\.json: begins with 'h'; expected an array"),
        (
            b'{\n  "messages": [\n}',
            r"rows\.json:1: begins with an object that is not whole on its line; .*one array",
        ),
        (b'\n{"a": 1', r"rows\.json:2: begins with an object that is not whole"),
    ],
)
def test_a_json_file_that_is_neither_array_nor_lines_says_so(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "rows.json", content))


QUESTION = json.dumps(
    {"instruction": "你好吗？今天天气怎么样", "output": "很好"}, ensure_ascii=False
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-16"])
def test_utf_16_is_told_also_without_a_byte_order_mark(
    tmp_path: Path, name: str, codec: str
) -> None:
    text = (
        "instruction,output\na,b\n"
        if name.endswith(".csv")
        else f"[{QUESTION}]" * name.endswith(".json") or QUESTION
    )
    with pytest.raises(
        DataError, match=r"the text is UTF-16; .*: iconv -f UTF-16(LE|BE)? -t UTF-8"
    ):
        read(write(tmp_path / name, text.encode(codec)), Layout("alpaca"))


@pytest.mark.parametrize(
    ("text", "codec", "said"),
    [
        (QUESTION, "gbk", "probably GBK: iconv -f GB18030 -t UTF-8"),
        (
            '{"instruction": "Où est le café?", "output": "Là, à côté."}',
            "latin-1",
            "Windows-1252 or Latin-1: iconv -f CP",
        ),
        ('{"instruction": "“Why?”", "output": "–"}', "cp1252", "Windows-1252"),
    ],
)
def test_rows_in_another_encoding_say_which_it_probably_is(
    tmp_path: Path, text: str, codec: str, said: str
) -> None:
    for name, content in {"rows.jsonl": text, "rows.json": f"[{text}]"}.items():
        good, refused = read(write(tmp_path / name, content.encode(codec)), Layout("alpaca"))
        assert good == [] and [row.reason for row in refused] == [Reason.BAD_UTF8]
        assert said in refused[0].detail
    broken = write(tmp_path / "rows.json", f"[{text[:-1]}]".encode(codec))
    with pytest.raises(DataError, match=r"not JSON: .*; mend the file \(the file is probably"):
        read(broken, Layout("alpaca"))


@pytest.mark.parametrize("start", [b"", b"\n", b"\n  "])
def test_an_array_in_a_jsonl_file_is_told(tmp_path: Path, start: bytes) -> None:
    for content in (b"[" + GOOD_LINE + b"]", b"[\n" + GOOD_LINE + b",\n" + GOOD_LINE + b"\n]"):
        _, refused = read(write(tmp_path / "rows.jsonl", start + content))
        assert (
            refused[0].detail
            == "begins with '[': a file that is one array is called .json; rename it"
        )


def test_lines_that_end_in_cr_alone_are_told(tmp_path: Path, short_lines: None) -> None:
    _, refused = read(write(tmp_path / "rows.jsonl", GOOD_LINE + b"\r" + GOOD_LINE + b"\r"))
    assert refused[0].detail.endswith(
        "; lines that end in CR alone are not told apart: let them end in LF"
    )
    _, refused = read(write(tmp_path / "rows.jsonl", (GOOD_LINE + b"\r") * 20))
    assert refused[0].detail.endswith("in one line; its lines may end in CR alone")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.txt: expected \.json, \.jsonl or \.csv"):
        read(write(tmp_path / "rows.txt", b"hello"))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "rows.csv.gz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "no gzip", "more behind it"])
def test_a_damaged_gz_file_is_one_error_that_tells_how_far_it_went(
    tmp_path: Path, name: str, damage: str
) -> None:
    rows = [json.dumps({"text": f"{number}: {number * 7919 % 10007}"}) for number in range(20_000)]
    plain = {
        "l": "\n".join(rows),
        "n": "[" + ",".join(rows) + "]",
        "v": "text\n" + "\n".join(map(str, range(50000))),
    }
    packed = gzip.compress(plain[name[-4]].encode())
    middle = len(packed) // 2
    damaged = {
        "cut": packed[:middle],
        "changed": packed[:middle]
        + bytes(byte ^ 255 for byte in packed[middle : middle + 50])
        + packed[middle + 50 :],
        "no gzip": b"text\nhello\n",
        "more behind it": packed + b"and more",
    }
    (tmp_path / name).write_bytes(damaged[damage])

    cut = rf"{name}: the compressed data is cut or damaged after row \d+: .*; get the file again"
    # it can be seen before its checksum is
    spoilt = rf"|{name}:1:\d+: not JSON" if damage == "changed" else ""
    with pytest.raises(DataError, match=cut + spoilt) as caught:
        list(CorpusFile(tmp_path / name))
    assert (" row 0:" in str(caught.value)) == (damage == "no gzip")


def test_the_fraction_read_grows_to_one(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        content = b"".join(b'{"text": "%d"}\n' % (7919 * number) for number in range(20_000))
        file = CorpusFile(write(tmp_path / name, content))
        fractions = [file.fraction_read for _ in file]
        assert fractions == sorted(fractions)
        assert fractions[0] == 0.0 and 0.2 < fractions[len(fractions) // 2] < 0.8
        assert file.fraction_read == 1.0


def test_excerpts_and_details_are_short_printable_and_without_credentials() -> None:
    secret = "hf_" + "aB3dE6gH9jK2mN5pQ8sT"
    place = RowPosition("rows.jsonl", line=1)
    rows = [
        RawRow(
            place,
            b'{"text": "' + secret.encode() + b'", "password": "hunter2", \xff}' + b"x" * 1000,
        ),
        RawRow(place, None, {"text": secret, "password": "hunter2", "more": "x" * 1000}),
        RawRow(place, b"x" * (200 - 8) + secret.encode()),
        RawRow(place, None, {"when": object(), "half": "\ud800"}),
    ]
    for row in rows:
        shown = rejected(
            row, BadRow(Reason.BAD_VALUE, f"role: '{secret}\ud800' is not one of user")
        )
        text = json.dumps(shown.to_json(), ensure_ascii=False).encode().decode()
        assert secret[:10] not in text and "hunter2" not in text
        assert "role: 'hf_***?' is not one of user" in text
        assert len(excerpt(row)) <= 200


def test_rows_can_be_sent_to_another_process(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD_LINE + b"\n")
    row = pickle.loads(pickle.dumps(next(iter(CorpusFile(path, "mine")))))  # noqa: S301

    assert row == RawRow(RowPosition("mine", line=1, byte_offset=0), GOOD_LINE + b"\n")
    assert value_of(row) == GOOD


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
LINES = (
    st.binary(max_size=80)
    | JSON.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))
    | st.just(GOOD_LINE)
    | st.sampled_from([bad for bad, _ in KINDS.values()])
)


@given(st.lists(LINES, min_size=1, max_size=8))
def test_any_lines_are_each_one_row(
    tmp_path_factory: pytest.TempPathFactory, some: list[bytes]
) -> None:
    some = [line.replace(b"\n", b" ").removeprefix(read_json.BOM) for line in some]
    assume(utf_16_name(some[0]) is None)
    path = write(tmp_path_factory.mktemp("any") / "rows.jsonl", b"\n".join([*some, GOOD_LINE]))
    good, refused = read(path)

    assert len(good) + len(refused) == sum(1 for line in some if line.strip()) + 1
    assert len(good) >= 1 + some.count(GOOD_LINE)
    assert [row.place.line for row in refused] == sorted({row.place.line or 0 for row in refused})
    for row in refused:
        json.dumps(row.to_json(), ensure_ascii=False).encode()


@given(st.binary(max_size=200), st.sampled_from([suffix for suffix in DATA_SUFFIXES]))
def test_any_bytes_are_rows_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("any") / f"rows{suffix}"
    for start in (b"", b"[", b"{", b"text\n"):
        path.write_bytes(start + content)
        try:
            read(path, Layout("text"))
        except DataError as error:
            assert path.name in str(error)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json.gz", "rows.csv"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    text = "长文本 " * 500
    row = text if name.endswith(".csv") else json.dumps({"text": text}, ensure_ascii=False)
    before, between, after = {"csv": ("text\n", "\n", ""), "jsonl": ("", "\n", "")}.get(
        name.split(".")[1], ("[", ",\n", "]")
    )
    paths = []
    for size, folder in ((100, "small"), (SIZE_BYTES // len(row.encode()), "large")):
        path = tmp_path / folder / name
        path.parent.mkdir()
        content = (before + between.join([row] * size) + after).encode()
        path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
        paths.append(path)
    characters, growth_bytes = memory_growth(*paths)

    assert characters == SIZE_BYTES // len(row.encode()) * len(text)
    assert growth_bytes < SIZE_BYTES // 6


def test_the_real_file_is_read_to_the_last_row() -> None:
    path = SHARED / "data" / "huanhuan.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    good, refused = read(path, Layout("alpaca"))

    assert refused == []
    expected = [
        to_content(row, Layout("alpaca")) for row in json.loads(path.read_text(encoding="utf-8"))
    ]
    assert good == expected and len(good) > 3000


ROWS: list[dict[str, Any]] = [
    {"instruction": "q", "output": "a\n{"},
    {"instruction": "q2", "output": "a2", "tags": ["x"]},
]
PRETTY = "\n".join(json.dumps(row, indent=2) for row in ROWS)
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", json.dumps({"data": ROWS})),
        ("rows.jsonl", json.dumps({"data": ROWS})),
        ("rows.json", "\n" + json.dumps({"train": ROWS}, indent=1) + "\n"),
        ("rows.json", json.dumps({"rows": [{**ROWS[0], "output": "a" * 2_000_000}, ROWS[1]]})),
        ("rows.jsonl", PRETTY),
        ("rows.json", PRETTY + "\n\n"),
        ("rows.jsonl", PRETTY.replace("\n", "\r\n")),
        (
            "rows.jsonl",
            "\n".join(json.dumps({**row, "pad": "a" * 2_000_000}, indent=2) for row in ROWS),
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_rows_in_another_outer_shape_are_read(
    tmp_path: Path, name: str, text: str, suffix: str
) -> None:
    content = text.encode()
    path = write(tmp_path / (name + suffix), content)
    rows = list(CorpusFile(path))
    assert [value_of(row)["instruction"] for row in rows] == ["q", "q2"]
    for row in rows:
        assert content[row.place.byte_offset :].startswith(row.text or b"none")


@pytest.mark.parametrize(
    ("text", "own_keys", "rows"),
    [
        (json.dumps({"data": TURNS}), (), 1),  # turns, not rows
        (json.dumps({"data": ROWS}), ("data",), 1),  # the config names it as a key of rows
        (json.dumps({"items": ROWS, "instruction": "q", "output": "a"}), (), 1),
        (json.dumps({"data": ROWS}) + "\n" + json.dumps({"data": ROWS}), (), 2),
        (json.dumps({"choices": ROWS}), (), 1),
        ('{"instruction": "q",\n{"instruction": "r", "output": "a"}', (), 2),  # a row that is cut
    ],
)
def test_what_may_be_rows_of_their_own_is_left_as_it_is(
    tmp_path: Path, text: str, own_keys: tuple[str, ...], rows: int
) -> None:
    path = write(tmp_path / "rows.jsonl", text.encode())
    assert len(list(CorpusFile(path, own_keys=own_keys))) == rows


def test_a_wrapped_list_with_more_beside_it_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.json", json.dumps({"data": ROWS, "version": 1}, indent=1).encode()
    )
    with pytest.raises(DataError, match="more than its list of rows: write that list alone"):
        list(CorpusFile(path))


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            b"{'instruction': 'q'}",
            "as Python prints it, in single quotes: write each row with json.dumps",
        ),
        (b"[{'role': 'user'}]", "as Python prints it"),
        (b"{", "an object goes over several lines: write one row a line"),
    ],
)
def test_shapes_that_are_no_json_are_named(tmp_path: Path, line: bytes, remedy: str) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"text": "a"}\n' + line)
    with pytest.raises(BadRow, match=remedy):
        value_of(list(CorpusFile(path))[1])


def test_a_conversation_without_a_key_is_a_row(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", json.dumps([TURNS, TURNS])),
        ("a.jsonl", f"{json.dumps(TURNS)}\n" * 2),
    ):
        values = [value_of(row) for row in CorpusFile(write(tmp_path / name, text.encode()))]
        assert [to_content(value, Layout(detect(value, {}))) for value in values] == [
            Conversation(TURNS, None, (1,)) for _ in values
        ]
        assert len(values) == 2
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert detect(turns, {}) == "sharegpt"
    assert detect(TURNS, {"messages": "dialog"}) == "messages"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"data": TURNS}, r"its turns are under 'data': set columns: \{messages: data\}"),
        ({"chat": [{"from": "human", "value": "q"}]}, r"set columns: \{conversations: chat\}"),
        (
            {"examples": ROWS, "version": 1},
            "if its rows are under 'examples', write that list alone",
        ),
        (TURNS[0], "it is a turn, not a row"),
        (
            {"instruction": ["q", "q2"], "output": ["a", "a2"]},
            "holds columns, not rows: all of instruction and output",
        ),
        ({"instruction": {"0": "q"}, "output": {"0": "a"}}, "holds columns, not rows"),
        ({"messages": [TURNS, TURNS]}, "holds columns, not rows: all of messages"),
        ({"text": ["a", "b"]}, "holds columns, not rows: all of text"),
    ],
)
def test_the_shape_of_a_row_that_is_none_is_named(row: Any, said: str) -> None:
    with pytest.raises(BadRow, match=said):
        to_content(row, Layout(detect(row, {})))
