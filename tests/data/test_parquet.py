from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import Conversation, Reason, Text
from pipeline_lib.data.layouts import Format, Layout
from pipeline_lib.data.read_files import CorpusFile
from tests.data.corpus_rows import GOOD, memory_growth, read

ASKS = {"role": "user", "content": "weather?"}
RESULT = {"role": "tool", "content": ""}
ANSWERS = {"role": "assistant", "content": "sunny"}


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def called(name: str, **arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_what_arrow_fills_in_is_taken_out_again(tmp_path: Path) -> None:
    """Every struct of a column has all keys, so calls would get others' arguments, as null."""
    tools = [
        {
            "type": "function",
            "function": {"name": "a", "parameters": {"properties": {"city": {"type": "string"}}}},
        },
        {
            "type": "function",
            "function": {"name": "b", "parameters": {"properties": {"days": {"type": "number"}}}},
        },
    ]
    first: dict[str, Any] = {
        "messages": [ASKS, called("a", city="x"), RESULT, ANSWERS],
        "tools": tools[:1],
        "text": None,
    }
    second: dict[str, Any] = {
        "messages": [ASKS, called("b", days=[1, 2]), RESULT, ANSWERS],
        "tools": tools[1:],
        "text": None,
    }
    good, refused = read(write(tmp_path / "rows.parquet", [first, second]))

    assert refused == []
    assert good == [
        Conversation(first["messages"], tools[:1], (1, 3)),
        Conversation(second["messages"], tools[1:], (1, 3)),
    ]


def test_the_schema_names_columns_and_the_keys_of_structs(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.struct({"deep": pa.int8()}))
    calls = pa.list_(pa.struct({"name": pa.string(), "arguments": arguments}))
    schema = {
        "messages": pa.list_(pa.struct({"role": pa.string(), "calls": calls})),
        "id": pa.int64(),
    }
    pq.write_table(
        pa.table({name: pa.array([None], kind) for name, kind in schema.items()}),
        tmp_path / "a.parquet",
    )

    assert CorpusFile(tmp_path / "a.parquet").schema_names() == {
        *("messages", "role", "calls", "name", "arguments", "deep", "id")
    }
    assert CorpusFile(tmp_path / "a.jsonl").schema_names() == set()


def test_every_format_comes_as_parquet(tmp_path: Path) -> None:
    hello = Conversation(GOOD["messages"], None, (1,))
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
    alpaca: dict[str, Any] = {"instruction": "hello", "input": None, "output": "hi", "history": []}
    rows: list[tuple[Format, dict[str, Any]]] = [
        ("alpaca", alpaca),
        ("sharegpt", {"conversations": turns}),
        ("prompt_completion", {"prompt": "hello", "completion": "hi"}),
    ]
    for row_format, row in rows:
        assert read(write(tmp_path / "rows.parquet", [row]), Layout(row_format)) == ([hello], [])
    path = write(tmp_path / "rows.parquet", [{**alpaca, "history": [["a", "b"]]}])
    assert [
        row.supervised for row in read(path, Layout("alpaca"))[0] if isinstance(row, Conversation)
    ] == [(1, 3)]


def test_bad_rows_have_their_number(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a"},
        {"text": " "},
        {"text": "b\0"},
        {"text": None},
    ] * 200
    good, refused = read(write(tmp_path / "rows.parquet", rows, row_group_size=70), Layout("text"))

    assert good == [Text("a")] * 200
    assert [row.reason for row in refused] == [
        Reason.EMPTY,
        Reason.BAD_TEXT,
        Reason.WRONG_FORMAT,
    ] * 200
    assert [row.place.row for row in refused] == [
        number for number in range(1, 801) if number % 4 != 1
    ]
    assert (refused[0].to_json().keys() & {"line", "byte_offset"}) == set()


def test_text_that_is_not_utf8_costs_its_own_row_only(tmp_path: Path) -> None:
    binary = pa.array([b"a", b"\xff\xfe", b"b"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "rows.parquet")
    good, refused = read(tmp_path / "rows.parquet", Layout("text"))

    assert good == [Text("a"), Text("b")]
    assert [(row.reason, row.place.row) for row in refused] == [(Reason.BAD_UTF8, 2)]


def test_maps_are_objects(tmp_path: Path) -> None:
    calls = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    turns = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(calls))]
    )
    arguments = [[("city", "x")], [("city", "x"), ("city", "y")]]
    rows = [
        [ASKS, {"role": "assistant", "tool_calls": [{"name": "a", "arguments": pairs}]}]
        for pairs in arguments
    ]
    pq.write_table(
        pa.table({"messages": pa.array(rows, pa.list_(turns))}), tmp_path / "rows.parquet"
    )
    good, refused = read(tmp_path / "rows.parquet")

    assert good == [Conversation([ASKS, called("a", city="x")], None, (1,))]
    assert [(row.reason, row.place.row) for row in refused] == [(Reason.BAD_VALUE, 2)]


def test_nulls_of_maps_and_lists_and_columns_are_values(tmp_path: Path) -> None:
    calls = pa.struct(
        [("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.list_(pa.string())))]
    )
    turns = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(calls))]
    )
    called_with = [("city", None), ("days", ["x", None])]
    rows = [[ASKS, {"role": "assistant", "tool_calls": [{"name": "a", "arguments": called_with}]}]]
    columns = {"messages": pa.array(rows, pa.list_(turns)), "system": pa.array([None], pa.string())}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    good, refused = read(tmp_path / "rows.parquet")

    assert refused == []
    assert good == [Conversation([ASKS, called("a", city=None, days=["x", None])], None, (1,))]
    (raw,) = CorpusFile(tmp_path / "rows.parquet")
    assert raw.value["system"] is None and "tool_calls" not in raw.value["messages"][0]


def test_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: has two columns named 'text'; rename one"):
        read(tmp_path / "rows.parquet", Layout("text"))


def test_values_that_json_does_not_have_do_no_harm(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "when": datetime(2026, 1, 1), "raw": b"\xff"},
        {"text": "", "raw": b""},
    ]
    good, refused = read(write(tmp_path / "rows.parquet", rows), Layout("text"))

    assert (good, [row.reason for row in refused]) == ([Text("a")], [Reason.EMPTY])


def test_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="holds no rows"):
        read(tmp_path / "rows.parquet")


@pytest.mark.parametrize("damage", ["cut", "changed", "text", "empty"])
def test_a_damaged_file_is_one_error_that_tells_how_far_it_went(
    tmp_path: Path, damage: str
) -> None:
    rows = [{"text": f"{number} {number * 7919}"} for number in range(5000)]
    path = write(
        tmp_path / "rows.parquet",
        rows,
        row_group_size=1000,
        compression="zstd",
        use_dictionary=False,
    )
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "changed": content[:middle] + bytes(2000) + content[middle + 2000 :],
        "text": b"hello",
        "empty": b"",
    }
    path.write_bytes(damaged[damage])

    with pytest.raises(
        DataError,
        match=r"rows\.parquet: not parquet, or damaged, after row \d+: .*; get the file again",
    ):
        list(CorpusFile(path, "rows.parquet"))


def test_the_fraction_read_grows_to_one(tmp_path: Path) -> None:
    file = CorpusFile(write(tmp_path / "rows.parquet", [{"text": "a"}] * 1000))
    fractions = [file.fraction_read for _ in file]

    assert fractions == sorted(fractions) and 0.4 < fractions[500] < 0.6
    assert file.fraction_read == 1.0


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    paths = []
    for rows in (500, 60_000):
        table = pa.table({"text": [f"{number} " * 700 for number in range(rows)]})
        paths.append(tmp_path / f"{rows}.parquet")
        pq.write_table(
            table, paths[-1], row_group_size=100_000, use_dictionary=False, compression="zstd"
        )
    characters, growth_bytes = memory_growth(*paths)

    assert characters > 200_000_000
    assert growth_bytes < 110_000_000  # Arrow itself takes 10 MB; its allocator keeps some more


def test_a_text_that_is_stored_once_for_all_rows_is_unpacked_a_few_times_at_once(
    tmp_path: Path,
) -> None:
    """256 rows of 4 MiB, and many small ones before them, in a file of some kilobytes."""
    rows = 40_000
    large = pa.DictionaryArray.from_arrays(
        pa.array([1] * 256 + [0] * (rows - 256), pa.int32()).take(pa.array(range(rows)[::-1])),
        pa.array(["x", "y" * (4 << 20)]),
    )
    small = pa.table({"text": ["x"] * 500})
    paths = [tmp_path / "small.parquet", tmp_path / "large.parquet"]
    pq.write_table(small, paths[0])
    pq.write_table(
        pa.table({"text": large}), paths[1], compression="zstd", dictionary_pagesize_limit=64 << 20
    )
    assert paths[1].stat().st_size < 20_000
    characters, growth_bytes = memory_growth(*paths)

    assert characters == 256 * (4 << 20) + rows - 256
    assert growth_bytes < 250_000_000  # a batch of 64 MiB, and its texts


def test_a_row_that_is_too_large_is_refused_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 100}] * 20
    rows: list[dict[str, Any]] = [
        {"text": "a", "messages": []},
        {"text": "b" * 1000, "messages": []},
    ]
    rows += [{"text": "c", "messages": turns}, {"text": "d", "messages": turns[:2]}]
    good, refused = read(write(tmp_path / "rows.parquet", rows * 10), Layout("text"))

    assert good == [Text("a"), Text("d")] * 10
    assert [(row.reason, row.place.row) for row in refused[:2]] == [
        (Reason.LINE_TOO_LONG, 2),
        (Reason.LINE_TOO_LONG, 3),
    ]
    assert refused[0].detail == "more than 1000 bytes in one row"
    assert len(refused) == 20
