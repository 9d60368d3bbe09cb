"""Dropout masks depend on step, block, place and module, not on how blocks are computed."""

import pytest
import torch
from torch import Tensor, nn

from pipeline_lib.model.context import Part
from pipeline_lib.model.dropout import SEGMENT, Drawing, Draws, SeededDropout, rows_from

WIDTH = 5
BLOCK = 2 * SEGMENT + 100
P = 0.3


def module(number: int = 0) -> SeededDropout:
    return SeededDropout(P, number, Drawing())


def masks(dropout: SeededDropout, keys: tuple[int, ...], tokens: int = BLOCK) -> Tensor:
    """What is dropped of whole blocks with these keys: bool[blocks, tokens, width]."""
    dropout.drawing.draws = Draws(keys, tokens, first=0, tokens=tokens)
    left: Tensor = dropout(torch.ones(len(keys), tokens, WIDTH))
    return left == 0


def test_a_block_has_the_same_mask_whatever_it_is_computed_with() -> None:
    together = masks(module(), (7, 8, 9))
    for place, key in enumerate((7, 8, 9)):
        assert torch.equal(masks(module(), (key,))[0], together[place])
    assert torch.equal(masks(module(), (9, 7))[1], together[0])


def test_steps_blocks_modules_and_places_have_masks_of_their_own_at_the_wanted_rate() -> None:
    blocks = masks(module(), (1, 2))
    others = [blocks[0], blocks[1], masks(module(1), (1,))[0]]
    pieces = [each[start : start + SEGMENT] for each in others for start in (0, SEGMENT)]
    for index, one in enumerate(pieces):
        assert one.float().mean() == pytest.approx(P, abs=0.03)
        for other in pieces[:index]:
            assert (one == other).float().mean() == pytest.approx(P**2 + (1 - P) ** 2, abs=0.03)


def test_what_is_left_is_scaled_so_that_its_mean_stays() -> None:
    dropout = module()
    dropout.drawing.draws = Draws((3,), BLOCK, 0, BLOCK)
    values = dropout(torch.ones(1, BLOCK, WIDTH))
    assert values.unique().tolist() == [0.0, pytest.approx(1 / (1 - P))]
    assert torch.equal(dropout.eval()(torch.ones(1, 4, WIDTH)), torch.ones(1, 4, WIDTH))


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_share_a_block_drop_what_one_rank_would(count: int) -> None:
    tokens = 4 * 700  # parts that are no multiples of a segment
    whole = masks(module(), (5, 6), tokens)
    for number in range(count):
        dropout = module()
        dropout.drawing.draws = Draws((5, 6), tokens, 0, tokens).of(Part(number, count, "unused"))
        part = dropout(torch.ones(2, tokens // count, WIDTH)) == 0
        assert torch.equal(part, whole.chunk(count, dim=1)[number])


def test_chunks_drop_what_the_whole_would() -> None:
    whole = masks(module(), (5, 6)).flatten(0, 1)
    dropout = module()
    dropout.drawing.draws = Draws((5, 6), BLOCK, 0, BLOCK)
    for start in range(0, len(whole), 900):
        rows = torch.ones(min(900, len(whole) - start), WIDTH)
        with rows_from(nn.Sequential(dropout), start):
            assert torch.equal(dropout(rows) == 0, whole[start : start + 900])
    assert dropout.drawing.first_row == 0
