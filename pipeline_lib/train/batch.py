"""From packed blocks to tensors: no document sees another, and only supervised tokens are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline_lib.data import order
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block, BlockReader

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """B blocks of T tokens. `targets[b, t]` is the token to predict at t, or IGNORED."""

    tokens: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64, from 0 in each document
    documents: Tensor  # [B, T] int64, -1 for padding
    targets: Tensor  # [B, T] int64
    supervised_tokens: int
    real_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        names = ("tokens", "positions", "documents", "targets")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def make_batch(blocks: Sequence[Block]) -> Batch:
    """Stack `blocks`, all of one length."""
    tokens = np.stack([block.tokens for block in blocks]).astype(np.int64)
    documents = np.stack([block.documents for block in blocks]).astype(np.int64)
    supervised = np.stack([block.supervised for block in blocks])
    same_document = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    targets = np.full_like(tokens, IGNORED)
    predicted = supervised[:, 1:] & same_document
    targets[:, :-1][predicted] = tokens[:, 1:][predicted]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(_positions(documents)),
        torch.from_numpy(documents),
        torch.from_numpy(targets),
        supervised_tokens=int(predicted.sum()),
        real_tokens=int((documents >= 0).sum()),
    )


def read_batch(reader: BlockReader, block_ids: Sequence[int] | NDArray[np.int64]) -> Batch:
    """The blocks with these numbers; -1 stands for a block of nothing, which keeps ranks in step."""
    return make_batch(
        [reader[int(block)] if block != order.PADDING else empty_block(reader.block_tokens) for block in block_ids]
    )


def empty_block(block_tokens: int) -> Block:
    """A block of padding: no document, nothing to predict."""
    return Block(
        tokens=np.zeros(block_tokens, np.int32),
        supervised=np.zeros(block_tokens, np.bool_),
        documents=np.full(block_tokens, PADDING_DOCUMENT, np.int32),
    )


def _positions(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    length = documents.shape[1]
    index = np.broadcast_to(np.arange(length), documents.shape)
    starts = np.ones_like(documents, dtype=bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def document_mask(documents: Tensor) -> Tensor:
    """[B, 1, T, T]: true where query t may look at key s: the same document, and s <= t."""
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()


def logits_at(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """Logits [B, K, V] at the K `positions`, the only ones for which the vocabulary is multiplied out."""
    output = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        attention_mask=document_mask(batch.documents),
        logits_to_keep=positions,
        use_cache=False,
    )
    return output.logits  # type: ignore[no-any-return]


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over the supervised tokens of -log p, in nats and fp32."""
    return block_losses(model, batch).sum()


def block_losses(model: nn.Module, batch: Batch) -> Tensor:
    """[B]: the same sum for each block."""
    positions = (batch.targets != IGNORED).any(dim=0).nonzero().flatten()
    if positions.numel() == 0:  # a batch of nothing still has to pass through every layer
        positions = torch.zeros(1, dtype=torch.long, device=batch.tokens.device)
    logits = logits_at(model, batch, positions)
    targets = batch.targets[:, positions]
    flat = logits.flatten(0, 1).float()  # the vocabulary stays last: a transposed one is much slower
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets).sum(dim=1)
