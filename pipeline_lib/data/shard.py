"""The shard stage: split samples for training and validation, by source or question; pack them.

Sources of equal weight are packed together into one group of blocks; the order of training uses a
group as often as its weight says. Validation is a single group of weight 1 and is never packed with
training.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import require_space, write_json
from pipeline_lib.core.stage import Job
from pipeline_lib.core.units import count
from pipeline_lib.data.blocks import COSTS_NAME, shard_path
from pipeline_lib.data.documents import ARRAYS, Document, Samples
from pipeline_lib.data.order import epoch_blocks
from pipeline_lib.data.packing import Bins, Split
from pipeline_lib.records.data import INDEX_NAME, BlockGroup, BlockIndex
from pipeline_lib.records.record import to_json

# Writes packed training blocks, a shard at a time, in the format that the module `blocks` describes
# and reads.

SHARD_BYTES = 1 << 28  # the maximum, because a shard is built in memory
PACKED_BYTES_PER_POSITION = 5  # a token (4) and its supervision (1)


def write_blocks(
    folder: Path,
    bins: Sequence[Sequence[Document]],
    block_tokens: int,
    shards: int,
    groups: Sequence[BlockGroup] = (),
) -> BlockIndex:
    """Write each bin as a block, spread evenly over `shards` files; write and return the index.

    There are fewer files if there are fewer blocks, and more if a file would exceed `SHARD_BYTES`:
    none without blocks. `bins` is read lazily, so that a sequence that creates its items on demand
    needs the memory of one shard. Padding positions hold 0. Without `groups`, all blocks are one
    group of weight 1.
    """
    folder.mkdir(parents=True)
    groups = list(groups) or [BlockGroup(1.0, len(bins))]
    needed = -(-len(bins) * block_tokens * PACKED_BYTES_PER_POSITION // SHARD_BYTES)
    files = min(max(shards, needed), len(bins))
    bounds = [len(bins) * number // max(1, files) for number in range(files + 1)]
    counts: Counter[str] = Counter()
    largest_token = 0
    costs = [np.zeros(0, dtype=np.int64)]
    for number, (first, end) in enumerate(pairwise(bounds)):
        arrays = _fill([bins[position] for position in range(first, end)], block_tokens)
        save_file(arrays, shard_path(folder, number))
        # The length of the document at each of the starts; 0 where padding begins.
        starts = arrays["starts"].astype(np.int64)
        offsets = arrays["block_offsets"]
        lengths = np.append(starts[1:], 0) - starts
        lengths[offsets[1:] - 1] = 0
        counts["tokens"] += int(lengths.sum())
        counts["supervised_tokens"] += int(arrays["supervised"].sum())
        counts["documents"] += len(lengths) - (end - first)
        largest_token = max(largest_token, int(arrays["tokens"].max()))
        costs.append(np.add.reduceat(lengths**2, offsets[:-1]))
        del arrays  # the memory of a shard, before the next one is built
    np.save(folder / COSTS_NAME, np.concatenate(costs))
    index = BlockIndex(
        blocks=len(bins),
        block_tokens=block_tokens,
        tokens=counts["tokens"],
        supervised_tokens=counts["supervised_tokens"],
        documents=counts["documents"],
        largest_token=largest_token,
        epoch_blocks=epoch_blocks(groups),
        groups=groups,
        shards=[end - first for first, end in pairwise(bounds)],
    )
    write_json(folder / INDEX_NAME, to_json(index))
    return index


def _fill(bins: Sequence[Sequence[Document]], block_tokens: int) -> dict[str, NDArray[Any]]:
    tokens = np.zeros((len(bins), block_tokens), dtype=np.int32)
    supervised = np.zeros((len(bins), block_tokens), dtype=np.uint8)
    starts: list[int] = []
    block_offsets = [0]
    for row, documents in enumerate(bins):
        position = 0
        for document in documents:
            end = position + len(document.tokens)
            tokens[row, position:end] = document.tokens
            supervised[row, position:end] = document.supervised
            starts.append(position)
            position = end
        starts.append(position)
        block_offsets.append(len(starts))
    return {
        "tokens": tokens,
        "supervised": supervised,
        "starts": np.array(starts, dtype=np.int32),
        "block_offsets": np.array(block_offsets, dtype=np.int64),
    }


BYTES_PER_POSITION = 6  # a token, its supervision, and room for document starts
FEW_SAMPLES = 10  # a deviation from the wanted split that chance alone explains


def run(job: Job) -> dict[str, Any]:
    """Write the folders of blocks `train` and `validation`.

    Raises DataError if one of them would be empty, unless nothing is to be held out.
    """
    split = Split.of(job.spec.settings, job.spec.where)
    samples = Samples(job.inputs["tokenize"].folder(*(f"{name}.npy" for name in ARRAYS)))
    held_out = split.held_out(samples)
    _refuse_empty(samples, held_out, split)
    for warning in _warnings(samples, held_out, split):
        job.say(f"shard: warning: {warning}")
    require_space(job.out, 2 * len(samples.tokens) * BYTES_PER_POSITION, "the packed blocks")
    # [samples], the weight of each sample's source
    sizes = np.diff(samples.source_offsets)
    weights = np.ones(len(sizes))
    if split.weights is not None:
        weights[: len(split.weights)] = split.weights
    weight_of = np.repeat(weights, sizes)
    by_weight = {
        weight: np.flatnonzero(~held_out & (weight_of == weight))
        for weight in np.unique(weight_of).tolist()
    }
    train = _write_side(job, "train", samples, by_weight, split, split.layout.shards)
    validation = _write_side(job, "validation", samples, {1.0: np.flatnonzero(held_out)}, split, 1)
    if train.documents + validation.documents != len(samples):
        raise IntegrityError(
            f"{len(samples)} samples, and {train.documents} in training and {validation.documents} "
            "in validation blocks; this is a bug, report it"
        )
    return {"train": _counts(train), "validation": _counts(validation)}


def _refuse_empty(samples: Samples, held_out: NDArray[np.bool_], split: Split) -> None:
    number = int(held_out.sum())
    if split.validation_sources and not number:
        raise DataError(
            "data.validation: no sample of its sources is left, so there is nothing to judge the "
            "training by; with tokenize.duplicates: drop, rows that are also in data.train are "
            "dropped here: give other rows"
        )
    sides = {"validation": number, "training": len(held_out) - number}
    if not split.fraction:
        del sides["validation"]
    questions = len(np.unique(samples.prompts))
    for side, of_side in sides.items():
        if not of_side:
            raise DataError(
                f"of {count(len(held_out), 'samples')} none is in the {side} split with "
                f"data.validation_fraction {split.fraction}; "
                f"{'raise' if side == 'validation' else 'lower'} it, change shard.seed, or add "
                "conversations (those with the same first question and system message stay "
                f"together, and there are {questions} different ones)"
            )


def _warnings(samples: Samples, held_out: NDArray[np.bool_], split: Split) -> Iterator[str]:
    """Yield what makes the held-out loss tell less than it seems to."""
    if split.validation_sources:
        known = begin_as_training(samples, held_out)
        if known:
            yield (
                f"{known:,} of {count(int(held_out.sum()), 'held-out samples')} begin as a "
                "training sample does, with the same first question and system message: the "
                "held-out loss is lower than on questions that are new; leave these rows out of "
                "data.train or of data.validation"
            )
    elif warning := _far_from_fraction(samples, held_out, split.fraction):
        yield warning


def begin_as_training(samples: Samples, held_out: NDArray[np.bool_]) -> int:
    """Return how many held-out samples share a training sample's question and system message.

    The question is the first one.
    """
    beginnings = samples.prompts[samples.conversations]
    return int(np.isin(beginnings[held_out], beginnings[~held_out]).sum())


def _far_from_fraction(samples: Samples, held_out: NDArray[np.bool_], fraction: float) -> str:
    """Return a warning if the validation samples' share is far from `fraction`, or ""."""
    number = int(held_out.sum())
    wanted = fraction * len(held_out)
    if wanted / 2 <= number <= 2 * wanted or abs(number - wanted) <= FEW_SAMPLES:
        return ""
    side, chosen = ("validation", held_out) if number > wanted else ("training", ~held_out)
    most = int(
        np.unique(samples.prompts[samples.conversations[chosen]], return_counts=True)[1].max()
    )
    return (
        f"{number:,} of {len(held_out):,} samples ({number / len(held_out):.1%}) are in "
        f"validation, and data.validation_fraction is {fraction}: all samples with the same first "
        "question and system message stay together, and the most frequent of these beginnings has "
        f"{most:,} ({most / len(held_out):.1%}), all in {side}; change shard.seed to draw again, "
        "or give these conversations different beginnings"
    )


class _PackedDocuments(Sequence[Sequence[Document]]):
    """A lazy sequence of the documents of each bin."""

    def __init__(self, samples: Samples, bins: Bins) -> None:
        # Slices of a plain array are several times cheaper than slices of a memmap.
        self._tokens, self._supervised = np.asarray(samples.tokens), np.asarray(samples.supervised)
        self._offsets = samples.offsets
        self._bins = bins

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, position: Any) -> Any:
        numbers = self._bins[position]
        bounds = zip(
            self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist(), strict=True
        )
        return [
            Document(self._tokens[start:end], self._supervised[start:end]) for start, end in bounds
        ]


def _write_side(
    job: Job,
    side: str,
    samples: Samples,
    by_weight: dict[float, NDArray[np.int64]],
    split: Split,
    shards: int,
) -> BlockIndex:
    groups = []
    documents = [np.zeros(0, dtype=np.int64)]
    sizes = [np.zeros(1, dtype=np.int64)]
    for weight, numbers in by_weight.items():
        if len(numbers):
            group = split.pack(samples, numbers)
            groups.append(BlockGroup(weight, len(group)))
            documents.append(group.documents)
            sizes.append(np.diff(group.offsets))
    bins = _PackedDocuments(
        samples, Bins(np.concatenate(documents), np.cumsum(np.concatenate(sizes)))
    )
    index = write_blocks(job.out / side, bins, split.layout.block_tokens, shards, groups=groups)
    if not index.blocks:
        job.say("shard: nothing is held out (data.validation_fraction: 0)")
        return index
    epoch = ""
    if {group.weight for group in index.groups} != {1.0}:
        parts = ", ".join(f"{group.blocks:,} x {group.weight:g}" for group in index.groups)
        epoch = f"; the first epoch uses {count(index.epoch_blocks, 'blocks')} ({parts})"
    job.say(
        f"shard: {side}: {count(index.documents, 'documents')} in {count(index.blocks, 'blocks')} "
        f"of {index.block_tokens:,} tokens, {index.packing_efficiency:.1%} full, "
        f"{count(len(index.shards), 'files')}{epoch}"
    )
    return index


def _counts(index: BlockIndex) -> dict[str, Any]:
    if not index.blocks:
        return {"blocks": 0}
    return {
        "blocks": index.blocks,
        "epoch_blocks": index.epoch_blocks,
        "groups": to_json(index.groups),
        "documents": index.documents,
        "tokens": index.tokens,
        "supervised_tokens": index.supervised_tokens,
        "packing_efficiency": round(index.packing_efficiency, 6),
    }
