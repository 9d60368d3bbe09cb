import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.stage import Sealed, run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.data import download, shard, tokenize
from pipeline_lib.data.tiny_model import build_tiny
from tests.stages import fork_workers

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"

SMALL = TinyModel(source="tiny", vocab_tokens=600, hidden_size=32, layers=2, heads=2)


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the workers of the stages their imports; test_pool.py has them as in a pipeline."""
    fork_workers(monkeypatch)


def silent(text: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that was trained here."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(SMALL, folder, silent)
    return folder


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    folder = SHARED / "qwen3-tokenizer"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here: Qwen3's vocabulary is not part of the project")
    return folder


@pytest.fixture(params=["tiny", "qwen"])
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.getfixturevalue(f"{request.param}_folder")
    assert isinstance(found, Path)
    return found


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
        )
        return path

    return write


@dataclass
class Pipeline:
    """Runs the stages of this package on a config, in a store of its own."""

    root: Path
    model: Path
    said: list[str]

    @property
    def store(self) -> Store:
        return Store(self.root / "store", UserCache(self.root / "cache"))

    def compile(self, **config: Any) -> Experiment:
        """The specs of `config` (default: a tiny model); `data` and `validation` are sources."""
        sections: dict[str, Any] = {"model": {"source": "local", "path": str(self.model)}}
        sections |= {"shard": {"block_tokens": 64}, "train": {"global_batch_tokens": 64 * 2}}
        sections["tokenize"] = {"max_tokens": 64, **config.pop("tokenize", {})}
        held_out: dict[str, Any] = {"validation_fraction": config.pop("validation_fraction", 0.2)}
        if "validation" in config:
            held_out = {"validation": config.pop("validation")}
        sections["data"] = {"train": config.pop("data"), **held_out}
        path = self.root / "config.yaml"
        path.write_text(json.dumps({"experiment": "test", **sections, **config}))
        return open_experiment(path, self.store)

    def run(self, experiment: Experiment, last: str = "shard") -> dict[str, Sealed]:
        """Run the stages up to `last`; the sealed directories by the name of their part."""
        functions = {"download": download.run, "tokenize": tokenize.run, "shard": shard.run}
        made = {}
        for part, spec in experiment.specs.items():
            manifest = run_stage(functions[spec.stage], spec, self.store, self.said.append)
            made[part] = Sealed(self.store.sealed(spec.ref), manifest)
            if part == last:
                break
        return made

    def tokenize(self, *sources: Path | dict[str, Any], **config: Any) -> Sealed:
        """The output of the tokenize stage for data files and other sources."""
        data = [
            {"source": "file", "path": str(source)} if isinstance(source, Path) else source
            for source in sources
        ]
        return self.run(self.compile(data=data, **config), "tokenize")["tokenize"]


@pytest.fixture
def pipeline(tmp_path: Path, tiny_folder: Path) -> Pipeline:
    return Pipeline(tmp_path, tiny_folder, [])
