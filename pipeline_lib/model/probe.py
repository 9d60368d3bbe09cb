"""The probe: the trained model's logits on a fixed block, which the exported model reproduces."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline_lib.arch.layers import PROBE_TOKENS
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import Batch, logits_at, make_batch, part_of
from pipeline_lib.model.context import Part

PROBE_NAME = "probe.safetensors"
_POSITIONS = 32  # at most, spread evenly over the real tokens of the block


@torch.no_grad()
def probe_logits(
    model: nn.Module, block: Block, device: torch.device, part: Part | None = None
) -> Tensor:
    """Return the logits [K, V] of `model` at the probe's positions of `block`, in fp32 on the CPU.

    With `part`, the ranks of its group compute them together.
    """
    was_training = model.training
    model.eval()
    batch = make_batch([block])
    positions = probe_positions(batch).to(device)
    logits = logits_at(model, part_of(batch, part).to(device), positions)[0].float()
    model.train(was_training)
    return logits.cpu()


def probe_block(block: Block, parts: int = 1) -> Block:
    """Return the beginning of `block` that is the probe: up to PROBE_TOKENS tokens.

    It has a few less for equal parts.
    """
    count = min(len(block.tokens), PROBE_TOKENS // parts * parts)
    return Block(block.tokens[:count], block.supervised[:count], block.documents[:count])


def probe_positions(batch: Batch) -> Tensor:
    """Return the probe's positions [K] in a batch of one whole block."""
    last = batch.real_tokens - 1
    count = min(_POSITIONS, last + 1)
    return torch.tensor([round(number * last / max(1, count - 1)) for number in range(count)])


def save_probe(folder: Path, block: Block, logits: Tensor) -> None:
    """Write the block and the trained model's logits to `folder`."""
    tensors = {
        "tokens": torch.from_numpy(block.tokens),
        "supervised": torch.from_numpy(block.supervised),
        "documents": torch.from_numpy(block.documents),
        "logits": logits.contiguous(),
    }
    save_file(tensors, str(folder / PROBE_NAME))


def load_probe(folder: Path) -> tuple[Block, Tensor]:
    """Return the block and the logits [K, V] of the probe in `folder`."""
    with safe_open(str(folder / PROBE_NAME), framework="pt") as file:
        block = Block(
            tokens=file.get_tensor("tokens").numpy(),
            supervised=file.get_tensor("supervised").numpy(),
            documents=file.get_tensor("documents").numpy(),
        )
        return block, file.get_tensor("logits")
