"""The reference: the loop as one writes it with only transformers and torch, eager, whole logits.

Independent of `pipeline_lib` but for its settings: masks, loss, schedule, clipping and decay are
written anew.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import Block

IGNORED = -100


@dataclass(frozen=True)
class Run:
    """How to train: settings, the schedule's steps, blocks at a time, and where."""

    train: Train
    total_steps: int
    micro_blocks: int
    device: torch.device


def make_model(folder: Path, config: dict[str, object], device: torch.device) -> int:
    """Save a model of that config.json with fixed random fp32 weights; returns parameters."""
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**config))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def learning_rate(train: Train, step: int, steps: int) -> float:
    """Of `step`, from 1: up in a line, then down along half a cosine."""
    warmup = math.ceil(train.warmup_fraction * steps)
    if step <= warmup:
        return train.lr * step / warmup
    peak = max(1, warmup)
    return train.lr * (1 + math.cos(math.pi * (step - peak) / (steps - peak + 1))) / 2


def losses(folder: Path, run: Run, steps: list[list[Block]]) -> Generator[float]:
    """The loss of each step in nats per supervised token, as training goes on."""
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.to(run.device).train()  # type: ignore[arg-type]
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": run.train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=run.train.lr, betas=(run.train.beta1, run.train.beta2))
    for step, blocks in enumerate(steps, start=1):
        tokens, positions, mask, labels = (tensor.to(run.device) for tensor in tensors_of(blocks))
        supervised = int((labels != IGNORED).sum())
        total = 0.0
        for start in range(0, len(blocks), run.micro_blocks):
            part = slice(start, start + run.micro_blocks)
            with torch.autocast(
                run.device.type, torch.bfloat16, enabled=run.train.precision == "bf16"
            ):
                logits = model(
                    input_ids=tokens[part],
                    position_ids=positions[part],
                    attention_mask=mask[part],
                    use_cache=False,
                ).logits
            chosen = labels[part] != IGNORED
            loss = (
                F.cross_entropy(logits[chosen].float(), labels[part][chosen], reduction="sum")
                / supervised
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, run.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run.train, step, run.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def tensors_of(blocks: list[Block]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B, T]; positions in documents; who sees whom [B, 1, T, T]; the targets, or IGNORED.

    A token is seen by itself and those after it in its document, and by no other.
    """
    tokens = torch.from_numpy(np.stack([block.tokens for block in blocks])).long()
    documents = torch.from_numpy(np.stack([block.documents for block in blocks]))
    supervised = torch.from_numpy(np.stack([block.supervised for block in blocks]))
    length = tokens.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    positions = seen.sum(dim=2) - 1  # of those before it in its document
    labels = torch.full_like(tokens, IGNORED)
    predicted = (
        supervised[:, 1:] & same.diagonal(offset=1, dim1=1, dim2=2) & (documents[:, 1:] >= 0)
    )
    labels[:, :-1][predicted] = tokens[:, 1:][predicted]
    return tokens, positions, seen[:, None], labels
