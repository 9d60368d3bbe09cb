"""The comparison of replicas: which bits it sees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.train.replicas import sum_of_bits

TYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64]


@given(st.sampled_from(TYPES), st.integers(1, 70), st.integers(0, 7), st.data())
def test_any_one_bit_changes_the_sum(
    dtype: torch.dtype, size: int, offset: int, data: st.DataObject
) -> None:
    """Of a tensor of any type and size, also of one that begins within another's memory."""
    whole = torch.zeros(offset + size, dtype=torch.int64).random_().to(dtype)
    tensor = whole[offset:]
    before = int(sum_of_bits(tensor))
    octets = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, len(octets) - 1))
    octets[place] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert int(sum_of_bits(tensor)) != before


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bits_have_equal_sums_wherever_they_lie(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 38).to(dtype).view(1, 37)
    elsewhere = torch.zeros(40, dtype=dtype)
    elsewhere[3:] = tensor[0]
    assert int(sum_of_bits(tensor)) == int(sum_of_bits(elsewhere[3:])) != 0
