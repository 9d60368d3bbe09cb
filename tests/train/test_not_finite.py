"""Weights and moments that are not finite are refused: at a checkpoint's load, before a result."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.run_folder import CHECKPOINTS, WEIGHTS
from pipeline_lib.core.store import describe_file
from pipeline_lib.train import loop
from pipeline_lib.train.rank import RankJob
from pipeline_lib.train.state import not_finite
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import train, train_and_say


def poison(checkpoint: Path, kind: str) -> None:
    """Put one NaN into a tensor of that kind, and seal the checkpoint as if it always was."""
    place, prefix = (WEIGHTS, "") if kind == WEIGHTS else ("tensors", f"{kind}.")
    for path in sorted((checkpoint / place).glob("*.safetensors")):
        tensors = load_file(str(path))
        names = [name for name in tensors if name.startswith(prefix) and tensors[name].numel()]
        if names:
            tensors[names[0]].view(-1)[0] = math.nan
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            save_file(tensors, path, metadata=header["__metadata__"])
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            manifest["files"][f"{place}/{path.name}"] = describe_file(path).model_dump()
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))
            return
    raise AssertionError(f"{kind} is in no file")


@pytest.mark.parametrize(
    ("strategy", "kind"), [("ddp", "weights"), ("fsdp", "exp_avg_sq"), ("zero2", "weights")]
)
def test_a_checkpoint_that_holds_nan_is_refused_by_every_rank(
    arena: Arena, tmp_path: Path, strategy: str, kind: str
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "save_every_steps": 2}
    first = arena.job(2, tmp_path / "first", until_step=2, **settings)
    run_ranks(train, 2, first)
    [checkpoint] = (arena.store.run_dir(run_digest(first.spec)) / CHECKPOINTS).iterdir()
    poison(checkpoint, kind)
    resumed = arena.job(2, tmp_path / "resumed", until_step=4, **settings)
    assert resumed.resume_from == checkpoint

    said = run_ranks(train_and_say, 2, resumed)
    assert len(set(said.values())) == 1
    assert said[0].startswith(f"IntegrityError: {checkpoint}: {kind}.")
    assert f"remove {checkpoint}" in said[0]


def train_to_infinity(environ: Mapping[str, str], job: RankJob) -> str:
    """Train with a rate that no weight survives, in the last update: no loss follows it."""

    def rate(*_: Any) -> float:
        return 1e39  # more than fp32 holds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "learning_rate", rate)
        return train_and_say(environ, job)


def test_a_result_that_is_not_finite_is_not_left(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(2, tmp_path / "out", until_step=1)
    said = run_ranks(train_to_infinity, 2, job)
    assert said[0] == said[1]
    assert said[0].startswith("TrainingError: ")
    assert "hold NaN or infinity after step 1" in said[0]
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_are_found_wherever_they_are(value: float) -> None:
    tensors = {
        "a": torch.ones(3, 4),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.ones(0),
    }
    tensors["b"][3] = value
    tensors["numbers"] = torch.ones(2, dtype=torch.int64)
    assert not_finite(tensors) == ["b"]
    assert not_finite({"large": torch.full((4,), torch.finfo(torch.float32).max)}) == []
