"""Arrow files, and folders that `datasets` saves: the rows of parquet in order, or an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.feather as feather  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from pipeline_lib.config.content import data_files
from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import Conversation, Reason, Text
from pipeline_lib.data.layouts import Layout
from pipeline_lib.data.read_files import CorpusFile
from tests.data.corpus_rows import memory_growth, read


def conversation(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"{number}."},
    ]


def rows_of(count: int) -> Any:
    return datasets.Dataset.from_list(
        [{"messages": conversation(number)} for number in range(count)]
    )


def read_folder(path: Path, split: str | None = None) -> list[str]:
    """The answers of all rows, in the order in which the stage reads them."""
    found = []
    for file in data_files(str(path), split):
        good, refused = read(file)
        assert refused == []
        found += [row.messages[1]["content"] for row in good if isinstance(row, Conversation)]
    return found


def answers(numbers: Any) -> list[str]:
    return [f"{number}." for number in numbers]


def write_stream(path: Path, table: Any, rows: int | None = None, **options: Any) -> Path:
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_file(path: Path, table: Any, rows: int | None = None) -> Path:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_feather(path: Path, table: Any, rows: int | None = None) -> Path:
    feather.write_feather(table, str(path), compression="lz4", chunksize=rows)
    return path


Writer = Callable[[Path, Any, int | None], Path]
WRITERS: tuple[Writer, ...] = (write_stream, write_file, write_feather)


def test_a_saved_data_set_is_read_in_its_order_shard_after_shard(tmp_path: Path) -> None:
    rows_of(2500).save_to_disk(tmp_path / "saved", num_shards=3)
    assert len(data_files(str(tmp_path / "saved"))) == 3
    assert read_folder(tmp_path / "saved") == answers(range(2500))


def test_selected_and_shuffled_rows_are_those_that_are_read(tmp_path: Path) -> None:
    chosen = (
        rows_of(100)
        .filter(lambda row: row["messages"][1]["content"] != "3.")
        .shuffle(seed=1)
        .select(range(40))
    )
    chosen.save_to_disk(tmp_path / "saved", num_shards=2)
    expected = [row["messages"][1]["content"] for row in chosen]
    assert expected != sorted(expected)
    assert read_folder(tmp_path / "saved") == expected


def test_what_else_lies_in_a_saved_folder_is_not_read(tmp_path: Path) -> None:
    """Shards of an older save, and the caches of `map`."""
    folder = tmp_path / "saved"
    rows_of(30).save_to_disk(folder, num_shards=3)
    rows_of(10).save_to_disk(folder, num_shards=2)
    datasets.load_from_disk(folder).map(lambda row: {"messages": row["messages"] * 2})
    assert len(list(folder.glob("data-*.arrow"))) == 5
    assert list(folder.glob("cache-*.arrow"))
    assert read_folder(folder) == answers(range(10))


def test_the_split_of_a_saved_dict_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    datasets.DatasetDict(train=rows_of(3), test=rows_of(2)).save_to_disk(path)
    assert read_folder(path) == answers(range(3))
    assert read_folder(path, "test") == answers(range(2))
    assert read_folder(path / "test") == answers(range(2))
    with pytest.raises(DataError, match=r"has no split 'dev'; give `split` one of train, test"):
        data_files(str(path), "dev")
    with pytest.raises(DataError, match=r"is not a folder with several splits .*; remove `split`"):
        data_files(str(path / "test"), "test")


UNUSABLE: dict[str, tuple[dict[str, Any] | str, str]] = {
    "a selection beside the rows": (
        {"_indices_data_files": [{"filename": "i.arrow"}]},
        r"flatten_indices\(\)",
    ),
    "no rows": ({"_data_files": []}, "is a data set without rows"),
    "a shard is missing": (
        {"_data_files": [{"filename": "b.arrow"}]},
        r"lists b\.arrow, which is not there",
    ),
    "another folder": (
        {"_data_files": [{"filename": "../b.arrow"}]},
        r"lists '\.\./b\.arrow', which is not a file",
    ),
    "no list": ({"_data_files": 3}, "does not read"),
    "no JSON": ("{", "does not read"),
}


@pytest.mark.parametrize(("state", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_saved_folder_that_is_not_whole_is_refused(
    tmp_path: Path, state: Any, problem: str
) -> None:
    (tmp_path / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(DataError, match=problem):
        data_files(str(tmp_path))


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("rows", [7, None])
def test_arrow_files_of_every_kind_have_the_rows_of_parquet(
    tmp_path: Path, write: Writer, rows: int | None
) -> None:
    """Calls with different arguments: Arrow gives each the keys of the others."""
    table = pa.Table.from_pylist(
        [
            {
                "messages": [*conversation(number), {"role": "user", "content": "x"}, call],
                "system": None,
            }
            for number, call in enumerate([called(city="x"), called(days=[1, 2])] * 50)
        ]
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    expected = [row.value for row in CorpusFile(tmp_path / "rows.parquet")]
    found = list(CorpusFile(write(tmp_path / "rows.arrow", table, rows)))
    assert [row.value for row in found] == expected
    assert [row.place.row for row in found] == list(range(1, 101))
    assert found[0].value["messages"][3] == called(city="x")
    assert (
        CorpusFile(tmp_path / "rows.arrow").schema_names()
        == CorpusFile(tmp_path / "rows.parquet").schema_names()
    )


def called(**arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_objects_that_datasets_stores_as_json_are_objects(tmp_path: Path, suffix: str) -> None:
    """It does where rows of a column differ in type; nulls are values there, not fillers."""
    messages = [*conversation(1), {"role": "user", "content": "x"}, called(city=None, days=3)]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    saved = datasets.Dataset.from_dict({"messages": [messages]}, features=features)
    saved.save_to_disk(tmp_path)
    path = tmp_path / "data-00000-of-00001.arrow"
    if suffix == "parquet":
        path = tmp_path / "rows.parquet"
        saved.to_parquet(path)
    [row] = CorpusFile(path)
    assert row.value == {"messages": messages}


def test_json_that_does_not_parse_costs_its_own_row_only(tmp_path: Path) -> None:
    storage = pa.array([json.dumps(conversation(1)), "[", json.dumps(conversation(2))])
    table = pa.table({"messages": pa.ExtensionArray.from_storage(pa.json_(), storage)})
    good, refused = read(write_stream(tmp_path / "rows.arrow", table))
    assert len(good) == 2
    assert [(row.reason, row.place.row) for row in refused] == [(Reason.BAD_JSON, 2)]


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_pictures_are_refused_by_the_features_unless_they_are_left_out(
    tmp_path: Path, suffix: str
) -> None:
    features = {
        "text": datasets.Value("string"),
        "photo": datasets.Image(),
        "clips": datasets.List(datasets.Audio()),
    }
    table = pa.table(
        {"text": ["a"], "photo": pa.array([None], datasets.Image().pa_type), "clips": [None]}
    )
    schema = datasets.Features({name: features[name] for name in table.column_names}).arrow_schema
    table = table.cast(schema).replace_schema_metadata(schema.metadata)
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        write_stream(path, table)
    file = CorpusFile(path, "rows")
    with pytest.raises(
        DataError, match=r"rows: 'photo' is of type Image.*set columns: \{photo: ignore\}"
    ):
        file.refuse_media(())
    with pytest.raises(DataError, match=r"rows: 'clips' is of type Audio"):
        file.refuse_media({"photo"})
    file.refuse_media({"photo", "clips"})
    assert read(path, Layout("text"))[0] == [Text("a")]


@pytest.mark.parametrize(
    "metadata", [b"{", b"[]", b'{"info": null}', b'{"info": {"features": [[[1]]]}}']
)
def test_features_that_do_not_read_say_nothing(tmp_path: Path, metadata: bytes) -> None:
    table = pa.table({"text": ["a"]}).replace_schema_metadata({"huggingface": metadata})
    CorpusFile(write_stream(tmp_path / "rows.arrow", table)).refuse_media(())


def damaged(content: bytes, damage: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut": content[:middle],
        "no end": content[:-8],
        "two files": content * 2,
        "text": b"hello",
        "empty": b"",
    }[damage]


@pytest.mark.parametrize("damage", ["cut", "no end", "two files", "text", "empty"])
@pytest.mark.parametrize("write", WRITERS)
def test_a_file_that_is_not_whole_is_one_error(tmp_path: Path, damage: str, write: Writer) -> None:
    if damage == "two files" and write is not write_stream:
        pytest.skip("the last footer names the rows of the second file, at the places of the first")
    table = pa.table({"text": [f"{number} {number * 7919}" for number in range(5000)]})
    path = write(tmp_path / "rows.arrow", table, 1000)
    path.write_bytes(damaged(path.read_bytes(), damage))
    with pytest.raises(DataError, match=r"^rows\.arrow: not (Arrow|one whole Arrow stream)"):
        list(CorpusFile(path, "rows.arrow"))


@pytest.mark.parametrize("write", [write_stream, write_file])
def test_offsets_that_lead_out_of_the_file_are_an_error(tmp_path: Path, write: Writer) -> None:
    table = pa.table({"text": ["a" * 100] * 5000})
    path = write(tmp_path / "rows.arrow", table, None)
    content = path.read_bytes()
    place = content.index((2400 * 100).to_bytes(4, "little") + (2401 * 100).to_bytes(4, "little"))
    path.write_bytes(content[:place] + (2**30).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(
        DataError, match=r"not Arrow, or damaged, after row 0: .*get the file again"
    ):
        list(CorpusFile(path, "rows.arrow"))


def test_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(DataError, match=r"rows\.arrow: has two columns named 'text'; rename one"):
        read(write_stream(tmp_path / "rows.arrow", table), Layout("text"))


@pytest.mark.parametrize("write", WRITERS)
def test_the_fraction_read_grows_to_one(tmp_path: Path, write: Writer) -> None:
    file = CorpusFile(write(tmp_path / "rows.arrow", pa.table({"text": ["a" * 100] * 1000}), 300))
    fractions = [file.fraction_read for _ in file]
    assert fractions == sorted(fractions) and 0.3 < fractions[500] < 0.7
    assert file.fraction_read == 1.0


def test_texts_of_a_dictionary_are_counted_by_the_rows_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_json, "MAX_LINE_BYTES", 1000)
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 0], pa.int32()), pa.array(["a" * 900, "b" * 1100])
    )
    good, refused = read(
        write_stream(tmp_path / "rows.arrow", pa.table({"text": texts})), Layout("text")
    )
    assert good == [Text("a" * 900)] * 2
    assert [(row.reason, row.place.row) for row in refused] == [(Reason.LINE_TOO_LONG, 2)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Pages of a mapped file count, but the kernel decides how many stay; a batch's are read."""
    paths = []
    for rows in (500, 60_000):
        table = pa.table({"text": [f"{number} " * 700 for number in range(rows)]})
        paths.append(write_stream(tmp_path / f"{rows}.arrow", table, 1000, compression="zstd"))
    characters, growth_bytes = memory_growth(*paths)
    assert characters > 200_000_000
    assert growth_bytes < 150_000_000
