"""Adapters of others, and models of other experiments, as they come into the store."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Ref, Spec
from pipeline_lib.data import download
from tests.fake_hub import FakeHub

from .conftest import Pipeline

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "base_model_name_or_path": "owner/base",
}
FILES = {
    "adapter_config.json": json.dumps(CONFIG).encode(),
    "adapter_model.safetensors": b"values",
}
TRAIN = {"method": "lora", "lora": {"rank": 8, "alpha": 16}}
DATA: list[dict[str, Any]] = [{"source": "pydoc", "max_rows": 20}]
INSIDE = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]


def beside(pipeline: Pipeline, adapter: dict[str, Any]) -> dict[str, Any]:
    """A config of the pipeline's model with `adapter` beside it."""
    model = {"source": "local", "path": str(pipeline.model), "adapter": adapter}
    return {"model": model, "data": DATA, "train": TRAIN}


@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_a_hubs_adapters_come_alone_at_their_commit(
    pipeline: Pipeline, hub: FakeHub, source: str
) -> None:
    _, commit = hub.add("model", "owner/lora", {**FILES, "adapter_model.bin": b"no"})
    experiment = pipeline.compile(**beside(pipeline, {"source": source, "name": "owner/lora"}))

    assert experiment.specs["adapter"].settings["revision"] == commit
    made = pipeline.run(experiment, "adapter")["adapter"]
    assert sorted(made.manifest.files) == INSIDE
    assert (made.path / INSIDE[1]).read_bytes() == b"values"
    assert not hub.sent_bytes("adapter_model.bin")


def test_a_hubs_repository_without_them_is_refused(pipeline: Pipeline, hub: FakeHub) -> None:
    hub.add("model", "owner/lora", {"adapter_config.json": FILES["adapter_config.json"]})
    adapter = {"source": "huggingface", "name": "owner/lora"}
    experiment = pipeline.compile(**beside(pipeline, adapter))

    with pytest.raises(DataError, match="it has no adapter_model.safetensors"):
        pipeline.run(experiment, "adapter")


def test_adapters_of_another_base_are_refused_before_they_are_sealed(
    pipeline: Pipeline, hub: FakeHub, tmp_path: Path
) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    adapter = {"source": "local", "path": str(folder)}
    experiment = pipeline.compile(**beside(pipeline, adapter))
    made = pipeline.run(experiment, "adapter")["adapter"]
    assert sorted(made.manifest.files) == INSIDE

    spec = experiment.specs["adapter"]
    other = replace(spec, settings={**spec.settings, "base": "owner/other"})
    with pytest.raises(DataError, match="they were trained on owner/base, and model.name is owner"):
        run_stage(download.run, other, pipeline.store, pipeline.said.append)
    assert not pipeline.store.is_sealed(other.ref)


def merged(pipeline: Pipeline, files: dict[str, bytes]) -> Ref:
    """A sealed merge that holds `files`."""

    def fill(job: Job) -> dict[str, Any]:
        for name, content in files.items():
            (job.out / name).parent.mkdir(exist_ok=True)
            (job.out / name).write_bytes(content)
        return {}

    spec = Spec("merge", 4)
    run_stage(fill, spec, pipeline.store, pipeline.said.append)
    return spec.ref


def test_the_model_of_an_experiment_is_linked_and_nothing_else_of_its_folder(
    pipeline: Pipeline,
) -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors", "LICENSE", "README.md"]
    ref = merged(pipeline, dict.fromkeys([*names, "lineage.json", *INSIDE], b"content"))
    settings = {"kind": "model", "source": "experiment"}
    spec = Spec("download", 2, settings, {"merge": ref}, {"experiment": "text"})

    manifest = run_stage(download.run, spec, pipeline.store, pipeline.said.append)
    made = pipeline.store.sealed(spec.ref)
    wanted = ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(manifest.files) == wanted
    assert manifest.counts["experiment"] == "text"
    for name in wanted:
        assert (made / name).samefile(pipeline.store.sealed(ref) / name)

    adapter = replace(spec, settings={"kind": "adapter", "source": "experiment"})
    (pipeline.store.sealed(ref) / INSIDE[0]).write_bytes(b"another")  # of the same size
    with pytest.raises(IntegrityError, match="content differs from what was sealed"):
        run_stage(download.run, adapter, pipeline.store, pipeline.said.append)
