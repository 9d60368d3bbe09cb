"""Batches: packed blocks as tensors, and their losses.

Documents do not attend to each other, and only supervised tokens are predicted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline_lib.data import order
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block, BlockReader
from pipeline_lib.data.documents import key_of
from pipeline_lib.model.context import Part
from pipeline_lib.model.dropout import Draws

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """A micro-batch of B blocks of T tokens.

    `targets[b, t]` is the token to predict at position t, or IGNORED. With `part`, tensors [B, T]
    and numbers of tokens are of that part; `cu_seq_lens` and `max_length` describe the whole
    blocks.
    """

    tokens: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64, starting at 0 in each document
    documents: Tensor  # [B, T] int64, -1 for padding
    targets: Tensor  # [B, T] int64
    predicted: Tensor  # [N] int64, flat indices into B * T of the positions with a target
    cu_seq_lens: Tensor  # [n + 1] int32, flat offsets at which documents begin; padded with B * T
    max_length: int  # an upper bound on the length of documents
    supervised_tokens: int
    real_tokens: int
    # sum of the documents' squared lengths: the cost of attention; 0 but for the first part
    squared_lengths: int
    part: Part | None = None
    draws: Draws | None = None  # of dropout; without them torch's random numbers decide

    def pinned(self) -> "Batch":
        """Return the batch in pinned host memory, which allows asynchronous copies to a GPU."""
        return self._changed(Tensor.pin_memory)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`; the copy is asynchronous if the batch is pinned."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if torch.is_tensor(value)
        }
        return replace(self, **changed)


def make_batch(blocks: Sequence[Block]) -> Batch:
    """Stack `blocks`, which all have the same length, into a batch."""
    tokens = np.stack([block.tokens for block in blocks]).astype(np.int64)
    documents = np.stack([block.documents for block in blocks]).astype(np.int64)
    supervised = np.stack([block.supervised for block in blocks])
    same_document = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    targets = np.full_like(tokens, IGNORED)
    predicted = supervised[:, 1:] & same_document
    targets[:, :-1][predicted] = tokens[:, 1:][predicted]
    starts = np.ones_like(documents, dtype=bool)  # of documents; a block's padding counts as one
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    index = np.broadcast_to(np.arange(starts.shape[1]), starts.shape)
    begins = np.flatnonzero(starts)
    lengths = np.diff(begins, append=starts.size)
    # Both are rounded up so that few shapes occur: each new one selects new kernels.
    cu_seq_lens = np.full(_rounded(len(begins)) + 1, starts.size, np.int32)
    cu_seq_lens[: len(begins)] = begins
    max_length = min(_rounded(int(lengths.max())), starts.shape[1])
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)),
        torch.from_numpy(documents),
        torch.from_numpy(targets),
        torch.from_numpy(np.flatnonzero(targets != IGNORED)),
        torch.from_numpy(cu_seq_lens),
        max_length,
        supervised_tokens=int(predicted.sum()),
        real_tokens=int((documents >= 0).sum()),
        squared_lengths=int((lengths[documents.flat[begins] != PADDING_DOCUMENT] ** 2).sum()),
    )


def read_batch(reader: BlockReader, block_ids: Sequence[int] | NDArray[np.int64]) -> Batch:
    """Read the blocks with these numbers; -1 is a block of padding, which keeps ranks in step."""
    blocks = []
    for block in block_ids:
        is_padding = block == order.PADDING
        blocks.append(empty_block(reader.block_tokens) if is_padding else reader[int(block)])
    return make_batch(blocks)


def part_of(batch: Batch, part: Part | None) -> Batch:
    """Return the part of each whole block of `batch`; without `part`, `batch` itself."""
    if part is None:
        return batch
    targets = part.of(batch.targets)
    documents = part.of(batch.documents)
    return replace(
        batch,
        tokens=part.of(batch.tokens),
        positions=part.of(batch.positions),
        documents=documents,
        targets=targets,
        predicted=(targets.flatten() != IGNORED).nonzero().flatten(),
        supervised_tokens=int((targets != IGNORED).sum()),
        real_tokens=int((documents >= 0).sum()),
        squared_lengths=batch.squared_lengths if part.number == 0 else 0,
        part=part,
        draws=None if batch.draws is None else batch.draws.of(part),
    )


@dataclass(frozen=True)
class BatchShare:
    """What a rank computes of some blocks: those of its group, one of `groups`, and their `part`.

    Without `part`, a rank is a group of its own and has whole blocks.
    """

    group: int
    groups: int
    part: Part | None = None

    def batches(
        self,
        reader: BlockReader,
        block_ids: NDArray[np.int64],
        micro_batch_blocks: int,
        key: int | None = None,
    ) -> Iterator[Batch]:
        """Read this rank's micro-batches of the blocks with these numbers, as many as each rank.

        With `key`, that and the number of a block decide its dropout.
        """
        costs = reader.costs[block_ids]
        tokens = reader.block_tokens
        for micro in order.rank_blocks(
            block_ids, costs, self.group, self.groups, micro_batch_blocks
        ):
            batch = read_batch(reader, micro)
            if key is not None:
                keys = tuple(key_of(key, block) for block in micro.tolist())
                batch = replace(batch, draws=Draws(keys, tokens, first=0, tokens=tokens))
            yield self.of(batch)

    def of(self, batch: Batch) -> Batch:
        """Return this rank's part of `batch`, whose blocks are whole."""
        return part_of(batch, self.part)


def empty_block(block_tokens: int) -> Block:
    """Return a block of padding, with no document and nothing to predict."""
    return Block(
        tokens=np.zeros(block_tokens, np.int32),
        supervised=np.zeros(block_tokens, np.bool_),
        documents=np.full(block_tokens, PADDING_DOCUMENT, np.int32),
    )


def _rounded(least: int) -> int:
    """Round up to 2**k or 3 * 2**(k - 1): finer steps mean more shapes, coarser ones padding."""
    step = 1 << max(0, (least - 1).bit_length() - 2)
    return -(-least // step) * step


def logits_at(
    model: nn.Module, batch: Batch, positions: Tensor, hidden: Tensor | None = None
) -> Tensor:
    """Return logits [B, K, V] at the K `positions` of whole blocks; the head is applied only there.

    `hidden` [B, T, H] takes the place of the embedded tokens. With parts, all ranks of the group
    return the logits of all positions, without gradients.
    """
    if batch.part is None:
        return model(**_inputs(batch, hidden), logits_to_keep=positions).logits  # type: ignore[no-any-return]
    length = batch.tokens.shape[1]
    own = positions - batch.part.number * length
    logits = model(**_inputs(batch, hidden), logits_to_keep=own.clamp(0, length - 1)).logits
    is_own = (own >= 0) & (own < length)
    return batch.part.summed(torch.where(is_own[:, None], logits, 0.0))


def hidden_states(base: nn.Module, batch: Batch, hidden: Tensor) -> Tensor:
    """Return the last hidden states [B, T, H] of the headless `base` for embedded `hidden`."""
    return base(**_inputs(batch, hidden)).last_hidden_state  # type: ignore[no-any-return]


def loss_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the sum of -log p over the supervised tokens, in nats, and the router loss; both fp32.

    The router loss is summed over the real tokens. It is 0 without experts, without gradients, or
    if its weight is 0.
    """
    total, _, of_routers = _losses(model, batch)
    return total, of_routers


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of -log p over the supervised tokens, in nats and fp32."""
    return loss_sums(model, batch)[0]


def token_losses(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> Tensor:
    """Return -log p [B, T] of each position's target, 0 where there is none; fp32, no gradients.

    `hidden` [B, T, H] takes the place of the embedded tokens.
    """
    return _losses(model, batch, hidden)[1]


def block_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return the sum of `token_losses` over each block: [B]."""
    return token_losses(model, batch).sum(dim=1)


def _losses(
    model: nn.Module, batch: Batch, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Call the forward of `return_losses` in model/loss.py."""
    real = batch.documents >= 0
    inputs = _inputs(batch, hidden)
    return model(**inputs, targets=batch.targets, predicted=batch.predicted, real=real)  # type: ignore[no-any-return]


def _inputs(batch: Batch, hidden: Tensor | None) -> dict[str, Any]:
    """Return the arguments of transformers' forward; attention gets the document offsets."""
    inputs: dict[str, Any] = {
        "position_ids": batch.positions,
        "cu_seq_lens_q": batch.cu_seq_lens,
        "cu_seq_lens_k": batch.cu_seq_lens,
        "max_length_q": batch.max_length,
        "max_length_k": batch.max_length,
        "use_cache": False,
    }
    if hidden is None:
        inputs["input_ids"] = batch.tokens
    else:
        inputs["inputs_embeds"] = hidden
    if batch.part is not None:
        inputs["part"] = batch.part
    if batch.draws is not None:
        inputs["draws"] = batch.draws
    return inputs
