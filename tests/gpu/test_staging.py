"""Copies for a save in page-locked memory of the host: they hold what the GPU held.

Skipped where there is none.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipeline_lib.train import staging
from pipeline_lib.train.dist import World
from pipeline_lib.train.staging import HostBuffers
from tests.train.test_staging import places, same, state

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]


@pytest.fixture
def buffers() -> Iterator[HostBuffers]:
    made = HostBuffers(World(0, 0, 1, torch.device("cuda", 0)))
    yield made
    made.close()


def on_gpu() -> dict[str, Tensor]:
    """Tensors of many kinds; `longest` crosses from one piece that is locked to another twice."""
    drawn = torch.Generator("cuda").manual_seed(0)
    longest = torch.randn(staging.PIECE_BYTES // 2 + 77, generator=drawn, device="cuda")
    return {**{name: tensor.cuda() for name, tensor in state().items()}, "longest": longest}


def test_copies_have_the_bits_of_the_gpu_and_the_next_ones_take_their_place(
    buffers: HostBuffers,
) -> None:
    tensors = on_gpu()
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    buffers.expect(sum(tensor.nbytes for tensor in tensors.values()))
    first = buffers.copies(tensors.items())
    where = places(first)
    for tensor in tensors.values():
        tensor.zero_()
    same(first, expected)
    second = buffers.copies(tensors.items())
    assert places(second) == where
    same(second, {name: tensor.cpu() for name, tensor in tensors.items()})
    assert buffers.trouble == ""
    assert (
        sum(piece.nbytes for slab in buffers._slabs for piece in slab.locked)
        > 2 * staging.PIECE_BYTES
    )
