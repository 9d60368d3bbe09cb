"""No document sees another, and only supervised tokens are predicted."""

from pathlib import Path

import numpy as np
import torch

from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import IGNORED, empty_block, loss_sum, make_batch
from pipeline_lib.model.build import load_base
from pipeline_lib.model.probe import probe_block
from tests.train.conftest import write_model

#                document 0    document 1  padding
DOCUMENTS = [0, 0, 0, 1, 1, -1, -1, -1]
TOKENS = [5, 6, 7, 8, 9, 0, 0, 0]
SUPERVISED = [False, True, True, True, True, False, False, False]


def block() -> Block:
    return Block(np.array(TOKENS, np.int32), np.array(SUPERVISED), np.array(DOCUMENTS, np.int32))


def test_targets_and_positions_are_those_of_the_documents() -> None:
    batch = make_batch([block(), empty_block(8)])
    assert batch.targets[0].tolist() == [6, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]
    assert (batch.supervised_tokens, batch.real_tokens, batch.squared_lengths) == (3, 5, 9 + 4)
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.cu_seq_lens.tolist() == [0, 3, 5, 8, 16]
    assert batch.max_length == 8


def test_few_shapes_occur() -> None:
    """Document counts and the longest length round up by half at most, and not past a block."""

    def shape(*lengths: int) -> tuple[int, int]:
        documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        nothing = np.zeros(len(documents), np.int32)
        batch = make_batch([Block(nothing, nothing.astype(np.bool_), documents)])
        ends = batch.cu_seq_lens.tolist()
        assert ends == [
            *np.cumsum([0, *lengths]).tolist(),
            *[sum(lengths)] * (len(ends) - len(lengths) - 1),
        ]
        return len(ends) - 1, batch.max_length

    assert shape(3, 3, 2, 3, 1) == (6, 3)
    assert shape(*[1] * 100, 500) == (128, 512)
    assert shape(*[1] * 70, 300) == (96, 370)
    assert shape(12) == (1, 12)
    found = [shape(*[1] * count, 2) for count in range(1, 200)]
    assert all(
        count + 1 <= documents <= 1.5 * (count + 1)
        for count, (documents, _) in enumerate(found, start=1)
    )
    assert len({documents for documents, _ in found}) < 16


def test_predicted_places_are_those_with_a_target() -> None:
    batch = make_batch([empty_block(8), block()])
    assert batch.predicted.tolist() == [8, 9, 11]
    assert batch.targets.flatten()[batch.predicted].tolist() == [6, 7, 9]


def test_an_empty_block_costs_nothing_and_still_has_gradients(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = load_base(tmp_path, torch.float32)
    loss = loss_sum(model, make_batch([empty_block(8)]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_probe_is_the_beginning_of_a_long_block_in_equal_parts() -> None:
    assert probe_block(block()).tokens.tolist() == TOKENS
    long = empty_block(131_072)
    assert [len(tensor) for tensor in vars(probe_block(long)).values()] == [16_384] * 3
    assert len(probe_block(long, 5).tokens) == 16_380
