"""What `check` and `plan` learn of a hub's model before a download, over real loopback HTTP."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError
from pipeline_lib.core.store import Store
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.plan.known import (
    ARCHITECTURES_NAME,
    find_geometry,
    geometry_of,
    learn_architecture,
)
from pipeline_lib.workflow.findings import refuse_wrong
from tests.fake_hub import FakeHub, Files, flipped, serving

NAME = "owner/model"
QWEN = {
    "model_type": "qwen3",
    **{
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
    },
}
WEIGHTS = b"weights, which nobody asks for" * 1000
HUBS = ("huggingface", "modelscope")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", UserCache(tmp_path / "cache"))


def files_of(config: Any) -> Files:
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    return {"config.json": content, "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def config_of(source: str, revision: str | None = None) -> Config:
    model = {"source": source, "name": NAME, "revision": revision}
    return Config.model_validate_json(
        json.dumps({"experiment": "x", "model": model, "data": {"train": [{"source": "pydoc"}]}})
    )


def learned(config: Config, store: Store) -> list[str]:
    said: list[str] = []
    learn_architecture(config, store, said.append)
    return said


@pytest.mark.parametrize("source", HUBS)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_sizes_are_known_from_kilobytes_and_looked_up_once(
    hub: FakeHub, store: Store, source: str, is_pinned: bool
) -> None:
    commit = hub.add("model", NAME, files_of(QWEN))[1]
    config = config_of(source, commit if is_pinned else None)
    assert find_geometry(config, store) is None
    learned(config, store)
    assert geometry_of(config, store).layers == 3
    assert hub.sent_bytes("config.json") > 0
    assert hub.sent_bytes("model.safetensors") + hub.sent_bytes("/cdn/") == 0
    asked = len(hub.requests)
    hub.repositories["model", NAME].commit(files_of({**QWEN, "num_hidden_layers": 5}))
    assert learned(config, store) == []
    assert geometry_of(config, store).layers == 3
    assert len(hub.requests) == asked


UNUSABLE = {
    "another architecture": (
        files_of({"model_type": "gemma2"}),
        "model_type 'gemma2' is not one of qwen2, qwen3",
    ),
    "a sliding window": (
        files_of({"model_type": "mistral", "sliding_window": 4096}),
        "sliding_window is 4096",
    ),
    "pictures": (
        files_of({"model_type": "qwen3_vl", "vision_config": {}}),
        "it takes pictures, video or sound",
    ),
    "quantized": (
        files_of({**QWEN, "quantization_config": {"quant_method": "awq"}}),
        "its weights are quantized",
    ),
    "sizes are missing": (
        files_of({"model_type": "qwen3"}),
        "config.json: lacks 'num_attention_heads'",
    ),
    "an adapter": (
        {"adapter_config.json": b"{}"},
        r"it has no config\.json, tokenizer\.json, \*\.safetensors",
    ),
    "no JSON": (files_of(b"["), "does not read as a JSON object"),
    "no number": (files_of(b'{"model_type": NaN}'), "is no JSON|does not read"),
    "too large": (files_of(b" " * (2**20 + 1)), "has more than 1 MiB"),
}


@pytest.mark.parametrize("source", HUBS)
@pytest.mark.parametrize(("files", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_cannot_be_trained_is_refused_before_the_download(
    hub: FakeHub, store: Store, source: str, files: Files, problem: str
) -> None:
    hub.add("model", NAME, files)
    config = config_of(source)
    refuse_wrong(config, store)  # nothing is known yet
    learned(config, store)
    with pytest.raises(
        ConfigError, match=f"model.name: {source} model {NAME} at [0-9a-f]{{12}}: .*({problem})"
    ):
        refuse_wrong(config, store)
    asked = len(hub.requests)
    assert learned(config, store) == []
    with pytest.raises(DataError, match=problem):
        geometry_of(config, store)
    assert len(hub.requests) == asked
    assert hub.sent_bytes("/cdn/") == 0


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize("source", HUBS)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_others_train_is_planned_and_refused_as_a_training(
    hub: FakeHub, store: Store, source: str, kind: str
) -> None:
    hub.add("model", NAME, files_of({**LLAMA, "model_type": kind}))
    config = config_of(source)
    learned(config, store)
    # as Llama-3.1-8B's card says, without its buffers
    assert geometry_of(config, store).parameters == 8_030_261_248
    with pytest.raises(
        ConfigError, match="models of type llama and mistral are planned here, and only qwen2, "
    ):
        refuse_wrong(config, store)


@pytest.mark.parametrize("source", HUBS)
def test_wrong_content_is_not_believed(hub: FakeHub, store: Store, source: str) -> None:
    hub.add("model", NAME, files_of({"model_type": "llama"}))
    config = config_of(source)
    for where in ("resolve", "FilePath"):
        hub.fault(where, flipped, times=99)
    with pytest.raises(IntegrityError, match=r"config\.json"):
        learned(config, store)
    assert find_geometry(config, store) is None


@pytest.mark.parametrize("source", HUBS)
def test_a_hub_that_cannot_be_asked_is_said_and_refuses_nothing(
    hub: FakeHub, store: Store, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    config = config_of(source, "a" * 40)
    said = learned(config, store)
    assert "model.name: the architecture could not be looked up" in said[-1]
    refuse_wrong(config, store)
    assert find_geometry(config, store) is None
    assert hub.requests == []


@pytest.mark.parametrize("text", ["[1]", "{", '{"huggingface model owner/model COMMIT": 1}'])
def test_a_damaged_memory_is_as_none(hub: FakeHub, store: Store, text: str) -> None:
    commit = hub.add("model", NAME, files_of(QWEN))[1]
    memory = store.remembered(ARCHITECTURES_NAME)
    assert memory is not None
    memory.write_text(text.replace("COMMIT", commit))
    config = config_of("huggingface", commit)
    assert find_geometry(config, store) is None
    learned(config, store)
    assert geometry_of(config, store).layers == 3


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {
        key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_OFFLINE")
    }
    told |= {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    told |= {"PIPELINE_STORE": str(folder / "store")}
    line = [sys.executable, "-m", "pipeline_lib", *arguments]
    return subprocess.run(
        line, cwd=folder, env=told, capture_output=True, text=True, timeout=120, check=False
    )


CONFIG = """\
experiment: x
model: {source: huggingface, name: owner/model, revision: REVISION}
data: {train: [{source: pydoc}]}
sweep: {train.lr: [1.0e-4, 2.0e-4]}
"""


def test_check_and_plan_refuse_another_architecture_and_say_what_they_could_not_look_up(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    with serving() as hub:
        repository, commit = hub.add(
            "model", NAME, files_of({"model_type": "qwen3_vl", "vision_config": {}})
        )
        path.write_text(CONFIG.replace("REVISION", commit))
        offline = command(tmp_path, "check", "config.yaml", HF_HUB_OFFLINE="1")
        assert offline.returncode == 0, offline.stderr
        assert offline.stdout.count("the architecture could not be looked up") == 1
        assert hub.requests == []

        for name in ("check", "plan"):
            refused = command(tmp_path, name, "config.yaml", HF_ENDPOINT=hub.url)
            assert refused.returncode == (2 if name == "check" else 65), (
                refused.stdout + refused.stderr
            )
            assert "model_type 'qwen3_vl' is not one of qwen2, qwen3, qwen3_moe" in refused.stderr
        assert hub.sent_bytes("/cdn/") == 0
        assert not (tmp_path / "store").exists()

        repository.commit(files_of(QWEN))
        path.write_text(CONFIG.replace("REVISION", "main"))
        planned = command(tmp_path, "plan", "config.yaml", HF_ENDPOINT=hub.url)
        assert planned.returncode == 0, planned.stderr
        assert command(tmp_path, "check", "config.yaml", HF_HUB_OFFLINE="1").returncode == 0
