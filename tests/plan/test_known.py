"""What is known of a model and its data before any computation, and without the network."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.config.content import measured_content
from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Config
from pipeline_lib.config.stages import STAGES
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import (
    Manifest,
    Spec,
    Store,
    VerifiedFiles,
    describe_files,
    write_manifest,
)
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.data.blocks import BlockReader, read_index
from pipeline_lib.data.download import run as download
from pipeline_lib.data.shard import run as shard
from pipeline_lib.data.tiny_model import build_tiny
from pipeline_lib.data.tiny_tokenizer import write_tokenizer
from pipeline_lib.data.tokenize import run as tokenize
from pipeline_lib.plan.answer import question_of
from pipeline_lib.plan.known import (
    blocks_of,
    find_geometry,
    geometry_of,
    repetition_of,
    workload_of,
)
from pipeline_lib.plan.warnings import on_steps

SMALL = """\
experiment: small
model: {source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}
data: {train: [{source: pydoc, max_rows: 60}], validation_fraction: 0.1}
tokenize: {max_tokens: 128, max_dropped_fraction: 0.9}
shard: {block_tokens: 128, shards: 2}
"""
COMMIT = "c" * 40
SIZES = {
    "model_type": "qwen3",
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4},
}


def written(folder: Path, text: str = SMALL) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def sealed_stages(path: Path, store: Store, *parts: str) -> Experiment:
    """The experiment, its stages `parts` computed."""
    experiment = open_experiment(path, store)
    store.write_specs(experiment.specs.values())
    for part in parts:
        spec = experiment.specs[part]
        function: Any = {"tokenize": tokenize, "shard": shard}.get(spec.stage, download)
        run_stage(function, spec, store, lambda text: None)
    return experiment


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Store]:
    """A config whose blocks are made."""
    folder = tmp_path_factory.mktemp("sealed")
    path, store = written(folder), Store(folder / "store")
    sealed_stages(path, store, "model", "data.0", "tokenize", "shard")
    return load_config(path), store


def seal(folder: Path) -> None:
    """Seal what `folder` of a download holds."""
    write_manifest(
        folder,
        Manifest(stage="download", digest=folder.name, spec={}, files=describe_files(folder)),
    )


def hub_config(name: str, revision: str | None = None) -> Config:
    model = {"source": "huggingface", "name": name, **({"revision": revision} if revision else {})}
    return Config.model_validate_json(
        json.dumps({"experiment": "x", "model": model, "data": {"train": [{"source": "pydoc"}]}})
    )


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"vocab_tokens": 700, "hidden_size": 96, "layers": 3, "heads": 6},
        {"hidden_size": 40, "heads": 2, "vocab_tokens": 1024},
    ],
)
def test_a_tiny_model_is_known_before_it_is_built(tmp_path: Path, model: dict[str, Any]) -> None:
    settings = {"source": "tiny", **model}
    config = Config.model_validate_json(
        json.dumps({"experiment": "x", "model": settings, "data": {"train": [{"source": "pydoc"}]}})
    )
    predicted = find_geometry(config, Store(tmp_path / "store"))
    built = tmp_path / "model"
    built.mkdir()
    build_tiny(config.model, built, lambda text: None)  # type: ignore[arg-type]
    assert predicted == read_geometry(built)


def test_a_tiny_model_around_a_tokenizer_is_known_before_it_is_built(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(["one two three four five six seven"] * 20, 333, folder)
    config = load_config(
        written(tmp_path, SMALL.replace("vocab_tokens: 512", f"tokenizer: {folder}"))
    )
    predicted, store = find_geometry(config, Store(tmp_path / "none")), Store(tmp_path / "store")
    experiment = sealed_stages(tmp_path / "config.yaml", store, "model")
    assert predicted == read_geometry(store.sealed(experiment.ref("model")))


def test_what_was_downloaded_counts_more_than_what_is_expected(
    sealed: tuple[Config, Store], tmp_path: Path
) -> None:
    config, store = sealed
    known = geometry_of(config, store)
    [folder] = [path.parent for path in (store.root / "download").glob("*/config.json")]
    assert known == read_geometry(folder)
    write_json(
        folder / "config.json", {**read_json(folder / "config.json"), "num_hidden_layers": 7}
    )
    try:
        with pytest.raises(IntegrityError, match=r"config\.json: content differs"):
            geometry_of(config, store)
        seal(folder)
        assert geometry_of(config, store).layers == 7
    finally:
        write_json(
            folder / "config.json", {**read_json(folder / "config.json"), "num_hidden_layers": 2}
        )
        seal(folder)
    assert geometry_of(config, Store(tmp_path / "empty")).layers == 2


def test_a_local_model_is_read_where_it_lies(tmp_path: Path) -> None:
    write_json(tmp_path / "base" / "config.json", {**SIZES, "num_hidden_layers": 3})
    text = SMALL.replace(
        "source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2", "source: local, path: PATH"
    )
    config = load_config(written(tmp_path, text.replace("PATH", str(tmp_path / "base"))))
    assert geometry_of(config, Store(tmp_path / "store")).layers == 3
    elsewhere = load_config(written(tmp_path, text.replace("PATH", str(tmp_path / "nowhere"))))
    assert find_geometry(elsewhere, Store(tmp_path / "store")) is None
    write_json(
        tmp_path / "base" / "config.json",
        {**SIZES, "num_hidden_layers": 3, "quantization": {"bits": 4}},
    )
    with pytest.raises(DataError, match=r"base/config\.json: its weights are quantized"):
        find_geometry(config, Store(tmp_path / "store"))
    write_json(tmp_path / "base" / "config.json", {"model_type": "gemma2"})
    with pytest.raises(DataError, match="model_type 'gemma2' is not one of"):
        find_geometry(config, Store(tmp_path / "store"))


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_published_model_is_known_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    monkeypatch.setattr(
        "pipeline_lib.hub.snapshot.resolve", lambda *_: pytest.fail("a hub was asked")
    )
    store = Store(tmp_path / "store")
    assert geometry_of(hub_config("Qwen/Qwen3-8B", revision), store).parameters == 8_190_735_360
    with pytest.raises(
        DataError, match="the sizes of owner/model are not known here: it was not downloaded to"
    ):
        geometry_of(hub_config("owner/model", revision), store)
    assert workload_of(hub_config("Qwen/Qwen3-8B", revision), store).is_assumed


def test_a_model_that_was_downloaded_is_known_by_the_revision_that_is_remembered(
    tmp_path: Path,
) -> None:
    """Whatever the data are: here they are files that are not there."""
    store = Store(tmp_path / "store", UserCache(tmp_path / "cache"))
    rows = [{"source": "file", "path": "nowhere.jsonl"}]
    config = hub_config("owner/model", "main")
    data = json.dumps({**config.model_dump(mode="json"), "data": {"train": rows}})
    config = Config.model_validate_json(data)
    revisions = {"huggingface model owner/model main": {"commit": COMMIT}}
    remembered = store.remembered("revisions.json")
    assert remembered is not None
    write_json(remembered, revisions)
    settings = {"kind": "model", "name": "owner/model", "revision": COMMIT, "source": "huggingface"}
    folder = store.sealed(Spec("download", STAGES["download"].version, settings, {}).ref)
    write_json(folder / "config.json", {**SIZES, "num_hidden_layers": 5})
    assert find_geometry(config, store) is None, "it is not complete yet"
    seal(folder)
    assert geometry_of(config, store).layers == 5


def test_what_samples_that_repeat_each_other_cost_is_known_before_there_are_blocks(
    tmp_path: Path,
) -> None:
    row = {
        "instruction": "And you?",
        "output": "Well.",
        "history": [["How are you?", "Fine."], ["Fine?", "Yes."]],
    }
    (tmp_path / "rows.json").write_text(json.dumps([row] * 3))
    text = SMALL.replace(
        "{source: pydoc, max_rows: 60}", f"{{source: file, path: {tmp_path}/rows.json}}"
    )
    path, store = written(tmp_path, text), Store(tmp_path / "store", UserCache(tmp_path / "cache"))
    config = load_config(path)
    assert repetition_of(config, store) == ""
    sealed_stages(path, store, "model", "data.0", "tokenize")
    assert repetition_of(config, store).startswith("9 samples of 3 conversations have ")
    assert question_of(config, store).repetition == repetition_of(config, store)


def test_blocks_that_are_there_are_known(sealed: tuple[Config, Store], tmp_path: Path) -> None:
    config, store = sealed
    found = blocks_of(config, store)
    assert found is not None
    [folder] = [path.parent for path in (store.root / "shard").glob("*/manifest.json")]
    reader = BlockReader(folder / "train")
    lengths = [len(document) for document in documents(reader)]
    assert found.workload == workload_of(config, store)
    assert found.workload.document_tokens == pytest.approx(
        sum(n * n for n in lengths) / sum(lengths)
    )
    assert found.workload.real_fraction == pytest.approx(sum(lengths) / (len(reader) * 128))
    assert found.workload.validation_blocks == read_index(folder / "validation").blocks
    assert blocks_of(config, Store(tmp_path / "empty")) is None


def test_samples_that_the_blocks_cannot_meet_are_refused_before_the_plan(
    sealed: tuple[Config, Store],
) -> None:
    config, store = sealed
    train = config.train.model_copy(update={"global_batch_samples": 1})
    [refusal] = on_steps(config.model_copy(update={"train": train}), store)
    assert (refusal.kind, refusal.key) == ("refusal", "train.global_batch_samples")
    assert "cannot be met within 10%" in refusal.sentence


def documents(reader: BlockReader) -> list[list[int]]:
    """The tokens of every document, cut out by their numbers."""
    found = []
    for block in (reader[number] for number in range(len(reader))):
        for number in sorted({int(each) for each in block.documents} - {-1}):
            found.append(block.tokens[block.documents == number].tolist())
    return found


def test_files_that_were_never_hashed_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of a model of 60 GB, on a machine that has not seen it, is no reason to read it."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    data = f"{{source: file, path: {tmp_path / 'rows.jsonl'}}}"
    config = load_config(written(tmp_path, SMALL.replace("{source: pydoc, max_rows: 60}", data)))
    monkeypatch.setattr(VerifiedFiles, "sha256", lambda *_: pytest.fail("a file was read"))
    assert blocks_of(config, Store(tmp_path / "store")) is None


def test_measurements_are_read_and_what_does_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    config = load_config(written(tmp_path, SMALL + f"cluster: {{measured: {path}}}\n"))
    with pytest.raises(
        ConfigError, match=r"cluster.measured: .*does not read.* calibrate CONFIG` writes it"
    ):
        measured_content(config)
    write_json(path, {"schema": 1})
    assert measured_content(config) == {"schema": 1}
    assert measured_content(load_config(written(tmp_path))) is None
