"""The shard stage: token arrays to packed blocks, split into training and validation by conversation."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import require_space
from pipeline_lib.base.stage import Job
from pipeline_lib.config.schema import Data, Shard, read_settings
from pipeline_lib.data.blocks import BlockIndex, Document, write_blocks
from pipeline_lib.data.packing import pack
from pipeline_lib.data.samples import Samples

BYTES_PER_POSITION = 6  # a token, its supervision, and room for document starts
DEFAULT_FRACTION = Data.model_fields["validation_fraction"].default


def run(job: Job) -> dict[str, Any]:
    """Write `train` and `validation`, folders of blocks. Raises DataError if one of them would be empty."""
    settings = dict(job.spec.settings)
    fraction = float(settings.pop("validation_fraction", DEFAULT_FRACTION))
    layout = read_settings(Shard, settings)
    samples = Samples(job.inputs["tokenize"].path)
    held_out = choose_held_out(samples, fraction, layout.seed)
    _refuse_empty(held_out, fraction)
    require_space(job.out, 2 * len(samples.tokens) * BYTES_PER_POSITION, "the packed blocks")
    train = _write_side(job, "train", samples, np.flatnonzero(~held_out), layout, layout.shards)
    validation = _write_side(job, "validation", samples, np.flatnonzero(held_out), layout, 1)
    return {"train": _counts(train), "validation": _counts(validation)}


def choose_held_out(samples: Samples, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which samples belong to validation: bool[samples].

    A conversation is held out if the hash of its content falls below `fraction`. So equal conversations
    are never on both sides, and what is added to the data later moves none.
    """
    held_out = np.zeros(len(samples), dtype=np.bool_)
    first_of_each = np.flatnonzero(np.diff(samples.conversations, prepend=-1))
    bounds = [*first_of_each.tolist(), len(samples)]
    threshold = int(fraction * 2**64)
    for first, end in zip(bounds, bounds[1:], strict=False):
        content = hashlib.blake2b(str(seed).encode(), digest_size=8)
        for number in range(first, end):
            content.update(b"|" + samples[number].tokens.tobytes())
        held_out[first:end] = int.from_bytes(content.digest(), "little") < threshold
    return held_out


def _refuse_empty(held_out: NDArray[np.bool_], fraction: float) -> None:
    for side, number in (("validation", int(held_out.sum())), ("training", int((~held_out).sum()))):
        if not number:
            raise DataError(
                f"of {len(held_out)} samples none is in the {side} split with data.validation_fraction {fraction}; "
                f"{'raise' if side == 'validation' else 'lower'} it, change shard.seed, or add conversations"
            )


class _PackedDocuments(Sequence[Sequence[Document]]):
    """The documents of each bin, read when asked for."""

    def __init__(self, samples: Samples, numbers: NDArray[np.int64], bins: list[list[int]]) -> None:
        self._samples = samples
        self._numbers = numbers
        self._bins = bins

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, position: Any) -> Any:
        return [self._samples[int(self._numbers[document])] for document in self._bins[position]]


def _write_side(
    job: Job, side: str, samples: Samples, numbers: NDArray[np.int64], layout: Shard, shards: int
) -> BlockIndex:
    lengths = np.diff(samples.offsets)[numbers]
    bins = pack(lengths, layout.block_tokens, layout.seed)
    documents = _PackedDocuments(samples, numbers, bins)
    index = write_blocks(job.out / side, documents, layout.block_tokens, shards, pad_token=0)
    job.say(
        f"shard: {side}: {index.documents:,} documents in {index.blocks:,} blocks of {index.block_tokens:,} tokens, "
        f"{index.packing_efficiency:.1%} full, {len(index.shards)} files"
    )
    return index


def _counts(index: BlockIndex) -> dict[str, Any]:
    return {
        "blocks": index.blocks,
        "documents": index.documents,
        "tokens": index.tokens,
        "supervised_tokens": index.supervised_tokens,
        "packing_efficiency": round(index.packing_efficiency, 6),
    }
