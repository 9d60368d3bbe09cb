"""A right merge is proven however rounding changes its logits, a slightly wrong one never is."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.merges import CPU, LORAS, Case, Merges
from benchmarks.wrong_merges import FILES, PLANS
from pipeline_lib.arch.weight_files import read_headers
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.spans import Spans
from pipeline_lib.export.fold import mean_of, plan_fold
from pipeline_lib.export.proof import Reference, compare_logits, compare_tensors, prove
from pipeline_lib.model.kept import Kept
from pipeline_lib.records.merge import Parity
from pipeline_lib.train.saved_tensors import fill_saved, find_saved, save_tensors

FULL = Train(precision="fp32", lr=1e-3)
CASES = {
    "full": Case(2, 4, 1, 32, tied=True, train=FULL),
    "lora": Case(
        3, 8, 2, 32, train=Train(method="lora", precision="bf16", lr=1e-2, lora=LORAS["lora"])
    ),
    "experts": Case(
        2,
        4,
        2,
        32,
        train=Train(method="lora", precision="fp32", lr=1e-2, lora=LORAS["lora of experts"]),
    ),
    "dora": Case(
        3,
        tied=True,
        train=Train(method="lora", precision="fp32", lr=1e-2, lora=LORAS["dora"]),
        stored=torch.float32,
    ),
    "dense": Case(12, hidden=32, train=FULL.model_copy(update={"precision": "bf16"})),
}
# What these models have nothing of: adapters, experts, an adapter of both projections.
MISSING = {
    ("wrong projection", "experts"),
    *(("alpha off by 1 %", kind) for kind in ("full", "dense")),
    *(("two experts swapped", kind) for kind in ("dora", "dense")),
}


@pytest.fixture(scope="module", params=CASES)
def merges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Merges:
    """A model that was trained for a few steps, rightly merged."""
    return Merges.of(CASES[request.param], tmp_path_factory.mktemp(request.param))


def test_a_right_merge_is_proven(merges: Merges) -> None:
    figures = merges.proven("right")
    assert figures.value_difference < 1e-6
    assert figures.relative_difference <= figures.tolerance
    assert (figures.tolerance == 1e-4) == (merges.case.train.precision == "fp32")


@pytest.mark.parametrize("wrong", [*PLANS, *FILES])
def test_a_slightly_wrong_merge_is_refused(merges: Merges, wrong: str) -> None:
    there_is_one = merges.make_wrong(wrong)
    assert there_is_one == (
        (wrong, next(name for name, case in CASES.items() if case is merges.case)) not in MISSING
    )
    if there_is_one:
        with pytest.raises(TrainingError, match="the exported model is not the trained one"):
            merges.proven("wrong")


def test_rounding_that_changes_the_choice_of_experts_refuses_nothing(tmp_path: Path) -> None:
    merges = Merges.of(CASES["full"], tmp_path)
    assert merges.by_logits("right") > 3e-2  # in bf16, by which it was refused before
    assert merges.proven("right").relative_difference < 1e-5


def test_what_a_device_keeps_is_read_once_and_proves_the_same(merges: Merges) -> None:
    base, trained = merges.folder / "base", merges.folder / "trained"
    shutil.copytree(merges.folder / "right", merges.folder / "kept")
    reference = Reference(merges.folder / "kept", base, trained, merges.case.train, Kept(CPU))
    by_value = compare_tensors(reference, CPU)
    for path in (merges.folder / "kept").glob("*.safetensors"):
        spoil_values(path)
    assert Parity(**compare_logits(reference, CPU), **by_value) == merges.proven("right")
    with pytest.raises(TrainingError):
        merges.proven("kept")


@pytest.mark.parametrize("case", ["full", "lora", "experts", "dora"])
def test_a_mean_of_checkpoints_is_proven_and_no_other_folder_is(case: str, tmp_path: Path) -> None:
    merges = Merges.of(CASES[case], tmp_path)
    base = tmp_path / "base"
    trained = tmp_path / "trained"
    earlier = tmp_path / "earlier"
    saved = find_saved(trained / WEIGHTS)
    tensors = {name: torch.empty(each.shape) for name, each in saved.items()}
    fill_saved(trained / WEIGHTS, saved, tensors)
    generator = torch.Generator().manual_seed(1)
    for name, values in tensors.items():
        noise = torch.randn(values.shape, generator=generator)
        tensors[name] = values + 0.1 * values.std() * noise
    save_tensors(earlier / WEIGHTS, tensors)
    train = merges.case.train
    mean = mean_of(merges.fold, [plan_fold(base, earlier, train)])
    merges.write("mean", mean)

    def proven(name: str, others: list[Path]) -> Parity:
        folder = tmp_path / name
        return prove(folder, base, trained, train, CPU, lambda _: None, Spans(), others)

    figures = proven("mean", [earlier])
    assert figures.value_difference < 1e-6
    assert figures.relative_difference <= figures.tolerance
    for name, others in {"right": [earlier], "mean": []}.items():
        with pytest.raises(TrainingError, match="the exported model is not the trained one"):
            proven(name, others)


def spoil_values(path: Path) -> None:
    """Write zeros over the tensors' values, and leave the header as it is."""
    first = min(header.begin for header in read_headers(path))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(first)
        file.write(bytes(size - first))
