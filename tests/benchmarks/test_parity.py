"""The parity benchmark: its reference sees what it should, and it can fail."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.parity import ours, reference
from benchmarks.parity.__main__ import curves_of, report
from benchmarks.parity.compare import apart, exact_verdict
from benchmarks.parity.reference import Run
from benchmarks.parity.text import read_blocks, save_blocks, steps_of
from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block
from pipeline_lib.model.batch import make_batch
from pipeline_lib.train.loop import learning_rate

CONFIG = {
    **{
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
SETTINGS = Train(lr=3e-3, warmup_fraction=0.2, precision="fp32", micro_batch_blocks=2)
CPU = torch.device("cpu")


def block(seed: int, length: int = 32) -> Block:
    """Documents of several lengths, and padding behind them."""
    random = np.random.default_rng(seed)
    lengths = [7, 12, length - 24]
    documents = np.full(length, PADDING_DOCUMENT, np.int32)
    documents[: sum(lengths)] = np.repeat(np.arange(3), lengths)
    tokens = random.integers(0, 97, length).astype(np.int32)
    return Block(tokens, (random.random(length) < 0.6) & (documents >= 0), documents)


@pytest.fixture
def steps() -> list[list[Block]]:
    return [[block(number) for number in range(4)] for _ in range(5)]


def test_the_text_survives_its_file(tmp_path: Path) -> None:
    blocks = [block(number) for number in range(3)]
    save_blocks(tmp_path / "folder" / "text.npz", blocks)
    for one, other in zip(read_blocks(tmp_path / "folder" / "text.npz"), blocks, strict=True):
        for name in ("tokens", "supervised", "documents"):
            found = getattr(one, name)
            assert found.dtype == getattr(other, name).dtype and np.array_equal(
                found, getattr(other, name)
            )


def test_steps_take_every_block_before_one_comes_again() -> None:
    blocks = [block(number) for number in range(6)]
    taken = [id(each) for step in steps_of(blocks, 4, 3) for each in step]
    assert sorted(taken[:6]) == sorted(taken[6:]) == sorted(map(id, blocks))
    assert taken[:6] != taken[6:]


def test_the_reference_sees_and_predicts_what_the_pipeline_does() -> None:
    blocks = [block(1), block(2)]
    tokens, positions, mask, labels = reference.tensors_of(blocks)
    batch = make_batch(blocks)
    real = batch.documents >= 0
    assert torch.equal(tokens, batch.tokens) and torch.equal(labels, batch.targets)
    assert torch.equal(positions[real], batch.positions[real])
    for row, documents in enumerate(batch.documents.tolist()):
        for here, own in enumerate(documents):
            seen = [there <= here and documents[there] == own for there in range(len(documents))]
            assert mask[row, 0, here].tolist() == seen


def test_the_schedule_is_the_pipelines() -> None:
    train = Train(lr=1e-3, warmup_fraction=0.1)
    for step in range(1, 31):
        assert reference.learning_rate(train, step, 30) == pytest.approx(
            learning_rate(train, step, 30)
        )


def test_ours_is_the_reference_in_fp32(tmp_path: Path, steps: list[list[Block]]) -> None:
    reference.make_model(tmp_path, CONFIG, CPU)
    run = Run(SETTINGS, len(steps), 2, CPU)
    expected = list(reference.losses(tmp_path, run, steps))
    found = apart(list(ours.losses(tmp_path, run, steps)), expected)
    assert expected[-1] < expected[0]
    assert found.relative < 1e-5
    assert "NOT" not in exact_verdict(found)
    again = apart(
        list(reference.losses(tmp_path, Run(SETTINGS, len(steps), 1, CPU), steps)), expected
    )
    assert again.relative < 1e-5


@pytest.mark.slow
def test_every_loop_makes_its_curve_and_another_learning_rate_is_no_noise(tmp_path: Path) -> None:
    steps = [[block(100 * step + number) for number in range(4)] for step in range(20)]
    reference.make_model(tmp_path, CONFIG, CPU)
    run = Run(SETTINGS.model_copy(update={"precision": "bf16"}), len(steps), 2, CPU)
    curves = curves_of(tmp_path, run, steps, 2, [f"lr={1.1 * SETTINGS.lr}"], 600.0)
    lengths = {name: len(losses) for name, losses in curves.items()}
    names = ("reference in fp32", "reference", "ours", f"ours: lr={1.1 * SETTINGS.lr}")
    assert lengths == {**dict.fromkeys(names, len(steps)), "ours in fp32": 2}
    found = report(curves)
    assert [words.split(":")[0] for words in found["verdicts"]] == ["ours", "ours", "fp32"]
    assert (
        "NOT" in found["verdicts"][1] and "NOT" not in found["verdicts"][0] + found["verdicts"][2]
    )


def test_a_curve_that_is_cut_off_lets_another_begin(
    tmp_path: Path, steps: list[list[Block]]
) -> None:
    reference.make_model(tmp_path, CONFIG, CPU)
    run = Run(SETTINGS, len(steps), 2, CPU)
    first = ours.losses(tmp_path, run, steps)
    beginning = [next(first), next(first)]
    first.close()
    assert list(ours.losses(tmp_path, run, steps[:2])) == beginning
