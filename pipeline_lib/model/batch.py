"""From packed blocks to tensors and to the sum of their losses; the probe that an exported model has to reproduce."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline_lib.data import order
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block, BlockReader

# From packed blocks to tensors: no document sees another, and only supervised tokens are predicted.

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """B blocks of T tokens. `targets[b, t]` is the token to predict at t, or IGNORED."""

    tokens: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64, from 0 in each document
    documents: Tensor  # [B, T] int64, -1 for padding
    targets: Tensor  # [B, T] int64
    predicted: Tensor  # [N] int64, the places of the B * T that have a target
    cu_seq_lens: Tensor  # [n + 1] int32, where documents begin in the B * T; filled up with B * T
    max_length: int  # no document is longer
    supervised_tokens: int
    real_tokens: int
    squared_lengths: int  # the squares of the documents' lengths, added up: what attention costs

    def pinned(self) -> "Batch":
        """The same batch in host memory from which a GPU copies by itself."""
        return self._with(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def _with(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **changed)


def make_batch(blocks: Sequence[Block]) -> Batch:
    """Stack `blocks`, all of one length."""
    tokens = np.stack([block.tokens for block in blocks]).astype(np.int64)
    documents = np.stack([block.documents for block in blocks]).astype(np.int64)
    supervised = np.stack([block.supervised for block in blocks])
    same_document = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    targets = np.full_like(tokens, IGNORED)
    predicted = supervised[:, 1:] & same_document
    targets[:, :-1][predicted] = tokens[:, 1:][predicted]
    starts = _starts(documents)
    cu_seq_lens, max_length = _lengths(starts)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(_positions(starts)),
        torch.from_numpy(documents),
        torch.from_numpy(targets),
        torch.from_numpy(np.flatnonzero(targets != IGNORED)),
        torch.from_numpy(cu_seq_lens),
        max_length,
        supervised_tokens=int(predicted.sum()),
        real_tokens=int((documents >= 0).sum()),
        squared_lengths=_squared_lengths(starts, documents),
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


def _starts(documents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a document begins; the padding of a block is one too."""
    starts = np.ones_like(documents, dtype=bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def _positions(starts: NDArray[np.bool_]) -> NDArray[np.int64]:
    index = np.broadcast_to(np.arange(starts.shape[1]), starts.shape)
    return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)


def _lengths(starts: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    """`cu_seq_lens` and `max_length`, rounded up so that few shapes occur: kernels are chosen anew for each."""
    begins = np.flatnonzero(starts)
    longest = int(np.diff(begins, append=starts.size).max())
    cu_seq_lens = np.full(_rounded(len(begins)) + 1, starts.size, np.int32)
    cu_seq_lens[: len(begins)] = begins
    return cu_seq_lens, min(_rounded(longest), starts.shape[1])


def _squared_lengths(starts: NDArray[np.bool_], documents: NDArray[np.int64]) -> int:
    begins = np.flatnonzero(starts)
    is_document = documents.flat[begins] != PADDING_DOCUMENT
    return int((np.diff(begins, append=starts.size)[is_document] ** 2).sum())


def _rounded(least: int) -> int:
    """The next multiple of half a power of two: more shapes cost time to choose kernels, larger ones to pass over."""
    step = 1 << max(0, (least - 1).bit_length() - 2)
    return -(-least // step) * step


def logits_at(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """Logits [B, K, V] at the K `positions`, the only ones for which the vocabulary is multiplied out."""
    return model(**_inputs(batch), logits_to_keep=positions).logits  # type: ignore[no-any-return]


def loss_sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the supervised tokens of -log p, and over the real ones of the routers' weighted loss; nats, fp32.

    The second is 0 for a model without experts, and where the weight is.
    """
    total, _, of_routers = model(**_inputs(batch), **_targets(batch))
    return total, of_routers


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum over the supervised tokens of -log p, in nats and fp32."""
    return loss_sums(model, batch)[0]


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """[B, T]: -log p of the target at each place, 0 where there is none; in fp32 and without gradient."""
    return model(**_inputs(batch), **_targets(batch))[1]  # type: ignore[no-any-return]


def block_losses(model: nn.Module, batch: Batch) -> Tensor:
    """[B]: the same, added up over each block."""
    return token_losses(model, batch).sum(dim=1)


def _targets(batch: Batch) -> dict[str, Any]:
    """What loss.py adds to that."""
    return {"targets": batch.targets, "predicted": batch.predicted, "real": batch.documents >= 0}


def _inputs(batch: Batch) -> dict[str, Any]:
    """What transformers' models call them; the documents' ends go through to the attention."""
    return {
        "input_ids": batch.tokens,
        "position_ids": batch.positions,
        "cu_seq_lens_q": batch.cu_seq_lens,
        "cu_seq_lens_k": batch.cu_seq_lens,
        "max_length_q": batch.max_length,
        "max_length_k": batch.max_length,
        "use_cache": False,
    }


# The next step's batches are read while the current step computes.

Read = Callable[[int], list[Batch]]


class Prefetcher:
    """Gives the batches that `read` gives, one step ahead, and measures the wait for them.

    They are the same whatever is asked for in whatever order: a step that was not expected is read at once. For a
    GPU they lie in pinned memory, so that copies to it wait for nothing. An error of `read` is raised by `take`.
    """

    def __init__(self, read: Read, last_step: int, device: torch.device) -> None:
        """Read steps up to `last_step`, not included, for `device`."""
        self._read, self._last_step, self._device = read, last_step, device
        self._pool = ThreadPoolExecutor(1, "prefetch", initializer=_use, initargs=(device,))
        self._expected = -1
        self._coming: Future[list[Batch]] | None = None

    def __enter__(self) -> "Prefetcher":
        """The thread starts with the first step that is asked for."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread; a read that goes on is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The micro-batches of global step `step`, from 0, and the seconds that were waited for them."""
        start_s = time.monotonic()
        if self._coming is None or self._expected != step:
            self._ask_for(step)
        batches = self._coming.result() if self._coming is not None else []
        if step + 1 < self._last_step:
            self._ask_for(step + 1)
        else:
            self._coming = None
        return batches, time.monotonic() - start_s

    def _ask_for(self, step: int) -> None:
        self._expected, self._coming = step, self._pool.submit(self._read_pinned, step)

    def _read_pinned(self, step: int) -> list[Batch]:
        batches = self._read(step)
        return [batch.pinned() for batch in batches] if self._device.type == "cuda" else batches


def _use(device: torch.device) -> None:
    """Pinned memory belongs to the GPU that a thread uses: GPU 0, if it is not told another."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


# The probe: logits of the trained model on a fixed block, which the exported model has to reproduce.

PROBE_NAME = "probe.safetensors"
POSITIONS = 32


def probe_positions(batch: Batch) -> Tensor:
    """Up to POSITIONS places spread evenly over the first block's real tokens."""
    used = int((batch.documents[0] >= 0).sum())
    count = min(POSITIONS, used)
    return torch.tensor([round(number * (used - 1) / max(1, count - 1)) for number in range(count)])


@torch.no_grad()
def probe_logits(model: nn.Module, block: Block, device: torch.device) -> Tensor:
    """[K, V] in fp32 on the CPU: what `model` says at the probe's positions of `block`."""
    batch = make_batch([block])
    was_training = model.training
    model.eval()
    logits = logits_at(model, batch.to(device), probe_positions(batch).to(device))
    model.train(was_training)
    return logits[0].float().cpu()


def save_probe(folder: Path, block: Block, logits: Tensor) -> None:
    """Write the block and what the trained model said of it."""
    tensors = {
        "tokens": torch.from_numpy(block.tokens),
        "supervised": torch.from_numpy(block.supervised),
        "documents": torch.from_numpy(block.documents),
        "logits": logits.contiguous(),
    }
    save_file(tensors, str(folder / PROBE_NAME))


def load_probe(folder: Path) -> tuple[Block, Tensor]:
    """The probe's block and its logits [K, V]."""
    with safe_open(str(folder / PROBE_NAME), framework="pt") as file:
        block = Block(*(file.get_tensor(name).numpy() for name in ("tokens", "supervised", "documents")))
        return block, file.get_tensor("logits")
