import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from pipeline_lib.config.schema import Rows
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.batches import RowBatch
from pipeline_lib.data.layouts import to_content
from pipeline_lib.data.ledger import FileLedger, SourceLedger
from pipeline_lib.data.lost_rows import refuse_missing_columns
from pipeline_lib.data.read_files import CorpusFile, value_of
from pipeline_lib.data.sources import (
    BATCH_BYTES,
    BATCH_ROWS,
    DataSource,
    fraction_read,
    open_sources,
)


def row(number: int, answer: str = "It is.") -> dict[str, Any]:
    return {"instruction": f"What is {number}?", "output": answer}


def source_of(tmp_path: Path, *files: list[Any], number: int = 0, **reading: Any) -> DataSource:
    opened = []
    for place, rows in enumerate(files):
        path = tmp_path / f"{number}-{place}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
        opened.append(CorpusFile(path, path.name))
    sizes = [file.path.stat().st_size for file in opened]
    return DataSource(number, f"data.train[{number}]", "name", Rows(**reading), opened, sizes)


def shape(batches: list[RowBatch]) -> list[tuple[int, int, str | None]]:
    return [
        (batch.file, len(batch.rows), batch.layout.format if batch.layout else None)
        for batch in batches
    ]


def test_batches_are_bounded_in_rows_and_in_bytes(tmp_path: Path) -> None:
    long = [row(number, "x" * 400_000) for number in range(7)]
    source = source_of(tmp_path, [row(number) for number in range(BATCH_ROWS + 1)], long)
    batches = list(source.batches())
    assert shape(batches) == [
        (0, BATCH_ROWS, "alpaca"),
        (0, 1, "alpaca"),
        (1, 3, "alpaca"),
        (1, 3, "alpaca"),
        (1, 1, "alpaca"),
    ]
    sizes = [sum(len(each.text or b"") for each in batch.rows) for batch in batches]
    assert max(sizes) < BATCH_BYTES + 400_100


def test_the_first_row_that_is_understood_settles_the_format(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, [{"a": 1}] * (BATCH_ROWS + 2) + [row(1)] * BATCH_ROWS, [{"text": "Once."}], [[1]]
    )
    batches = list(source.batches())
    assert shape(batches) == [
        (0, BATCH_ROWS, None),
        (0, BATCH_ROWS, "alpaca"),
        (0, 2, "alpaca"),
        (1, 1, "text"),
        (2, 1, None),
    ]
    assert batches[1].first is not None and batches[1].first.startswith(
        f"0-0.jsonl:{BATCH_ROWS + 3}: {{"
    )


def test_names_of_columns_are_used_to_find_the_format(tmp_path: Path) -> None:
    rows = [{"question": "Why?", "answer": "So."}]
    named = source_of(tmp_path, rows, columns={"instruction": "question", "output": "answer"})
    assert shape(list(named.batches())) == [(0, 1, "alpaca")]
    assert shape(list(source_of(tmp_path, rows).batches())) == [(0, 1, None)]


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [(0, 1)]),
        (3, [(0, 3)]),
        (4, [(0, 3), (1, 1)]),
        (6, [(0, 3), (1, 3)]),
        (None, [(0, 3), (1, 3)]),
    ],
)
def test_a_source_ends_after_its_last_row(
    tmp_path: Path, max_rows: int | None, expected: list[tuple[int, int]]
) -> None:
    source = source_of(tmp_path, [row(1)] * 3, [row(2)] * 3, max_rows=max_rows)
    assert [(batch.file, len(batch.rows)) for batch in source.batches()] == expected


def booked(source: DataSource) -> SourceLedger:
    """What the stage books of the keys of `source`."""
    ledger = SourceLedger(source.name, [FileLedger(file.name) for file in source.files])
    for batch in source.batches():
        for row in batch.rows:
            ledger.rows += 1
            if batch.layout is not None:
                to_content(value_of(row), batch.layout, ledger.files[batch.file].keys)
    return ledger


PLAIN = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
THINKS = {
    "messages": [PLAIN["messages"][0], {**PLAIN["messages"][1], "thought": "w"}],
    "rules": "s",
}
MAY_LACK = {"system": "rules", "reasoning_content": "thought"}


@pytest.mark.parametrize(
    ("files", "reading"),
    [
        ([[PLAIN], [THINKS]], {"columns": MAY_LACK}),
        ([[PLAIN]], {"columns": {"rules": "ignore"}}),
    ],
)
def test_a_named_key_that_rows_can_do_without_may_be_missing(
    tmp_path: Path, files: list[Any], reading: dict[str, Any]
) -> None:
    source = source_of(tmp_path, *files, **reading)
    assert refuse_missing_columns([booked(source)], [source]) == []


def test_a_named_key_of_a_parquet_file_may_be_null_in_all_rows(tmp_path: Path) -> None:
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "thought": pa.string()})
    table = pa.table({"messages": pa.array([PLAIN["messages"]], pa.list_(turn))})
    pq.write_table(table, tmp_path / "a.parquet")
    file = CorpusFile(tmp_path / "a.parquet", "a.parquet")
    source = DataSource(
        0, "data.train[0]", "name", Rows(columns={"reasoning_content": "thought"}), [file]
    )
    refuse_missing_columns([booked(source)], [source])


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (
            {"columns": MAY_LACK},
            r"\Aname: no row has 'rules', which data\.train\[0\]\.columns names as system; .*",
        ),
        ({"columns": MAY_LACK, "max_rows": 9}, r"\Aname: no row has 'rules'"),
    ],
)
def test_a_named_key_that_no_file_has_is_refused(
    tmp_path: Path, reading: dict[str, Any], said: str
) -> None:
    source = source_of(tmp_path, [PLAIN], [PLAIN], **reading)
    with pytest.raises(DataError, match=said + r".* Mend the name, or remove it from `columns`\Z"):
        refuse_missing_columns([booked(source)], [source])


def test_a_column_that_max_rows_may_have_cut_off_is_said_to_be_missing(tmp_path: Path) -> None:
    source = source_of(tmp_path, [PLAIN, THINKS], columns={"system": "rules"}, max_rows=1)

    assert refuse_missing_columns([booked(source)], [source]) == [
        "tokenize: name: of 1 row read none has 'rules', which data.train[0].columns names as "
        "system"
    ]


def test_what_is_read_is_measured_over_all_sources(tmp_path: Path) -> None:
    sources = [
        source_of(tmp_path, [row(1)] * 10, [row(1)] * 10, number=0),
        source_of(tmp_path, [row(1)] * 20, number=1),
    ]
    assert fraction_read(sources, 0) == 0.0
    reading = sources[0].batches()
    next(reading)
    next(reading)
    assert 0.25 <= fraction_read(sources, 0) <= 0.5
    list(reading)
    assert fraction_read(sources, 0) == 0.5
    list(sources[1].batches())
    assert fraction_read(sources, 1) == 1.0


@pytest.mark.parametrize(
    ("settings", "files", "name", "shown"),
    [
        ({"source": "file"}, ["a.jsonl"], "a.jsonl", "a.jsonl"),
        ({"source": "file"}, list("abcde"), "a, b, c and 2 more", "a"),
        ({"source": "pydoc"}, ["rows.jsonl"], "pydoc", "pydoc"),
        ({"source": "huggingface", "name": "you/chats"}, ["a.csv"], "you/chats", "you/chats/a.csv"),
        (
            {"source": "modelscope", "name": "you/chats", "subset": "zh", "split": "test"},
            ["data/a.parquet"],
            "you/chats:zh:test",
            "you/chats/data/a.parquet",
        ),
    ],
)
def test_sources_go_by_names_that_are_the_same_everywhere(
    tmp_path: Path, settings: dict[str, Any], files: list[str], name: str, shown: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    manifest = SimpleNamespace(files=dict.fromkeys(files), spec={"settings": settings})
    sealed = SimpleNamespace(folder=lambda: tmp_path, manifest=manifest)
    job: Any = SimpleNamespace(inputs={"model": None, "data.0": sealed})
    (source,) = open_sources(job, [{"max_rows": 3}])
    assert (source.name, source.files[0].name, source.reading.max_rows) == (name, shown, 3)
