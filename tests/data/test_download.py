import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import list_files, sha256_file
from pipeline_lib.base.manifest import verify
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.stage import run_stage
from pipeline_lib.data import download

from .conftest import Pipeline

PYDOC = {"source": "pydoc", "max_rows": 20}


def test_a_local_model_comes_as_it_is_without_code(pipeline: Pipeline, tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    for name in ("modeling_qwen3.py", "pytorch_model.bin", ".gitattributes"):
        (model / name).write_text("no")
    experiment = pipeline.compile(model={"source": "local", "path": str(model)}, data=[PYDOC])
    made = pipeline.run(experiment, "model")["model"]
    assert list_files(made.path) == sorted([*list_files(tiny_folder), "manifest.json"])
    assert all(sha256_file(made.path / name) == sha256_file(tiny_folder / name) for name in list_files(tiny_folder))
    assert made.manifest.counts["files"] == 6


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
    with pytest.raises(DataError, match=r"changed since the config was read \(a\.jsonl came or went\)"):
        pipeline.run(experiment, "data.0")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_changed_since_is_refused(
    pipeline: Pipeline, tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    experiment = pipeline.compile(model={"source": "local", "path": str(model)}, data=[PYDOC])
    change(model / name)
    with pytest.raises(DataError, match="changed since the config was read"):
        pipeline.run(experiment, "model")
    shutil.rmtree(model)
    with pytest.raises(DataError, match="came or went"):
        pipeline.run(experiment, "model")


def test_a_tiny_model_is_built_around_a_tokenizer(pipeline: Pipeline, tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny_folder / name, tokenizer / name)
    small = {"source": "tiny", "hidden_size": 16, "layers": 1, "heads": 2, "tokenizer": str(tokenizer)}
    experiment = pipeline.compile(model=small, data=[PYDOC])
    made = pipeline.run(experiment, "model")["model"]
    assert sha256_file(made.path / "tokenizer.json") == sha256_file(tiny_folder / "tokenizer.json")
    change(tokenizer / "chat_template.jinja")
    shutil.rmtree(made.path)
    with pytest.raises(DataError, match=r"chat_template\.jinja: changed since"):
        pipeline.run(experiment, "model")


@pytest.mark.parametrize("settings", [{"kind": "data", "source": "pydoc"}, {"kind": "model", "source": "tiny"}])
def test_another_python_is_refused(pipeline: Pipeline, settings: dict[str, Any]) -> None:
    spec = Spec("download", 1, {**settings, "content": {"python": "3.0.0"}})
    with pytest.raises(DataError, match=r"compiled under Python 3\.0\.0"):
        run_stage(download.run, spec, pipeline.store, pipeline.said.append)
