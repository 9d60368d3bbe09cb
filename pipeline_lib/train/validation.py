"""Checks between steps: the held-out loss, with its history, and sample answers.

They do not change the training: no gradients, no dropout, no random number drawn.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.files import disk_full_named, read_jsonl, write_jsonl
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Document, first_answer, prompt_length, question
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.data.thinking import last_question
from pipeline_lib.model.batch import BatchShare, block_losses, empty_block, logits_at, make_batch
from pipeline_lib.train.dist import World, sum_over_ranks
from pipeline_lib.train.strategy import Strategy


@contextmanager
def evaluating(wrapped: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Run the enclosed forward passes in evaluation mode, without gradients."""
    was_training = wrapped.training
    wrapped.eval()
    try:
        with torch.no_grad(), strategy.autocast():
            yield
    finally:
        wrapped.train(was_training)


def held_out_loss(
    wrapped: nn.Module,
    strategy: Strategy,
    reader: BlockReader,
    micro_batch_blocks: int,
    share: BatchShare,
    device: torch.device,
) -> float:
    """Return the nats per supervised token of `reader`, divided over the ranks; the same on each.

    All its blocks count. Forward passes are collective, so every rank makes the same number of
    them; missing blocks are padding.
    """
    ids = np.arange(len(reader), dtype=np.int64)
    nats, tokens = 0.0, 0
    with evaluating(wrapped, strategy):
        for batch in share.batches(reader, ids, micro_batch_blocks):
            nats += float(block_losses(wrapped, batch.to(device)).sum(dtype=torch.float64))
            tokens += batch.supervised_tokens
    all_nats, all_tokens = sum_over_ranks([nats, float(tokens)], device)
    return all_nats / max(1.0, all_tokens)


@dataclass
class Validations:
    """The history of the held-out loss in brief. Checkpoints store what `to_json` returns."""

    last_step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    without_gain: int = 0  # validations since the best one

    @staticmethod
    def from_json(known: Mapping[str, Any]) -> "Validations":
        """Return the history whose `to_json` returned `known`."""
        return Validations(
            **{**known, "best_loss": math.inf if known["best_loss"] is None else known["best_loss"]}
        )

    def to_json(self) -> dict[str, Any]:
        """Return all fields; without a best step, the best loss is None."""
        return {**asdict(self), "best_loss": self.best_loss if self.best_step else None}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step; a loss that is not finite is no improvement."""
        if "validation_loss" not in row:
            return
        loss = row["validation_loss"]
        self.last_step = row["step"]
        self.without_gain = self.without_gain + 1
        if loss is not None and loss < self.best_loss:
            self.best_step = row["step"]
            self.best_loss = loss
            self.without_gain = 0


# Sample answers to a few held-out prompts during training, for people to read.
#
# All ranks run the model together, equally often for every answer, and take each token from the
# first rank.

SAMPLES_NAME = "samples.jsonl"
PROMPTS = 2
NEW_TOKENS = 48


@dataclass(frozen=True)
class Sampler:
    """A sampler of greedy answers to the first held-out prompts, for samples.jsonl in `run_dir`.

    It appends them.
    """

    documents: list[Document]
    tokenizer: Tokenizer
    block_tokens: int
    share: BatchShare
    world: World
    run_dir: Path

    @staticmethod
    def of(
        held_out: BlockReader, model_folder: Path, share: BatchShare, world: World, run_dir: Path
    ) -> "Sampler":
        """Take the prompts from `held_out` and the tokenizer from `model_folder`."""
        documents: list[Document] = []
        for block in range(len(held_out)):
            documents += filter(prompt_length, documents_of(held_out[block]))
            if len(documents) >= PROMPTS:
                break
        tokenizer = load_tokenizer(model_folder)
        return Sampler(documents[:PROMPTS], tokenizer, held_out.block_tokens, share, world, run_dir)

    def answer(self, wrapped: nn.Module, strategy: Strategy, step: int, events: EventLog) -> None:
        """Answer the prompts, and append the answers as those of the model after `step`.

        All ranks call it.
        """
        prompts = []
        for document in self.documents:
            prompts.append(np.array(question(document, self.tokenizer), np.int32))
        with evaluating(wrapped, strategy):
            answers = greedy_answers(
                wrapped, prompts, self.block_tokens, self.world.device, self.share
            )
        rows = []
        for document, prompt, answer in zip(self.documents, prompts, answers, strict=True):
            text = self.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
            rows.append(
                {
                    "step": step,
                    "prompt": last_question(text),
                    "reference": self._text(first_answer(document)),
                    "answer": self._text(answer),
                }
            )
        if self.world.is_first:
            path = self.run_dir / SAMPLES_NAME
            with disk_full_named(path), path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        events.emit(EventName.SAMPLES_WRITTEN, step=step, answers=[row["answer"] for row in rows])

    def _text(self, tokens: Sequence[int]) -> str:
        """Decode `tokens` up to the first control token."""
        added = self.tokenizer.get_added_tokens_decoder()
        control = {number for number, token in added.items() if token.special}
        text = takewhile(lambda token: token not in control, tokens)
        return str(self.tokenizer.decode(list(text))).strip()


def greedy_answers(
    wrapped: nn.Module,
    prompts: Sequence[NDArray[np.int32]],
    block_tokens: int,
    device: torch.device,
    share: BatchShare,
) -> list[list[int]]:
    """Return up to NEW_TOKENS tokens after each of `prompts`, as far as a block has room.

    Every rank makes the same number of forward passes, without a KV cache, over the same blocks or
    its parts of them.
    """
    if not prompts:
        return []
    ends = [min(len(prompt) + NEW_TOKENS, block_tokens) for prompt in prompts]
    blocks = []
    for prompt, end in zip(prompts, ends, strict=True):
        block = empty_block(block_tokens)
        block.tokens[: len(prompt)] = prompt
        block.documents[:end] = 0
        blocks.append(block)
    for made in range(max(end - len(prompt) for prompt, end in zip(prompts, ends, strict=True))):
        places = [min(len(prompt) + made, block_tokens) for prompt in prompts]
        batch = share.of(make_batch(blocks)).to(device)
        logits = logits_at(wrapped, batch, torch.tensor(places, device=device) - 1)
        # [V, prompts]: each at its own place
        chosen = logits.diagonal(dim1=0, dim2=1).argmax(dim=0)
        dist.broadcast(chosen, src=0)
        for block, place, end, token in zip(blocks, places, ends, chosen.tolist(), strict=True):
            if place < end:
                block.tokens[place] = token
    answers = []
    for block, prompt, end in zip(blocks, prompts, ends, strict=True):
        answers.append(block.tokens[len(prompt) : end].tolist())
    return answers


def leave_samples(run_dir: Path, out: Path, last_step: int) -> None:
    """Copy the answers up to `last_step` to `out`; of a step made twice, only the later ones."""
    if not (run_dir / SAMPLES_NAME).exists():
        return
    latest = {}
    for row in read_jsonl(run_dir / SAMPLES_NAME):
        if row["step"] <= last_step:
            latest[row["step"], row["prompt"], row["reference"]] = row
    write_jsonl(out / SAMPLES_NAME, sorted(latest.values(), key=lambda row: int(row["step"])))
