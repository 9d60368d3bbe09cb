"""The evaluate stage: base against tuned on what was held out, against two baselines, and in their own words.

Baselines that a model has to beat to have learned anything: a unigram model of the training answers, and
the tuned model itself when each answer is put behind another answer's prompt.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from pipeline_lib.base.errors import DataError, TrainingError
from pipeline_lib.base.fsio import write_json, write_jsonl
from pipeline_lib.base.stage import Job, Say
from pipeline_lib.config.schema import Evaluate, read_settings
from pipeline_lib.data.blocks import Block, BlockReader, Document, documents_of
from pipeline_lib.publish.generate import generate_all, prompt_length
from pipeline_lib.train.batch import loss_sum, make_batch
from pipeline_lib.train.model import load_base

BATCH_BLOCKS = 8
MAX_SHUFFLED = 1000


def run(job: Job) -> dict[str, Any]:
    """Score both models on the validation blocks and let them answer. Raises TrainingError for a loss not finite."""
    settings = read_settings(Evaluate, job.spec.settings)
    shard = job.inputs["shard"].path
    held_out, training = BlockReader(shard / "validation"), BlockReader(shard / "train")
    documents = [document for block in range(len(held_out)) for document in documents_of(held_out[block])]
    own, shuffled = shuffle_prompts(documents[:MAX_SHUFFLED], held_out.block_tokens)
    scores: dict[str, Any] = {"unigram": {"loss": unigram_loss(training, held_out)}}
    answers = {}
    folders = {"base": job.inputs["model"].path, "tuned": job.inputs["merge"].path}
    for name, folder in folders.items():
        model = _load(folder)
        job.say(f"evaluate: {name} model on {len(held_out):,} held-out blocks")
        scores[name] = _with_perplexity(mean_loss(model, (held_out[block] for block in range(len(held_out)))))
        if name == "tuned" and shuffled:
            scores["shuffled"] = {"loss": mean_loss(model, shuffled), "own_loss": mean_loss(model, own)}
        answers[name] = generate_all(model, folders["base"], documents, settings)
    metrics = {
        "eval": {**scores, "supervised_tokens": held_out.index.supervised_tokens, "samples": len(documents)},
        "verdict": judge(scores),
    }
    write_json(job.out / "metrics.json", metrics)
    write_jsonl(job.out / "generations.jsonl", _side_by_side(answers))
    _say_scores(scores, metrics["verdict"]["text"], job.say)
    return metrics


def _load(folder: Path) -> PreTrainedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_base(folder, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.config.use_cache = True
    model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
    return model.eval()


@torch.no_grad()
def mean_loss(model: nn.Module, blocks: Sequence[Block] | Iterator[Block]) -> float:
    """-log p per supervised token of `blocks`, in nats."""
    device = next(model.parameters()).device
    total, tokens = 0.0, 0
    for group in _groups(blocks, BATCH_BLOCKS):
        batch = make_batch(group)
        total += float(loss_sum(model, batch.to(device)))
        tokens += batch.supervised_tokens
    if tokens == 0:
        raise DataError("evaluate: the held-out blocks hold no supervised token; raise data.validation_fraction")
    if not math.isfinite(total):
        raise TrainingError("evaluate: the held-out loss is not finite")
    return total / tokens


def unigram_loss(training: BlockReader, held_out: BlockReader) -> float:
    """Held-out loss of a model that knows only how often each token is an answer's: counts plus one."""
    counts: NDArray[np.float64] = np.zeros(0)
    for block in range(len(training)):
        counts = _count(training[block], counts)
    total, tokens = 0.0, 0
    for block in range(len(held_out)):
        found = _count(held_out[block], np.zeros(0))
        size = max(len(found), len(counts))
        counts = np.pad(counts, (0, size - len(counts)))
        found = np.pad(found, (0, size - len(found)))
        total -= float((found * np.log((counts + 1) / (counts.sum() + size))).sum())
        tokens += int(found.sum())
    return total / tokens


def _count(block: Block, counts: NDArray[np.float64]) -> NDArray[np.float64]:
    batch = make_batch([block])
    found = np.bincount(batch.targets[batch.targets >= 0].numpy()).astype(np.float64)
    size = max(len(found), len(counts))
    return np.pad(counts, (0, size - len(counts))) + np.pad(found, (0, size - len(found)))


def shuffle_prompts(documents: Sequence[Document], block_tokens: int) -> tuple[list[Block], list[Block]]:
    """The same answers behind their own prompts and behind the next document's, one document a block.

    Pairs that do not fit a block are left out of both.
    """
    own, shuffled = [], []
    for document, other in zip(documents, [*documents[1:], *documents[:1]], strict=True):
        start = prompt_length(document)
        answer, prompt = document.tokens[start:], other.tokens[: prompt_length(other)]
        if len(prompt) + len(answer) > block_tokens:
            continue
        supervised = np.concatenate([np.zeros(len(prompt), np.bool_), document.supervised[start:]])
        own.append(_block_of(document.tokens, document.supervised, block_tokens))
        shuffled.append(_block_of(np.concatenate([prompt, answer]), supervised, block_tokens))
    return own, shuffled


def _block_of(tokens: NDArray[np.int32], supervised: NDArray[np.bool_], block_tokens: int) -> Block:
    padding = block_tokens - len(tokens)
    documents = np.zeros(block_tokens, np.int32)
    documents[len(tokens) :] = -1
    return Block(np.pad(tokens, (0, padding)), np.pad(supervised, (0, padding)), documents)


def judge(scores: dict[str, Any]) -> dict[str, Any]:
    """What the scores say, and whether the tuned model is worth keeping."""
    tuned = scores["tuned"]["loss"]
    improved = tuned < scores["base"]["loss"]
    beats_unigram = tuned < scores["unigram"]["loss"]
    shuffled = scores.get("shuffled")
    uses_prompt = shuffled is not None and shuffled["own_loss"] < shuffled["loss"]
    text = (
        f"{'Better' if improved else 'Not better'} than the base model on held-out answers "
        f"({tuned:.3f} against {scores['base']['loss']:.3f} nats a token), "
        f"{'better' if beats_unigram else 'not better'} than guessing by frequency ({scores['unigram']['loss']:.3f}), "
        f"and {'it uses' if uses_prompt else 'nothing shows that it uses'} the question."
    )
    return {"improved": improved, "beats_unigram": beats_unigram, "uses_prompt": uses_prompt, "text": text}


def _with_perplexity(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def _side_by_side(answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"prompt": base["prompt"], "reference": base["reference"], "base": base["answer"], "tuned": tuned["answer"]}
        for base, tuned in zip(answers["base"], answers["tuned"], strict=True)
    ]


def _say_scores(scores: dict[str, Any], verdict: str, say: Say) -> None:
    for name in ("base", "tuned"):
        say(f"evaluate: {name:5} loss {scores[name]['loss']:.4f}  perplexity {scores[name]['perplexity']:.2f}")
    say(f"evaluate: {verdict}")


def _groups(blocks: Sequence[Block] | Iterator[Block], size: int) -> Iterator[list[Block]]:
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
