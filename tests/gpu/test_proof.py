"""The proof of a merge on a GPU: the same figures whether the GPU keeps the tensors or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.merges import LORAS, Case, Merges
from benchmarks.wrong_merges import FILES
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.spans import Spans
from pipeline_lib.export.proof import Reference, compare_logits, compare_tensors, kept_on, prove

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA GPU"),
]
GPU = torch.device("cuda", 0)
CASES = {
    "full": Case(2, 4, 1, 32, tied=True, train=Train(precision="fp32", lr=1e-3)),
    "lora": Case(3, train=Train(method="lora", precision="bf16", lr=1e-2, lora=LORAS["lora"])),
}


@pytest.fixture(scope="module", params=CASES)
def merges(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Merges]:
    yield Merges.of(CASES[request.param], tmp_path_factory.mktemp(request.param))


def folders(merges: Merges, name: str) -> tuple[Path, Path, Path]:
    """Return the exported folder `name`, the base's and the training's."""
    return merges.folder / name, merges.folder / "base", merges.folder / "trained"


def test_the_figures_do_not_depend_on_what_is_kept(merges: Merges) -> None:
    here = folders(merges, "right")
    kept = kept_on(GPU, *here)
    assert kept.device == GPU
    keeping = Reference(*here, merges.case.train, kept)
    reading = Reference(*here, merges.case.train)
    assert compare_tensors(keeping, GPU) == compare_tensors(reading, GPU)
    assert compare_logits(keeping, GPU) == compare_logits(reading, GPU)


@pytest.mark.parametrize("wrong", FILES)
def test_a_slightly_wrong_merge_is_refused(merges: Merges, wrong: str) -> None:
    if not merges.make_wrong(wrong):
        pytest.skip("this model has no such tensor")
    with pytest.raises(TrainingError):
        prove(*folders(merges, "wrong"), merges.case.train, GPU, print, Spans())
