from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.data.samples_writer import NpyWriter


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
@pytest.mark.parametrize("pieces", [[], [0], [3], [1, 0, 7, 100_000]])
def test_the_pieces_are_one_array(tmp_path: Path, dtype: type[Any], pieces: list[int]) -> None:
    path = tmp_path / "a.npy"
    arrays = [(np.arange(size) % 3).astype(dtype) for size in pieces]
    with NpyWriter(path, dtype) as writer:
        for array in arrays:
            writer.append(array)
    wanted = np.concatenate([np.zeros(0, dtype=dtype), *arrays])
    assert writer.length == len(wanted)
    for found in (np.load(path), np.load(path, mmap_mode="r")):
        assert found.dtype == dtype and np.array_equal(found, wanted)
    np.save(tmp_path / "b.npy", wanted)
    assert path.read_bytes() == (tmp_path / "b.npy").read_bytes()
