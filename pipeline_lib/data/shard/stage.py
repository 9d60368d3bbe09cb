"""The shard stage: token arrays to packed blocks, split into training and validation by what was asked first.

Sources of equal weight are packed together and make one group of blocks, which the order uses as often as that
weight says. Validation is one group of its own, never packed with training, whatever the weights.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import DataError, IntegrityError
from pipeline_lib.base.fsio import require_space
from pipeline_lib.base.stage import Job
from pipeline_lib.config.schema import Data, Shard, read_settings
from pipeline_lib.data.document import Document
from pipeline_lib.data.random64 import key_of, mix
from pipeline_lib.data.samples import ARRAYS, Samples
from pipeline_lib.data.shard.blocks import BlockIndex
from pipeline_lib.data.shard.order import Group
from pipeline_lib.data.shard.packing import Bins, pack
from pipeline_lib.data.shard.writer import write_blocks

BYTES_PER_POSITION = 6  # a token, its supervision, and room for document starts
DEFAULT_FRACTION = Data.model_fields["validation_fraction"].default
FEW_SAMPLES = 10  # chance alone moves so many to the other side of the split


def run(job: Job) -> dict[str, Any]:
    """Write `train` and `validation`, folders of blocks. Raises DataError if one of them would be empty."""
    settings = dict(job.spec.settings)
    fraction = float(settings.pop("validation_fraction", DEFAULT_FRACTION))
    weights = settings.pop("weights", None)
    layout = read_settings(Shard, settings)
    samples = Samples(job.inputs["tokenize"].folder(*(f"{name}.npy" for name in ARRAYS)))
    held_out = choose_held_out(samples, fraction, layout.seed)
    _refuse_empty(samples, held_out, fraction)
    if warning := _far_from_fraction(samples, held_out, fraction):
        job.say(f"shard: warning: {warning}")
    require_space(job.out, 2 * len(samples.tokens) * BYTES_PER_POSITION, "the packed blocks")
    weight_of = sample_weights(samples, weights)
    by_weight = {weight: np.flatnonzero(~held_out & (weight_of == weight)) for weight in np.unique(weight_of).tolist()}
    train = _write_side(job, "train", samples, by_weight, layout, layout.shards)
    validation = _write_side(job, "validation", samples, {1.0: np.flatnonzero(held_out)}, layout, 1)
    if train.documents + validation.documents != len(samples):
        raise IntegrityError(
            f"{len(samples)} samples, and {train.documents} in training and {validation.documents} in validation "
            "blocks; this is a bug, report it"
        )
    return {"train": _counts(train), "validation": _counts(validation)}


def choose_held_out(samples: Samples, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which samples belong to validation: bool[samples].

    A conversation is held out if the hash of its first user message, and of the system message that its row brings,
    mixed with the seed, falls below `fraction`. So several answers to one question, the turns of one conversation in
    rows of their own, and equal conversations are never on both sides, and what is added to the data later moves none.
    """
    drawn = mix(samples.prompts ^ np.uint64(key_of(seed)))
    held_out: NDArray[np.bool_] = (drawn < np.uint64(int(fraction * 2**64)))[samples.conversations]
    return held_out


def sample_weights(samples: Samples, weights: Sequence[float] | None) -> NDArray[np.float64]:
    """The weight of each sample, that of its source: float64[samples]. Without `weights`, all are 1."""
    counts = np.diff(samples.source_offsets)
    return np.repeat(np.ones(len(counts)) if weights is None else np.array(weights, dtype=np.float64), counts)


def _refuse_empty(samples: Samples, held_out: NDArray[np.bool_], fraction: float) -> None:
    questions = len(np.unique(samples.prompts))
    for side, number in (("validation", int(held_out.sum())), ("training", int((~held_out).sum()))):
        if not number:
            raise DataError(
                f"of {len(held_out)} samples none is in the {side} split with data.validation_fraction {fraction}; "
                f"{'raise' if side == 'validation' else 'lower'} it, change shard.seed, or add conversations "
                f"(those with the same first question and system message stay together, and there are {questions} "
                "different ones)"
            )


def _far_from_fraction(samples: Samples, held_out: NDArray[np.bool_], fraction: float) -> str:
    """What to say if validation is not nearly the share of the samples that was asked for; else the empty text."""
    number, wanted = int(held_out.sum()), fraction * len(held_out)
    if wanted / 2 <= number <= 2 * wanted or abs(number - wanted) <= FEW_SAMPLES:
        return ""
    side, chosen = ("validation", held_out) if number > wanted else ("training", ~held_out)
    most = int(np.unique(samples.prompts[samples.conversations[chosen]], return_counts=True)[1].max())
    return (
        f"{number:,} of {len(held_out):,} samples ({number / len(held_out):.1%}) are in validation, and "
        f"data.validation_fraction is {fraction}: all samples with the same first question and system message stay "
        f"together, and the most frequent of these beginnings has {most:,} ({most / len(held_out):.1%}), all in "
        f"{side}; change shard.seed to draw again, or give these conversations different beginnings"
    )


class _PackedDocuments(Sequence[Sequence[Document]]):
    """The documents of each bin, read when asked for."""

    def __init__(self, samples: Samples, bins: Bins) -> None:
        # Slices of a plain array are several times cheaper than those of a memmap.
        self._tokens, self._supervised = np.asarray(samples.tokens), np.asarray(samples.supervised)
        self._offsets = samples.offsets
        self._bins = bins

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, position: Any) -> Any:
        numbers = self._bins[position]
        bounds = zip(self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist(), strict=True)
        return [Document(self._tokens[start:end], self._supervised[start:end]) for start, end in bounds]


def _pack_groups(
    lengths: NDArray[np.int64], by_weight: dict[float, NDArray[np.int64]], layout: Shard
) -> tuple[Bins, list[Group]]:
    """The bins of all groups, one after the other. A group that the split has left nothing is none."""
    groups, documents, sizes = [], [], [np.zeros(1, dtype=np.int64)]
    for weight, numbers in by_weight.items():
        if len(numbers):
            bins = pack(lengths[numbers], layout.block_tokens, layout.seed)
            groups.append(Group(weight, len(bins)))
            documents.append(numbers[bins.documents])
            sizes.append(np.diff(bins.offsets))
    return Bins(np.concatenate(documents), np.cumsum(np.concatenate(sizes))), groups


def _write_side(
    job: Job, side: str, samples: Samples, by_weight: dict[float, NDArray[np.int64]], layout: Shard, shards: int
) -> BlockIndex:
    bins, groups = _pack_groups(np.diff(samples.offsets), by_weight, layout)
    documents = _PackedDocuments(samples, bins)
    index = write_blocks(job.out / side, documents, layout.block_tokens, shards, pad_token=0, groups=groups)
    job.say(
        f"shard: {side}: {index.documents:,} documents in {index.blocks:,} blocks of {index.block_tokens:,} tokens, "
        f"{index.packing_efficiency:.1%} full, {len(index.shards)} files{_describe(index)}"
    )
    return index


def _describe(index: BlockIndex) -> str:
    """How the weights count, where there are any."""
    if {group.weight for group in index.groups} == {1.0}:
        return ""
    parts = ", ".join(f"{group.blocks:,} x {group.weight:g}" for group in index.groups)
    return f"; the first epoch uses {index.epoch_blocks:,} blocks ({parts})"


def _counts(index: BlockIndex) -> dict[str, Any]:
    return {
        "blocks": index.blocks,
        "epoch_blocks": index.epoch_blocks,
        "groups": [asdict(group) for group in index.groups],
        "documents": index.documents,
        "tokens": index.tokens,
        "supervised_tokens": index.supervised_tokens,
        "packing_efficiency": round(index.packing_efficiency, 6),
    }
