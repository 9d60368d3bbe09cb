import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.config.compile import open_experiment
from pipeline_lib.config.content import HASHES_NAME, HashCache, data_files, model_files
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Manifest, Store, describe_files, write_manifest
from pipeline_lib.core.user_cache import UserCache

ROWS = '{"messages": []}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model folder, a tokenizer and data, made for the test."""
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path / "model",
        {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"},
    )
    write(tmp_path / "data", {"a.jsonl": ROWS, "b.jsonl": ROWS * 2})
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def store_of(folder: Path) -> Store:
    """A store, and a cache of the user's own."""
    return Store(folder / "store", UserCache(folder / "cache"))


def digests(
    folder: Path, model: str = "{source: local, path: model}", data: str = "data/*.jsonl"
) -> dict[str, str]:
    path = folder / "config.yaml"
    path.write_text(
        f"experiment: e\nmodel: {model}\ndata: {{train: [{{source: file, path: '{data}'}}]}}\n"
    )
    return {
        part: spec.digest for part, spec in open_experiment(path, store_of(folder)).specs.items()
    }


def problems(
    folder: Path, model: str = "{source: local, path: model}", data: str = "data/*.jsonl"
) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        digests(folder, model, data)
    return raised.value.problems


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "another size": ("data.0", lambda folder: (folder / "data" / "b.jsonl").write_text(ROWS * 3)),
    "the same size": (
        "model",
        lambda folder: (folder / "model" / "model.safetensors").write_text("weighty"),
    ),
    "one more file": ("data.0", lambda folder: (folder / "data" / "c.jsonl").write_text(ROWS)),
    # The sealed files, the ledger and the order of the samples have the names.
    "another name": (
        "data.0",
        lambda folder: (folder / "data" / "a.jsonl").rename(folder / "data" / "z.jsonl"),
    ),
}


@pytest.mark.parametrize(("part", "change"), CHANGES.values(), ids=CHANGES)
def test_a_changed_file_is_another_source(
    folder: Path, part: str, change: Callable[[Path], object]
) -> None:
    before = digests(folder)

    change(folder)

    after = digests(folder)
    assert {key for key in ("model", "data.0", "train") if after[key] != before[key]} == {
        part,
        "train",
    }


def test_where_the_content_lies_and_when_it_was_written_changes_nothing(folder: Path) -> None:
    before = digests(folder)

    (folder / "data").rename(folder / "elsewhere")
    (folder / "model").rename(folder / "renamed")
    for path in folder.rglob("*.json*"):
        os.utime(path, (0, 4e9))

    assert (
        digests(folder, f"{{source: local, path: {folder}/renamed}}", "elsewhere/[ab].jsonl")
        == before
    )


def test_a_given_tokenizer_is_hashed_and_the_files_beside_it_are_not(folder: Path) -> None:
    write(folder / "tokens", {"tokenizer.json": "{}", "chat_template.jinja": "x", "notes.txt": "n"})
    model = "{source: tiny, tokenizer: tokens}"
    before = digests(folder, model)

    (folder / "tokens" / "notes.txt").write_text("more notes")
    assert digests(folder, model) == before
    (folder / "tokens" / "chat_template.jinja").write_text("y")
    assert digests(folder, model)["model"] != before["model"]
    assert digests(folder, "{source: tiny}")["model"] != before["model"]


def test_of_a_model_folder_only_data_is_taken(tmp_path: Path) -> None:
    taken = [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    left = [
        "modeling.py",
        "model.bin",
        "model.pt",
        "optimizer.pickle",
        ".hidden.json",
        "manifest.json",
        "README.md",
    ]
    write(tmp_path, dict.fromkeys([*taken, *left], ""))
    write(tmp_path / "below", {"config.json": ""})

    assert [file.name for file in model_files(tmp_path)] == taken


def test_a_glob_names_files_in_one_order(tmp_path: Path) -> None:
    write(tmp_path / "x", {"b.jsonl": "", "a.jsonl": ""})
    write(tmp_path / "x" / "folder.jsonl", {})

    assert [file.name for file in data_files(f"{tmp_path}/**/*.jsonl")] == ["a.jsonl", "b.jsonl"]


def test_every_source_that_is_missing_is_named(folder: Path) -> None:
    found = problems(folder, "{source: local, path: none}", "none/*.jsonl")

    assert found == [
        f"line 2: model.path: 'none' is not a folder here ({folder})",
        f"line 3: data.train[0].path: no file matches 'none/*.jsonl' here ({folder})",
    ]


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        (
            "model.safetensors",
            "has no *.safetensors (other weight formats are not read: they can carry code)",
        ),
    ],
)
def test_what_a_model_folder_lacks_is_named(folder: Path, lacking: str, said: str) -> None:
    (folder / "model" / lacking).unlink()

    assert problems(folder) == [f"line 2: model.path: 'model' {said}"]


def seal(folder: Path) -> None:
    """What merge leaves beside a model, and DVC carries with it."""
    write_manifest(
        folder, Manifest(stage="merge", digest="d", spec={}, files=describe_files(folder))
    )


def test_a_model_that_is_what_its_manifest_says_is_the_same_source(folder: Path) -> None:
    before = digests(folder)
    write(folder / "model", {"README.md": "of no effect"})
    seal(folder / "model")
    (folder / "model" / "README.md").write_text("so it may change")

    assert digests(folder) == before


def test_a_model_that_is_not_what_its_manifest_says_is_refused_by_file(folder: Path) -> None:
    model = folder / "model"
    write(model, {"model-2.safetensors": "more"})
    seal(model)
    (model / "model.safetensors").write_text("weigths")
    (model / "model-2.safetensors").unlink()
    write(model, {"chat_template.jinja": "came later"})

    mend = "get 'model' again, or delete its manifest.json if you changed the model yourself"
    assert problems(folder) == [
        f"model.path: 'model/{name}' does not match manifest.json; {mend}"
        for name in ("chat_template.jinja", "model-2.safetensors", "model.safetensors")
    ]
    (model / "manifest.json").unlink()
    digests(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"stage": "mer', "cannot be read"),
        ('{"stage": "merge", "digest": "d", "files": {"x": 1}}', "is damaged"),
    ],
)
def test_a_damaged_manifest_proves_no_model(folder: Path, text: str, said: str) -> None:
    write(folder / "model", {"manifest.json": text})

    assert f"model.path: 'model/manifest.json' {said}" in problems(folder)[0]


def test_a_manifest_of_another_kind_says_nothing(folder: Path) -> None:
    before = digests(folder)

    write(folder / "model", {"manifest.json": '{"files": ["a", "b"]}'})

    assert digests(folder) == before


def test_a_tokenizer_folder_without_a_tokenizer_is_named(folder: Path) -> None:
    said = "line 2: model.tokenizer: 'data' holds no tokenizer.json"
    assert problems(folder, "{source: tiny, tokenizer: data}") == [said]


def test_files_of_other_formats_are_named(folder: Path) -> None:
    write(folder / "data", {"c.txt": ""})

    suffixes = ".json, .jsonl, .csv, .json.gz, .jsonl.gz, .csv.gz, .parquet, .arrow"
    assert problems(folder, data="data/*") == [
        f"line 3: data.train[0].path: 'data/c.txt' is none of {suffixes}"
    ]


def test_two_files_of_one_name_are_refused(folder: Path) -> None:
    write(folder / "data" / "below", {"a.jsonl": ROWS})

    assert problems(folder, data="data/**/*.jsonl") == [
        "line 3: data.train[0].path: 'data/**/*.jsonl' matches several files called 'a.jsonl'; "
        "rename one"
    ]


def test_a_hash_is_remembered_until_size_or_time_change(tmp_path: Path) -> None:
    path, file = tmp_path / "hashes.json", tmp_path / "file"
    file.write_text("old")
    cache = HashCache.load(path)
    old = cache.sha256(file)
    cache.save()
    entries = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: [*entry[:-1], "remembered"] for key, entry in entries.items()})
    )

    assert HashCache.load(path).sha256(file) == "remembered", "it was read again"
    os.utime(file, (2, 2))
    assert HashCache.load(path).sha256(file) == old


@pytest.mark.parametrize(
    ("name", "part"), [("data/a.jsonl", "data.0"), ("model/model.safetensors", "model")]
)
def test_an_edit_in_place_that_keeps_size_and_time_is_seen(
    folder: Path, name: str, part: str
) -> None:
    """As `rsync --inplace --times` makes it."""
    file = folder / name
    before, times = digests(folder), file.stat()

    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert digests(folder)[part] != before[part]


def test_a_hash_that_proved_wrong_is_computed_again(folder: Path) -> None:
    path, file = folder / "hashes.json", folder / "model" / "model.safetensors"
    cache = HashCache.load(path)
    right = cache.sha256(file)
    cache.entries = {key: [*entry[:-1], "wrong"] for key, entry in cache.entries.items()}

    cache.forget(file)
    cache.save()

    assert HashCache.load(path).sha256(file) == right


@pytest.mark.parametrize("store", ["file", "file/below"])
def test_a_store_that_cannot_be_is_named(folder: Path, store: str) -> None:
    (folder / "file").write_text("")
    path = folder / "config.yaml"
    path.write_text("experiment: e\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\n")

    with pytest.raises(ConfigError, match=r"file is no folder; set PIPELINE_STORE"):
        open_experiment(path, Store(folder / store))


def test_a_folder_in_the_place_of_files_is_told_apart_from_nothing(folder: Path) -> None:
    assert problems(folder, data="data") == [
        "line 3: data.train[0].path: 'data' is neither a file nor a folder saved by `datasets`; "
        "name the files in it, as in 'folder/*.jsonl'"
    ]


def test_what_another_user_says_of_a_file_is_not_believed(folder: Path) -> None:
    """Who shares the store can write there, and could let their rows be taken for ours."""
    before = digests(folder)
    remembered = store_of(folder).remembered(HASHES_NAME)
    assert remembered is not None
    forged = {
        path: [*entry[:-1], "0" * 64] for path, entry in json.loads(remembered.read_text()).items()
    }
    remembered.unlink()
    (folder / "store").mkdir(exist_ok=True)
    (folder / "store" / HASHES_NAME).write_text(json.dumps(forged))
    assert digests(folder) == before

    remembered.parent.chmod(0o777)  # others may write there
    remembered.write_text(json.dumps(forged))
    assert digests(folder) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00", None])
def test_a_damaged_memory_of_hashes_costs_nothing_but_time(
    folder: Path, content: str | None
) -> None:
    before = digests(folder)
    path = store_of(folder).remembered(HASHES_NAME)
    assert path is not None
    path.write_text(
        content
        if content is not None
        else json.dumps(dict.fromkeys(json.loads(path.read_text()), [1]))
    )

    assert digests(folder) == before
    assert json.loads(path.read_text())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"rates": {"launch_s": {"value": NaN}}}',
            "rates.launch_s.value: nan is no finite number",
        ),
        ('{"parts": [{"shape": [1, -Infinity]}]}', "parts[0].shape[1]: -inf is no finite number"),
        ('{"model": 1e999}', "model: inf is no finite number"),
        ('{"host": "\\ud800"}', r"host: '\ud800' holds half of a surrogate pair"),
        ('{"\\ud800": 1}', r"the key '\ud800': '\ud800' holds half of a surrogate pair"),
    ],
)
def test_measurements_that_no_spec_can_hold_are_named_by_their_key(
    folder: Path, content: str, said: str
) -> None:
    (folder / "cluster.json").write_text(content)
    path = folder / "config.yaml"
    path.write_text(
        "experiment: e\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\ncluster: "
        "{measured: cluster.json}\n"
    )

    def problems() -> list[str]:
        with pytest.raises(ConfigError) as raised:
            open_experiment(path, Store(folder / "store"))
        str(raised.value).encode()
        return raised.value.problems

    again = "make it again with `qwen3 calibrate CONFIG`"
    assert problems() == [f"line 4: cluster.measured: 'cluster.json': {said}; {again}"]
    (folder / "cluster.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    [endless] = problems()
    assert "cluster.measured: 'cluster.json' does not read" in endless
