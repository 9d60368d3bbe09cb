import json
import os
import shutil
import stat
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline_lib.config.content import HashCache
from pipeline_lib.core.errors import DataError, HubError, IntegrityError
from pipeline_lib.core.files import list_files, sha256_file
from pipeline_lib.core.stage import Sealed, open_sealed, run_stage
from pipeline_lib.core.store import Spec, verify
from pipeline_lib.data import download
from pipeline_lib.export.card import Licence, licence_of
from tests.fake_hub import FakeHub, late, refusal
from tests.processes import finish, running, workers_alive

from .conftest import Pipeline

PYDOC = {"source": "pydoc", "max_rows": 20}


@pytest.fixture
def model(pipeline: Pipeline, tmp_path: Path) -> Path:
    """The folder of the pipeline's model, to change at will."""
    pipeline.model = Path(shutil.copytree(pipeline.model, tmp_path / "model"))
    return pipeline.model


def test_a_local_model_comes_as_it_is_without_code(
    pipeline: Pipeline, tiny_folder: Path, model: Path
) -> None:
    for name in ("modeling_qwen3.py", "pytorch_model.bin", ".gitattributes"):
        (model / name).write_text("no")
    made = pipeline.run(pipeline.compile(data=[PYDOC]), "generation")
    taken = {name: part for part in ("model", "generation") for name in made[part].manifest.files}
    assert sorted(taken) == list_files(tiny_folder)
    assert [name for name, part in taken.items() if part == "generation"] == [
        "generation_config.json"
    ]
    assert all(
        sha256_file(made[part].path / name) == sha256_file(tiny_folder / name)
        for name, part in taken.items()
    )


def test_the_licence_of_a_local_model_comes_along_and_changes_no_digest(
    pipeline: Pipeline, model: Path
) -> None:
    without = pipeline.compile(data=[PYDOC]).ref("model")
    (model / "LICENSE").write_text("Apache License\nVersion 2.0")
    experiment = pipeline.compile(data=[PYDOC])
    assert experiment.ref("model") == without
    made = pipeline.run(experiment, "model")
    assert licence_of(made["model"].path) == Licence("apache-2.0", "LICENSE")


def test_a_model_that_cannot_be_trained_is_not_sealed(pipeline: Pipeline, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, model / "model.safetensors")
    experiment = pipeline.compile(data=[PYDOC])
    with pytest.raises(
        DataError,
        match=rf"{model}/model\.safetensors: model\.norm\.weight: holds values that are not",
    ):
        pipeline.run(experiment, "model")
    (model / "model.safetensors").write_text("weights")
    experiment = pipeline.compile(data=[PYDOC])
    with pytest.raises(
        DataError, match=rf"  - {model}/model\.safetensors: cannot be read as safetensors"
    ):
        pipeline.run(experiment, "model")
    assert not pipeline.store.sealed(experiment.ref("model")).exists()


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", "x"), ("dtype", "float7")])
def test_a_config_that_transformers_does_not_take_is_not_sealed(
    pipeline: Pipeline, model: Path, key: str, value: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    experiment = pipeline.compile(data=[PYDOC])
    with pytest.raises(
        DataError, match=rf"{model}/config\.json: transformers does not take it \(.*({key}|{value})"
    ):
        pipeline.run(experiment, "model")
    assert not pipeline.store.sealed(experiment.ref("model")).exists()


def test_a_generation_config_that_cannot_be_used_is_refused(
    pipeline: Pipeline, model: Path
) -> None:
    (model / "generation_config.json").write_text('{"cache_implementation": "nope"}')
    experiment = pipeline.compile(data=[PYDOC])
    with pytest.raises(
        DataError, match=rf"{model}/generation_config\.json: transformers .*; mend that, or delete"
    ):
        pipeline.run(experiment, "generation")


def test_files_come_under_their_own_names(pipeline: Pipeline, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json"):
        (tmp_path / name).write_text(f"[{name}]")
    experiment = pipeline.compile(data=[{"source": "file", "path": str(tmp_path / "[ab].*")}])
    made = pipeline.run(experiment, "data.0")["data.0"]
    assert list_files(made.path) == ["a.json", "b.jsonl", "manifest.json"]
    # People go on editing their files: what is sealed must not change with them.
    with (tmp_path / "a.json").open("a") as file:
        file.write("more")
    verify(made.path)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def test_a_file_that_changed_since_is_refused(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    experiment = pipeline.compile(data=[{"source": "file", "path": str(path)}])
    change(path)
    with pytest.raises(DataError, match=r"a\.jsonl: changed since the config was read; run again"):
        pipeline.run(experiment, "data.0")
    assert not pipeline.store.sealed(experiment.ref("data.0")).exists()
    path.unlink()
    with pytest.raises(
        DataError, match=r"changed since the config was read \(a\.jsonl came or went\)"
    ):
        pipeline.run(experiment, "data.0")


def test_a_model_that_changed_since_is_refused(pipeline: Pipeline, model: Path) -> None:
    experiment = pipeline.compile(data=[PYDOC])
    change(model / "model.safetensors")
    with pytest.raises(DataError, match="changed since the config was read"):
        pipeline.run(experiment, "model")
    shutil.rmtree(model)
    with pytest.raises(DataError, match="came or went"):
        pipeline.run(experiment, "model")


def edit_in_place(path: Path) -> None:
    """Other bytes of the same size and mtime, as `rsync --inplace --times` leaves them."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        last = file.read(4)
        file.seek(-4, os.SEEK_END)
        file.write(bytes(byte ^ 1 for byte in last))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_edit_in_place_of_a_local_model_makes_another_and_damages_nothing(
    pipeline: Pipeline, model: Path
) -> None:
    before = pipeline.run(pipeline.compile(data=[PYDOC]), "model")["model"]
    edit_in_place(model / "model.safetensors")
    after = pipeline.run(pipeline.compile(data=[PYDOC]), "model")["model"]
    assert after.path != before.path
    verify(before.path)
    verify(after.path)


def cache_of_links(model: Path) -> Path:
    """The model's folder as Hugging Face's cache has it: links to blobs, named by hash."""
    snapshot, blobs = model / "snapshots" / "commit", model / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name in list_files(model):
        blob = blobs / sha256_file(model / name)
        (model / name).rename(blob)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_weights_of_a_hubs_cache_are_linked_and_not_hashed_again(
    pipeline: Pipeline, model: Path
) -> None:
    pipeline.model = cache_of_links(model)
    source = pipeline.model / "model.safetensors"
    source.resolve().chmod(0o644)
    made = pipeline.run(pipeline.compile(data=[PYDOC]), "model")["model"]
    assert source.samefile(made.path / "model.safetensors")
    assert not (pipeline.model / "config.json").samefile(made.path / "config.json")
    hashes = HashCache.load(pipeline.store.remembered("hashes.json"))
    hashes.sha256(source)
    assert not hashes.changed


@pytest.mark.parametrize("is_linked", [False, True])
def test_an_edit_between_compiling_and_taking_is_refused(
    pipeline: Pipeline, model: Path, is_linked: bool
) -> None:
    if is_linked:
        pipeline.model = cache_of_links(model)
    experiment = pipeline.compile(data=[PYDOC])
    edit_in_place(pipeline.model / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors: changed since the config was read"):
        pipeline.run(experiment, "model")


def test_an_edit_of_linked_weights_after_they_were_taken_is_found_by_their_user(
    pipeline: Pipeline, model: Path
) -> None:
    pipeline.model = cache_of_links(model)
    (pipeline.model / "model.safetensors").resolve().chmod(0o644)
    experiment = pipeline.compile(data=[PYDOC])
    pipeline.run(experiment, "model")
    edit_in_place(pipeline.model / "model.safetensors")
    with pytest.raises(
        IntegrityError, match=r"model\.safetensors: content differs from what was sealed"
    ):
        open_sealed(experiment.ref("model"), pipeline.store).folder()


def test_an_edit_of_linked_weights_while_they_are_checked_is_refused(
    pipeline: Pipeline, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.model = cache_of_links(model)
    weights = pipeline.model / "model.safetensors"
    weights.resolve().chmod(0o644)
    experiment = pipeline.compile(data=[PYDOC])
    monkeypatch.setattr(download, "refuse_differences", lambda *_: edit_in_place(weights))
    with pytest.raises(DataError, match=r"model\.safetensors changed while it was taken"):
        pipeline.run(experiment, "model")
    assert not pipeline.store.sealed(experiment.ref("model")).exists()


def test_private_weights_of_a_hubs_cache_are_copied_for_all_who_share_the_store(
    pipeline: Pipeline, model: Path
) -> None:
    pipeline.model = cache_of_links(model)
    source = pipeline.model / "model.safetensors"
    source.resolve().chmod(0o600)
    made = pipeline.run(pipeline.compile(data=[PYDOC]), "model")["model"]
    assert (made.path / "model.safetensors").stat().st_mode == (
        made.path / "manifest.json"
    ).stat().st_mode
    assert stat.S_IMODE(source.stat().st_mode) == 0o600


def test_a_hash_that_was_remembered_wrongly_is_refused_once(
    pipeline: Pipeline, model: Path
) -> None:
    experiment = pipeline.compile(data=[PYDOC])
    remembered = pipeline.store.remembered("hashes.json")
    assert remembered is not None
    entries = json.loads(remembered.read_text())
    remembered.write_text(
        json.dumps({key: [*entry[:-1], "0" * 64] for key, entry in entries.items()})
    )
    wrong = pipeline.compile(data=[PYDOC])
    for _ in range(len(entries)):
        with pytest.raises(DataError, match="changed since the config was read"):
            pipeline.run(wrong, "model")
        wrong = pipeline.compile(data=[PYDOC])
        if wrong.ref("model") == experiment.ref("model"):
            break
    pipeline.run(wrong, "model")


def test_a_tiny_model_is_built_around_a_tokenizer(
    pipeline: Pipeline, tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny_folder / name, tokenizer / name)
    small = {
        "source": "tiny",
        "hidden_size": 16,
        "layers": 1,
        "heads": 2,
        "tokenizer": str(tokenizer),
    }
    experiment = pipeline.compile(model=small, data=[PYDOC])
    made = pipeline.run(experiment, "model")["model"]
    assert sha256_file(made.path / "tokenizer.json") == sha256_file(tiny_folder / "tokenizer.json")
    change(tokenizer / "chat_template.jinja")
    shutil.rmtree(made.path)
    with pytest.raises(DataError, match=r"chat_template\.jinja: changed since"):
        pipeline.run(experiment, "model")


@pytest.mark.parametrize(
    "settings", [{"kind": "data", "source": "pydoc"}, {"kind": "model", "source": "tiny"}]
)
def test_another_python_is_refused(pipeline: Pipeline, settings: dict[str, Any]) -> None:
    spec = Spec("download", 1, {**settings, "content": {"python": "3.0.0"}})
    with pytest.raises(DataError, match=r"compiled under Python 3\.0\.0"):
        run_stage(download.run, spec, pipeline.store, pipeline.said.append)


NAME = "owner/thing"
HUBS = ("huggingface", "modelscope")
README = b"""---
configs:
- config_name: english
  data_files:
  - {split: train, path: english/train-*.jsonl}
  - {split: test, path: english/test.jsonl.gz}
- config_name: chinese
  data_files: [{split: train, path: "chinese/*.parquet"}]
---
"""
DATA = {
    "README.md": README,
    "english/train-0.jsonl": b"{}\n",
    "english/train-1.jsonl": b"{}\n{}\n",
    "english/test.jsonl.gz": b"gz",
    "chinese/a.parquet": b"PAR1",
    "loader.py": b"raise SystemExit",
}


def contents(sealed: Sealed) -> dict[str, bytes]:
    names = [name for name in list_files(sealed.path) if name != "manifest.json"]
    return {name: (sealed.path / name).read_bytes() for name in names}


def hub_data(pipeline: Pipeline, source: str, **settings: Any) -> Sealed:
    experiment = pipeline.compile(data=[{"source": source, "name": NAME, **settings}])
    return pipeline.run(experiment, "data.0")["data.0"]


@pytest.mark.parametrize("source", HUBS)
def test_a_hubs_model_comes_without_code(
    pipeline: Pipeline, tiny_folder: Path, hub: FakeHub, source: str
) -> None:
    files = {name: (tiny_folder / name).read_bytes() for name in list_files(tiny_folder)}
    extra = dict.fromkeys(
        ("modeling_qwen3.py", "pytorch_model.bin", "onnx/model.safetensors", ".gitattributes"),
        b"no",
    )
    _, commit = hub.add("model", NAME, {**files, **extra})
    experiment = pipeline.compile(model={"source": source, "name": NAME}, data=[PYDOC])
    assert experiment.specs["model"].settings["revision"] == commit
    made = pipeline.run(experiment, "model")["model"]
    assert contents(made) == files
    assert not any(hub.sent_bytes(name) for name in extra)
    verify(made.path)


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"compile_config": 5}', "{"])
def test_a_hubs_generation_config_that_cannot_be_used_is_left_out(
    pipeline: Pipeline, tiny_folder: Path, hub: FakeHub, content: str
) -> None:
    files = {name: (tiny_folder / name).read_bytes() for name in list_files(tiny_folder)}
    hub.add("model", NAME, {**files, "generation_config.json": content.encode()})
    experiment = pipeline.compile(model={"source": "huggingface", "name": NAME}, data=[PYDOC])
    made = pipeline.run(experiment, "model")["model"]
    assert sorted(contents(made)) == sorted(files.keys() - {"generation_config.json"})
    (warning,) = [line for line in pipeline.said if "warning" in line]
    assert warning.startswith(
        f"download: warning: huggingface model {NAME}/generation_config.json: "
    )


@pytest.mark.parametrize(
    ("source", "files"), [("huggingface", []), ("modelscope", ["train.jsonl"])]
)
def test_a_moved_branch_changes_nothing(
    pipeline: Pipeline, hub: FakeHub, source: str, files: list[str]
) -> None:
    repository, _ = hub.add("dataset", NAME, {"train.jsonl": b"{}\n"})
    made = hub_data(pipeline, source, files=files)
    repository.commit({"train.jsonl": b'{"a": 1}\n'})
    before = len(hub.requests)
    assert hub_data(pipeline, source, files=files).path == made.path
    assert len(hub.requests) == before
    remembered = pipeline.store.remembered("revisions.json")
    assert remembered is not None
    remembered.unlink()
    assert contents(hub_data(pipeline, source, files=files)) == {"train.jsonl": b'{"a": 1}\n'}


@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        ("modelscope", {"subset": "english"}, ["english/train-0.jsonl", "english/train-1.jsonl"]),
        ("huggingface", {"subset": "english", "split": "test"}, ["english/test.jsonl.gz"]),
        ("huggingface", {"subset": "chinese"}, ["chinese/a.parquet"]),
        *(
            (
                source,
                {"files": ["*train-1.jsonl", "chinese/*"]},
                ["chinese/a.parquet", "english/train-1.jsonl"],
            )
            for source in HUBS
        ),
    ],
)
def test_only_the_files_of_the_split_are_fetched(
    pipeline: Pipeline, hub: FakeHub, source: str, settings: dict[str, Any], expected: list[str]
) -> None:
    hub.add("dataset", NAME, DATA)
    assert contents(hub_data(pipeline, source, **settings)) == {
        name: DATA[name] for name in expected
    }
    others = [name for name in DATA if name not in (*expected, "README.md")]
    assert not any(hub.sent_bytes(name) for name in others)
    assert not list(pipeline.root.glob("runs/*/arrived"))


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "test", [1]),
        (["a.json", "b.json"], "train", ["a.json", "b.json"]),
    ],
)
def test_without_a_readme_the_names_tell_the_splits(
    pipeline: Pipeline, hub: FakeHub, names: list[str], split: str, expected: list[Any]
) -> None:
    hub.add("dataset", NAME, {name: name.encode() for name in names})
    found = contents(hub_data(pipeline, "huggingface", split=split))
    assert sorted(found) == [names[name] if isinstance(name, int) else name for name in expected]


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        (["train.csv", "train.jsonl"], r"train\.csv"),
        (["train.jsonl", "test.jsonl", "more.jsonl"], r"more\.jsonl"),
        (["data/train-0.parquet", "data/train-1.parquet", "raw/a.json"], r"raw/a\.json"),
    ],
)
def test_files_that_no_split_takes_are_named(
    pipeline: Pipeline, hub: FakeHub, names: list[str], left_out: str
) -> None:
    hub.add("dataset", NAME, dict.fromkeys(names, b"{}"))
    with pytest.raises(
        DataError, match=rf"`datasets` puts {left_out} into no split .*; name all .* in `files`"
    ):
        hub_data(pipeline, "huggingface")
    assert sorted(contents(hub_data(pipeline, "huggingface", files=["*"]))) == sorted(names)


def test_files_that_describe_a_data_set_are_none_of_its_rows(
    pipeline: Pipeline, hub: FakeHub
) -> None:
    """`datasets` would parse dataset_infos.json, and every file that it sees here is empty."""
    extra = dict.fromkeys(
        ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "config.json"), b"{}"
    )
    hub.add("dataset", NAME, {**extra, "train.json": b"[]", "test.json": b"[]"})
    assert contents(hub_data(pipeline, "huggingface")) == {"train.json": b"[]"}
    assert sorted(contents(hub_data(pipeline, "huggingface", files=["*"]))) == [
        "test.json",
        "train.json",
    ]


def test_saved_rows_on_a_hub_come_without_state_and_caches(
    pipeline: Pipeline, hub: FakeHub
) -> None:
    extra = (
        "dataset_dict.json",
        "train/state.json",
        "train/dataset_info.json",
        "train/cache-0123.arrow",
    )
    rows = [
        f"{split}/data-0000{number}-of-00002.arrow"
        for split in ("train", "test")
        for number in range(2)
    ]
    hub.add("dataset", NAME, {name: name.encode() for name in (*extra, *rows)})
    assert sorted(contents(hub_data(pipeline, "huggingface"))) == rows[:2]
    assert sorted(contents(hub_data(pipeline, "huggingface", split="test"))) == rows[2:]


@pytest.mark.parametrize("source", HUBS)
@pytest.mark.parametrize("more", [{}, {"raw.jsonl": b"{}"}])
def test_a_script_of_a_data_set_is_not_run(
    pipeline: Pipeline, hub: FakeHub, source: str, more: dict[str, bytes]
) -> None:
    script = f"{NAME.rpartition('/')[2]}.py"
    repository, _ = hub.add("dataset", NAME, {script: b"raise SystemExit", **more})
    with pytest.raises(
        DataError, match=rf"a script makes its rows \({script}\).*revision: refs/convert/parquet"
    ):
        hub_data(pipeline, source)
    assert hub.sent_bytes(script) == 0
    if more:
        assert contents(hub_data(pipeline, source, files=["raw*"])) == more
    exported = {"default/train/0000.parquet": b"PAR1", "default/test/0000.parquet": b"PAR2"}
    repository.commit(exported, "refs/convert/parquet")
    if source == "huggingface":
        found = hub_data(
            pipeline, source, revision="refs/convert/parquet", files=["default/train/*.parquet"]
        )
        assert contents(found) == {"default/train/0000.parquet": b"PAR1"}


def test_a_readme_with_an_alias_leaves_files_out_and_that_is_counted(
    pipeline: Pipeline, hub: FakeHub
) -> None:
    readme = b"---\na: &a train.jsonl\nconfigs:\n- {config_name: default, data_files: *a}\n---\n"
    hub.add("dataset", NAME, {"README.md": readme, "train.jsonl": b"{}", "raw.csv": b"a"})
    assert contents(hub_data(pipeline, "huggingface")) == {"train.jsonl": b"{}"}
    assert any(line.endswith("1 of its 2 data files are wanted") for line in pipeline.said)


def test_subsets_may_stand_in_a_file_of_their_own(pipeline: Pipeline, hub: FakeHub) -> None:
    metadata = (
        b"configs:\n- {config_name: small, data_files: a.jsonl}\n- {config_name: large, "
        b"data_files: b.jsonl}\n"
    )
    hub.add("dataset", NAME, {".huggingface.yaml": metadata, "a.jsonl": b"a", "b.jsonl": b"b"})
    assert contents(hub_data(pipeline, "huggingface", subset="large")) == {"b.jsonl": b"b"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"it has several subsets; give `subset` one of english, chinese"),
        ({"subset": "french"}, r"it has no subset 'french'; give `subset` one of english, chinese"),
        (
            {"subset": "english", "split": "dev"},
            r"it has no split 'dev'; give `split` one of these: train, test",
        ),
        ({"files": ["*.txt"]}, r"no data file matches '\*\.txt'; it has english/train-0\.jsonl, "),
    ],
)
def test_a_choice_that_is_not_there_is_answered_with_what_there_is(
    pipeline: Pipeline, hub: FakeHub, settings: dict[str, Any], message: str
) -> None:
    hub.add("dataset", NAME, DATA)
    with pytest.raises(DataError, match=message):
        hub_data(pipeline, "huggingface", **settings)


@pytest.mark.parametrize(
    "pattern", ["/etc/*.json", "../*.json", "https://example.com/a.json", "zip://*::a.json", "~/a"]
)
def test_a_readme_cannot_name_files_elsewhere(
    pipeline: Pipeline, hub: FakeHub, pattern: str
) -> None:
    readme = (
        "---\nconfigs:\n- config_name: x\n  data_files:\n  - split: train\n    path: "
        f"['{pattern}']\n---\n"
    )
    hub.add("dataset", NAME, {"README.md": readme.encode(), "a.json": b"[]"})
    with pytest.raises(DataError, match=r"refused: its README\.md names '.*', outside of it"):
        hub_data(pipeline, "huggingface")


@pytest.mark.parametrize("readme", ["---\nconfigs: [1]\n---\n", "---\n{\n---\n", "\0"])
def test_a_readme_that_makes_no_sense_does_not_stop_who_names_files(
    pipeline: Pipeline, hub: FakeHub, readme: str
) -> None:
    hub.add("dataset", NAME, {"README.md": readme.encode(), "a.json": b"[]", "b.json": b"[]"})
    if readme != "\0":
        with pytest.raises(DataError, match="give `files`"):
            hub_data(pipeline, "huggingface")
    assert contents(hub_data(pipeline, "huggingface", files=["a.json"])) == {"a.json": b"[]"}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    "metadata",
    [
        BOMB + "configs: *i\n",
        BOMB.replace("[x, x, x, x, x, x, x, x, x, x]", "{x: 1}")
        .replace("[*", "{<<: [*")
        .replace("]", "]}"),
        "configs: &a [*a]\n",
        "size: 1" + ":1" * 100_000 + "\n",
        "configs:\n" + "- {config_name: x}\n" * 60_000,
    ],
)
def test_a_readme_that_unfolds_to_too_much_is_refused(
    pipeline: Pipeline, hub: FakeHub, metadata: str
) -> None:
    hub.add("dataset", NAME, {"README.md": f"---\n{metadata}---\n".encode(), "a.json": b"[]"})
    with pytest.raises(
        DataError, match=r"its README\.md (cannot be read|has more than 1 MB).*give `files`"
    ):
        hub_data(pipeline, "huggingface")


def test_a_pattern_that_takes_for_ever_is_left(
    pipeline: Pipeline, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline_lib.hub.splits.RESOLVE_S", 10)
    pattern = "*a" * 40 + "b.jsonl"
    readme = f"---\nconfigs:\n- {{config_name: x, data_files: '{pattern}'}}\n---\n"
    hub.add("dataset", NAME, {"README.md": readme.encode(), "a" * 200 + ".jsonl": b"{}"})
    with pytest.raises(
        DataError, match="`datasets` cannot tell its splits within 10 s; give `files`"
    ):
        hub_data(pipeline, "huggingface")
    assert workers_alive() == []


def test_a_data_set_without_files_of_rows_is_refused(pipeline: Pipeline, hub: FakeHub) -> None:
    hub.add("dataset", NAME, {"other.py": b"raise SystemExit", "rows.txt": b"", "README.md": b""})
    with pytest.raises(
        DataError, match=r"no file that rows are read from .*, only \.md, \.py, \.txt; take rows"
    ):
        hub_data(pipeline, "huggingface")


def test_a_model_in_another_format_is_refused_before_it_is_fetched(
    pipeline: Pipeline, hub: FakeHub
) -> None:
    hub.add("model", NAME, {"config.json": b"{}", "pytorch_model.bin": b"no"})
    experiment = pipeline.compile(model={"source": "huggingface", "name": NAME}, data=[PYDOC])
    with pytest.raises(
        DataError, match=r"it has no tokenizer\.json, \*\.safetensors \(other weight formats"
    ):
        pipeline.run(experiment, "model")
    assert not any("resolve" in request.path for request in hub.requests)


def test_a_failed_download_goes_on_where_it_was(pipeline: Pipeline, hub: FakeHub) -> None:
    hub.add("dataset", NAME, {"a.jsonl": b"{}\n", "b.jsonl": b"{}\n"})
    hub.fault("b.jsonl", lambda answer: replace(refusal(404, "EntryNotFound")(answer), pause_s=0.5))
    with pytest.raises(HubError, match="has no such file at this commit"):
        hub_data(pipeline, "huggingface", files=["*"])
    assert contents(hub_data(pipeline, "huggingface", files=["*"])) == {
        "a.jsonl": b"{}\n",
        "b.jsonl": b"{}\n",
    }
    assert [request.path.rpartition("/")[2] for request in hub.requests].count("a.jsonl") == 1


def test_a_spec_without_a_commit_is_refused(pipeline: Pipeline) -> None:
    spec = Spec(
        "download", 1, {"kind": "model", "source": "huggingface", "name": NAME, "revision": "main"}
    )
    with pytest.raises(IntegrityError, match="the spec names no commit but 'main'"):
        run_stage(download.run, spec, pipeline.store, pipeline.said.append)


@pytest.mark.parametrize("source", HUBS)
def test_jobs_that_start_together_download_once(
    pipeline: Pipeline, hub: FakeHub, source: str
) -> None:
    hub.add("dataset", NAME, {"a.jsonl": b"{}\n" * 100, "b.jsonl": b"{}\n"})
    hub.fault("a.jsonl", late)
    experiment = pipeline.compile(data=[{"source": source, "name": NAME, "files": ["*"]}])
    hub.requests.clear()
    spec = experiment.specs["data.0"]

    def job() -> None:
        run_stage(download.run, spec, pipeline.store, pipeline.said.append)

    with running(job) as first, running(job) as second:
        finish([first, second])
    open_sealed(spec.ref, pipeline.store).folder()
    assert len(hub.requests) == len({request.path for request in hub.requests}) == 3


def test_jobs_of_one_snapshot_take_turns_and_share_what_arrives(
    pipeline: Pipeline, hub: FakeHub
) -> None:
    hub.add("dataset", NAME, {"a.jsonl": b"{}\n" * 100, "b.jsonl": b"{}\n", "c.jsonl": b"{}\n\n"})
    hub.fault("a.jsonl", late)
    data = [
        {"source": "huggingface", "name": NAME, "files": files} for files in (["[ab]*"], ["[ac]*"])
    ]
    experiment = pipeline.compile(data=data)
    specs = [experiment.specs["data.0"], experiment.specs["data.1"]]
    hub.requests.clear()

    def job(spec: Spec) -> None:
        run_stage(download.run, spec, pipeline.store, pipeline.said.append)

    with running(job, specs[0]) as first, running(job, specs[1]) as second:
        finish([first, second])
    for spec in specs:
        open_sealed(spec.ref, pipeline.store).folder()
    fetched = sorted(
        request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path
    )
    assert fetched == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert not list(pipeline.root.glob("runs/*/arrived"))
