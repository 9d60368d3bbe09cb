"""What the model answers to a few held-out prompts while it trains, for people to look at.

All ranks go through the model together, as often for every answer, and take each token from the first rank.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from pipeline_lib.base.events import EventLog
from pipeline_lib.base.fsio import disk_full_named, read_jsonl, write_jsonl
from pipeline_lib.data.chat.encoder import load_tokenizer
from pipeline_lib.data.document import Document, first_answer, prompt_length, question
from pipeline_lib.data.shard.blocks import PADDING_DOCUMENT, BlockReader, documents_of
from pipeline_lib.train.batch import empty_block, logits_at, make_batch
from pipeline_lib.train.dist import World
from pipeline_lib.train.parallel import Strategy
from pipeline_lib.train.validation import evaluating

SAMPLES_NAME = "samples.jsonl"
PROMPTS = 2
NEW_TOKENS = 48
_LAST_QUESTION = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)


def question_of(prompt: str) -> str:
    """The last user turn of a rendered prompt; the whole prompt where the template is of another kind."""
    turns = _LAST_QUESTION.findall(prompt)
    return str(turns[-1]).strip() if turns else prompt


@dataclass(frozen=True)
class Sampler:
    """Has the first held-out prompts answered, greedily, and appends the answers to samples.jsonl in `run_dir`."""

    documents: list[Document]
    tokenizer: Tokenizer
    block_tokens: int
    world: World
    run_dir: Path

    @staticmethod
    def of(held_out: BlockReader, model_folder: Path, world: World, run_dir: Path) -> "Sampler":
        """Take the prompts from `held_out` and the tokenizer from `model_folder`."""
        documents: list[Document] = []
        for block in range(len(held_out)):
            documents += [document for document in documents_of(held_out[block]) if prompt_length(document)]
            if len(documents) >= PROMPTS:
                break
        return Sampler(documents[:PROMPTS], load_tokenizer(model_folder), held_out.block_tokens, world, run_dir)

    def answer(self, wrapped: nn.Module, strategy: Strategy, step: int, events: EventLog) -> None:
        """Answer, and write the answers down as the model's after `step`. All ranks call it."""
        prompts = [np.array(question(document, self.tokenizer), np.int32) for document in self.documents]
        with evaluating(wrapped, strategy):
            answers = greedy_answers(wrapped, prompts, self.block_tokens, self.world.device)
        rows = [
            {
                "step": step,
                "prompt": question_of(self.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)),
                "reference": self._text(first_answer(document)),
                "answer": self._text(answer),
            }
            for document, prompt, answer in zip(self.documents, prompts, answers, strict=True)
        ]
        if self.world.is_first:
            path = self.run_dir / SAMPLES_NAME
            with disk_full_named(path), path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        events.emit("samples.written", step=step, answers=[row["answer"] for row in rows])

    def _text(self, tokens: Sequence[int]) -> str:
        """`tokens` up to the first control token, decoded."""
        control = {number for number, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        end = next((place for place, token in enumerate(tokens) if token in control), len(tokens))
        return str(self.tokenizer.decode(list(tokens[:end]))).strip()


def greedy_answers(
    wrapped: nn.Module, prompts: Sequence[NDArray[np.int32]], block_tokens: int, device: torch.device
) -> list[list[int]]:
    """Up to NEW_TOKENS tokens after each of `prompts`, as far as a block has room.

    Every rank makes the same number of forward passes, over whole blocks: nothing is kept from one to the next.
    """
    if not prompts:
        return []
    ends = [min(len(prompt) + NEW_TOKENS, block_tokens) for prompt in prompts]
    blocks = []
    for prompt, end in zip(prompts, ends, strict=True):
        block = empty_block(block_tokens)
        block.tokens[: len(prompt)] = prompt
        blocks.append(replace(block, documents=np.where(np.arange(block_tokens) < end, 0, PADDING_DOCUMENT)))
    for made in range(max(end - len(prompt) for prompt, end in zip(prompts, ends, strict=True))):
        places = [min(len(prompt) + made, block_tokens) for prompt in prompts]
        logits = logits_at(wrapped, make_batch(blocks).to(device), torch.tensor(places, device=device) - 1)
        chosen = logits.diagonal(dim1=0, dim2=1).argmax(dim=0)  # [V, prompts]: each at its own place
        dist.broadcast(chosen, src=0)
        for block, place, end, token in zip(blocks, places, ends, chosen.tolist(), strict=True):
            if place < end:
                block.tokens[place] = token
    return [block.tokens[len(prompt) : end].tolist() for block, prompt, end in zip(blocks, prompts, ends, strict=True)]


def leave_samples(run_dir: Path, out: Path, last_step: int) -> None:
    """Copy the answers up to `last_step` to `out`; of a step that was taken twice, the later ones."""
    if not (run_dir / SAMPLES_NAME).exists():
        return
    latest = {
        (row["step"], row["prompt"], row["reference"]): row
        for row in read_jsonl(run_dir / SAMPLES_NAME)
        if row["step"] <= last_step
    }
    write_jsonl(out / SAMPLES_NAME, sorted(latest.values(), key=lambda row: int(row["step"])))
