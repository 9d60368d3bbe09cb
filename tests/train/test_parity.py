"""One loss curve for one global batch: any ranks and strategy, packed or not, or a plain loop."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.data import order
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from tests.ranks import run_ranks
from tests.train.conftest import BLOCK_TOKENS, VOCAB, make_documents, write_model
from tests.train.helpers import load_tensors
from tests.train.strategy_steps import BATCH_BLOCKS, Run, do_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for all runs
STEPS, BLOCKS, LORA_STEPS = 8, 10, 4  # the last batch of each pass over the blocks is short
STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
WORLDS = (1, 2, 4)
# Strategy, ranks, and how many of them share a block; four ranks are more than the model has KV
# heads.
CASES = [
    (strategy, ranks, 1)
    for strategy in STRATEGIES
    for ranks in WORLDS
    if strategy != "hsdp" or ranks == 4
]
CASES += [
    ("ddp", 2, 2),
    ("fsdp", 2, 2),
    ("ddp", 4, 4),
    ("fsdp", 4, 2),
    ("fsdp", 4, 4),
    ("hsdp", 4, 2),
]
# Padding is where the data is: every way to spread it meets it once.
UNPACKED = [case for case in CASES if case[1] == 2 or case[0] == "hsdp" or case == ("ddp", 1, 1)]
WITH_DATA = [(*case, "packed") for case in CASES] + [(*case, "unpacked") for case in UNPACKED]
Key = tuple[str, int, int, str]
SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "lr": 3e-3,
    "warmup_fraction": 0.25,
    "min_lr_fraction": 0.1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,  # gradients are clipped in every step
}
# fp32 keeps 24 bits, 6e-8 of a number: sums of many terms in another order differ by a few times
# that. Measured are 1.4e-7 of the loss within 20 updates, and 4e-6 of what training changed in a
# weight matrix (Adam divides a gradient by its own size, so that tiny ones differ more); the bounds
# leave a factor of ten.
CURVE = 2e-6
WEIGHTS_CHANGE = 1e-4


def one_document_a_block(count: int, seed: int) -> list[list[Document]]:
    """The rest of each block is padding."""
    random = np.random.default_rng(seed)
    bins = []
    for length in random.integers(6, BLOCK_TOKENS + 1, count):
        tokens = random.integers(3, VOCAB, length).astype(np.int32)
        bins.append([Document(tokens, np.arange(length) >= length // 2)])
    return bins


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    write_model(folder / "model")
    write_blocks(folder / "packed", make_documents(BLOCKS, 1), BLOCK_TOKENS, 1)
    write_blocks(folder / "unpacked", one_document_a_block(BLOCKS, 2), BLOCK_TOKENS, 1)
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> dict[Key, dict[str, Any]]:
    """What the runs of each strategy, number of ranks and kind of data or method found."""
    results: dict[Key, dict[str, Any]] = {}
    for ranks in WORLDS:
        runs = dict(runs_of(root, ranks))
        results.update(
            zip(runs, run_ranks(do_runs, ranks, *runs.values(), timeout_s=800.0)[0], strict=True)
        )
    return results


def runs_of(root: Path, ranks: int) -> Iterator[tuple[Key, Run]]:
    for strategy, on_ranks, parts, data in WITH_DATA:
        if on_ranks != ranks:
            continue
        placement = {
            "strategy": strategy,
            "shard_ranks": 2 if strategy == "hsdp" else None,
            "context_ranks": parts,
        }
        train = Train.model_validate({**SETTINGS, **placement})
        save = root / f"{strategy}-{ranks}-{parts}-{data}"
        yield (
            (strategy, ranks, parts, data),
            Run(root / "model", root / data, train, STEPS, save=save),
        )
        if data == "packed":
            lora = train.model_copy(update={"method": "lora", "lora": Lora(rank=4, alpha=8)})
            yield (
                (strategy, ranks, parts, "lora"),
                Run(root / "model", root / data, lora, LORA_STEPS),
            )


@pytest.fixture(scope="module")
def reference(root: Path) -> Iterator[dict[str, tuple[list[float], dict[str, Tensor]]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more cost more than they bring on matrices this small
    yield {data: plain_loop(root / "model", root / data) for data in ("packed", "unpacked")}
    torch.set_num_threads(threads)


def plain_loop(model_folder: Path, blocks: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of transformers and torch alone: lone documents, not padded.

    They are not packed either.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    curve = []
    for step in range(STEPS):
        samples = samples_of(BlockReader(blocks), step)
        count = sum(len(targets) for _, _, targets in samples)
        total = 0.0
        for tokens, places, targets in samples:
            logits = model(input_ids=tokens[None]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[places], targets, reduction="sum")
            (loss / count).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        curve.append(total / count)
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / norm))
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return curve, {name: parameter.detach() for name, parameter in model.named_parameters()}


def rate(step: int) -> float:
    """Two steps of warm-up, then a cosine that a step after the last would end at a tenth."""
    if step <= 2:
        return 3e-3 * step / 2
    return 3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 7)) / 2)


def samples_of(reader: BlockReader, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A global batch's documents: tokens, and places whose next token counts, with those."""
    samples = []
    for number in order.step_blocks(0, step, reader.index.groups, BATCH_BLOCKS):
        if number == order.PADDING:
            continue
        block = reader[int(number)]
        for document in np.unique(block.documents[block.documents >= 0]):
            of_document = block.documents == document
            tokens = torch.from_numpy(block.tokens[of_document].astype(np.int64))
            places = torch.from_numpy(np.flatnonzero(block.supervised[of_document][1:]))
            samples.append((tokens, places, tokens[places + 1]))
    return samples


@pytest.mark.parametrize(("strategy", "ranks", "parts", "data"), WITH_DATA)
def test_the_curve_is_that_of_a_plain_loop_over_transformers(
    found: dict[Any, Any],
    reference: dict[str, Any],
    strategy: str,
    ranks: int,
    parts: int,
    data: str,
) -> None:
    curve, _ = reference[data]
    assert found[strategy, ranks, parts, data]["losses"] == pytest.approx(curve, rel=CURVE)
    assert curve[-1] < curve[0]


@pytest.mark.parametrize(("strategy", "ranks", "parts", "data"), WITH_DATA)
def test_the_curve_is_that_of_one_rank(
    found: dict[Any, Any], strategy: str, ranks: int, parts: int, data: str
) -> None:
    expected = found["ddp", 1, 1, data]
    assert found[strategy, ranks, parts, data]["losses"] == pytest.approx(
        expected["losses"], rel=CURVE
    )
    assert found[strategy, ranks, parts, data]["norms"] == pytest.approx(
        expected["norms"], rel=1e-3
    )


@pytest.mark.parametrize(("strategy", "ranks", "parts", "data"), WITH_DATA)
def test_the_trained_weights_are_those_of_a_plain_loop(
    found: dict[Any, Any],
    reference: dict[str, Any],
    root: Path,
    strategy: str,
    ranks: int,
    parts: int,
    data: str,
) -> None:
    assert found[strategy, ranks, parts, data]
    _, expected = reference[data]
    trained = {f"weights.{name}": torch.empty_like(tensor) for name, tensor in expected.items()}
    load_tensors(root / f"{strategy}-{ranks}-{parts}-{data}", trained)
    first = dict(
        AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32).named_parameters()
    )
    for name, tensor in expected.items():
        change = (tensor - first[name].detach()).norm()
        assert (trained[f"weights.{name}"] - tensor).norm() < WEIGHTS_CHANGE * change, name


@pytest.mark.parametrize(("strategy", "ranks", "parts"), CASES)
def test_lora_trains_adapters_alone_and_alike(
    found: dict[Any, Any], strategy: str, ranks: int, parts: int
) -> None:
    """That no bit of the base changed is seen by each rank of the run itself."""
    run, expected = found[strategy, ranks, parts, "lora"], found["ddp", 2, 1, "lora"]
    assert run["losses"] == pytest.approx(expected["losses"], rel=CURVE)
    assert run["losses"][-1] != run["losses"][0]
    assert run["names"]
    assert all(".lora_" in name for name in run["names"])
