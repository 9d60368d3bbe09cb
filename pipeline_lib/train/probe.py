"""The probe: logits of the trained model on a fixed block, which the exported model has to reproduce."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline_lib.data.shard.blocks import Block
from pipeline_lib.train.batch import Batch, logits_at, make_batch

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
