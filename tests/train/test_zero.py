"""ZeRO does what others do: equal steps, states that any can take over, bits that come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.model.weights import FlatPart, boxes, find_tensors
from tests.ranks import run_ranks
from tests.train.conftest import BLOCK_TOKENS, Arena, make_documents, write_model
from tests.train.helpers import (
    assert_same_result,
    digest_of,
    load_tensors,
    tensor_shapes,
    train,
    train_until_killed,
)
from tests.train.strategy_steps import Run, do_runs

pytestmark = pytest.mark.timeout(900)  # the first test waits for all runs
ZERO = ("zero1", "zero2", "zero3")
# Small enough that the little model's weights come in several pieces, and are gathered and let go
# again.
PIECES = {
    "zero_optimization": {
        "reduce_bucket_size": 5000,
        "allgather_bucket_size": 4000,
        "sub_group_size": 9000,
        "stage3_param_persistence_threshold": 40,
        "stage3_prefetch_bucket_size": 3000,
    }
}
RELATIVE = 2e-6  # as in test_parity


class Folder:
    """A model, blocks and a DeepSpeed config, and runs on them."""

    def __init__(self, root: Path) -> None:
        """Write them to `root`."""
        self.root, self.json = root, root / "pieces.json"
        write_model(root / "model")
        write_blocks(root / "blocks", make_documents(24, 1), BLOCK_TOKENS, 1)
        write_json(self.json, PIECES)

    def run(self, strategy: str, count: int, **more: Any) -> Run:
        fields = {
            name: more.pop(name) for name in ("first", "load", "save", "discards") if name in more
        }
        json_path = str(self.json) if strategy.startswith("zero") else None
        settings = {
            "precision": "fp32",
            "lr": 3e-3,
            "warmup_steps": 0,
            "lr_schedule": "constant",
            **more,
        }
        train = Train.model_validate(
            {"strategy": strategy, "deepspeed_json": json_path, **settings}
        )
        return Run(self.root / "model", self.root / "blocks", train, count, **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("zero"))


@pytest.fixture(scope="module")
def two_ranks(folder: Folder) -> dict[str, dict[str, Any]]:
    """What each of these runs of two ranks found, by its name."""
    root = folder.root
    runs = {
        "ddp": folder.run("ddp", 4, save=root / "ddp-4"),
        "ddp, half": folder.run("ddp", 2, save=root / "ddp-2"),
    }
    for name in ZERO:
        runs[name] = folder.run(name, 4, save=root / f"{name}-4")
        runs[f"{name}, half"] = folder.run(name, 2, save=root / f"{name}-2")
        runs[f"{name}, continued"] = folder.run(
            name, 2, first=2, load=root / f"{name}-2", save=root / f"{name}-2+2"
        )
        runs[f"{name}, discards"] = folder.run(name, 2, discards=True)
        runs[f"{name}, offload"] = folder.run(
            name, 2, discards=True, offload="optimizer", save=root / f"{name}-off"
        )
        runs[f"{name}, as loaded"] = folder.run(name, 0, precision="bf16", save=root / f"{name}-0")
        runs[f"{name}, bf16"] = folder.run(name, 3, precision="bf16", discards=True)
    runs["zero1, offload, bf16"] = folder.run(
        "zero1", 2, discards=True, offload="optimizer", precision="bf16"
    )
    runs["zero3, offload all"] = folder.run("zero3", 2, discards=True, offload="optimizer+params")
    runs["ddp to zero2"] = folder.run("zero2", 2, first=2, load=root / "ddp-2")
    runs["zero3 to fsdp"] = folder.run("fsdp", 2, first=2, load=root / "zero3-2")
    runs["offloaded zero1 to zero3"] = folder.run("zero3", 2, first=2, load=root / "zero1-off")
    runs["ddp, bf16"] = folder.run("fsdp", 3, precision="bf16")
    results = run_ranks(do_runs, 2, *runs.values(), timeout_s=800.0)
    assert [result["losses"] for result in results[0]] == [
        result["losses"] for result in results[1]
    ]
    found = dict(zip(runs, results[0], strict=True))
    for name, other in zip(runs, results[1], strict=True):
        found[name]["all_bytes"] = (found[name]["bytes"], other["bytes"])
    return found


@pytest.mark.parametrize("name", ZERO)
def test_steps_are_those_of_ddp(two_ranks: dict[str, Any], name: str) -> None:
    expected = two_ranks["ddp"]
    for kind, count in [("", 4), (", discards", 2), (", offload", 2)]:
        found = two_ranks[name + kind]
        assert found["losses"] == pytest.approx(expected["losses"][:count], rel=RELATIVE)
        assert found["norms"] == pytest.approx(expected["norms"][:count], rel=RELATIVE)
    assert two_ranks["zero3, offload all"]["losses"] == pytest.approx(
        expected["losses"][:2], rel=RELATIVE
    )


@pytest.mark.parametrize("name", ZERO)
def test_steps_in_bf16_are_near_those_of_fsdp(two_ranks: dict[str, Any], name: str) -> None:
    assert two_ranks[f"{name}, bf16"]["losses"] == pytest.approx(
        two_ranks["ddp, bf16"]["losses"], rel=2e-3
    )
    assert two_ranks[f"{name}, bf16"]["norms"] == pytest.approx(
        two_ranks["ddp, bf16"]["norms"], rel=2e-2
    )


def test_an_offloaded_step_in_bf16_does_not_see_what_was_thrown_away(
    two_ranks: dict[str, Any],
) -> None:
    """DeepSpeed would add to gradients that were not finite."""
    found = two_ranks["zero1, offload, bf16"]
    assert found["norms"] == pytest.approx(two_ranks["ddp, bf16"]["norms"][:2], rel=2e-2)


@pytest.mark.parametrize("name", ZERO)
def test_each_rank_writes_its_share_of_the_state(two_ranks: dict[str, Any], name: str) -> None:
    mine, other = two_ranks[name]["all_bytes"]
    assert mine + other == sum(two_ranks["ddp"]["all_bytes"])
    assert abs(mine - other) < 0.1 * (mine + other)


@pytest.mark.parametrize("name", ZERO)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    two_ranks: dict[str, Any], folder: Folder, name: str
) -> None:
    whole, resumed = (digest_of(stored(folder.root / f"{name}-{steps}")) for steps in ("4", "2+2"))
    assert whole == resumed
    assert two_ranks[f"{name}, continued"]["losses"] == two_ranks[name]["losses"][2:]


def stored(folder: Path) -> dict[str, Tensor]:
    """All state in a folder, whatever ranks wrote it."""
    tensors = {name: torch.empty(shape) for name, shape in tensor_shapes(folder).items()}
    load_tensors(folder, tensors)
    return tensors


@pytest.mark.parametrize("move", ["ddp to zero2", "zero3 to fsdp", "offloaded zero1 to zero3"])
def test_a_run_moves_between_strategies(two_ranks: dict[str, Any], move: str) -> None:
    assert two_ranks[move]["losses"] == pytest.approx(two_ranks["ddp"]["losses"][2:], rel=RELATIVE)
    assert two_ranks[move]["norms"] == pytest.approx(two_ranks["ddp"]["norms"][2:], rel=RELATIVE)


def test_a_run_of_two_ranks_continues_on_one(two_ranks: dict[str, Any], folder: Folder) -> None:
    runs = [folder.run(name, 2, first=2, load=folder.root / "zero1-2") for name in ZERO]
    for result in run_ranks(do_runs, 1, *runs)[0]:
        assert result["losses"] == pytest.approx(two_ranks["ddp"]["losses"][2:], rel=RELATIVE)


@pytest.mark.parametrize("name", ZERO)
def test_masters_have_every_bit_of_the_files(
    two_ranks: dict[str, Any], folder: Folder, name: str
) -> None:
    """Also where bf16 is computed with: they are not made of what is rounded."""
    for key, tensor in stored(folder.root / f"{name}-0").items():
        kind, _, parameter = key.partition(".")
        expected = (
            find_tensors(folder.root / "model")[parameter].read()
            if kind == "weights"
            else torch.zeros(())
        )
        assert torch.equal(tensor, expected.expand_as(tensor)), key


def test_a_killed_run_resumes_bitwise_and_leaves_its_config(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "strategy": "zero2",
        "offload": "optimizer",
        "save_every_steps": 2,
        "until_step": 4,
    }
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", **settings), 4)
    job = arena.job(2, tmp_path / "resumed", **settings)
    assert job.resume_from is not None
    run_ranks(train, 2, job)
    assert_same_result(job.out, whole(2, **settings))
    assert read_json(job.run_dir / "deepspeed.json")["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (3, 2, 4), (2, 3, 2, 2)])
def test_a_range_of_elements_is_cut_into_boxes_in_their_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            values = torch.full((stop - start,), -1.0)
            for begins, sizes, first in boxes(FlatPart(values, start, shape)):
                slices = tuple(
                    slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)
                )
                length = torch.Size(sizes).numel()
                values[first : first + length] = whole[slices].flatten()
            assert torch.equal(values, whole.flatten()[start:stop])
