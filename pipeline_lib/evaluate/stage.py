"""The evaluate stage: scores of the base and the tuned model on held-out data, and their answers side by side.

Two baselines show whether the tuned model learned anything: a unigram model of the training answers, and the tuned
model itself with each answer behind another document's prompt.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from pipeline_lib.config.schema import Evaluate, read_settings
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.stage import Job, Say
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block, BlockReader, documents_of
from pipeline_lib.data.documents import Document, prompt_length
from pipeline_lib.evaluate.answers import Context, device_for, generate_all, modes_of
from pipeline_lib.evaluate.statistics import TOO_FEW, Losses
from pipeline_lib.model.batch import IGNORED, make_batch, token_losses
from pipeline_lib.model.build import load_base
from pipeline_lib.model.files import generation_config_of
from pipeline_lib.plan.predict import MAX_SHUFFLED

BATCH_TOKENS = 4096  # of all blocks in one forward pass
SCORES_NAME = "scores.jsonl"


def run(job: Job) -> dict[str, Any]:
    """Score both models on the validation blocks, generate their answers, write the results, and return the metrics."""
    values = dict(job.spec.settings)
    folders = {"base": job.inputs["model"].folder(), "tuned": job.inputs["merge"].folder()}
    context = Context.of(values.pop("context", {}), modes_of(folders["tuned"]))
    settings = read_settings(Evaluate, values)
    shard = job.inputs["shard"].folder()
    held_out, training = BlockReader(shard / "validation"), BlockReader(shard / "train")
    documents = [document for block in range(len(held_out)) for document in documents_of(held_out[block])]
    own, shuffled = shuffle_prompts(documents[:MAX_SHUFFLED], held_out.block_tokens)
    losses, answers = {}, {}
    generation = generation_config_of(job.inputs)
    for name, folder in folders.items():
        model = load_to_answer(folder, job.say)
        if name == "base" and generation:
            model.generation_config = GenerationConfig.from_dict(generation)
        job.say(f"evaluate: {name} model on {len(held_out):,} held-out blocks")
        losses[name] = score(model, (held_out[block] for block in range(len(held_out))))
        if name == "tuned" and shuffled:
            losses["own"], losses["shuffled"] = score(model, own), score(model, shuffled)
        answers[name] = generate_all(model, folders["base"], documents, settings, context)
        del model
        gc.collect()  # the model is in reference cycles, and would still take memory beside the next one
    unigram = unigram_loss(training, held_out)
    metrics: dict[str, Any] = {
        "eval": {
            "base": _scores(losses["base"]),
            "tuned": _scores(losses["tuned"]),
            "unigram": _with_perplexity(unigram),
            "shuffled": _scores(losses["shuffled"]) if shuffled else None,
            "supervised_tokens": losses["tuned"].total_tokens,
            "samples": len(documents),
        },
        "verdict": judge(losses, unigram),
    }
    write_json(job.out / "metrics.json", metrics)
    write_jsonl(job.out / SCORES_NAME, score_rows(documents, losses["base"], losses["tuned"]))
    side_by_side = [
        {"prompt": base["prompt"], "reference": base["reference"], "base": base["answer"], "tuned": tuned["answer"]}
        for base, tuned in zip(answers["base"], answers["tuned"], strict=True)
    ]
    write_jsonl(job.out / "generations.jsonl", side_by_side)
    for name in folders:
        scores: Any = metrics["eval"][name]
        job.say(f"evaluate: {name:5} loss {scores['loss']:.4f}  perplexity {scores['perplexity']:.2f}")
    job.say(f"evaluate: {metrics['verdict']['text']}")
    return metrics


def load_to_answer(folder: Path, say: Say) -> PreTrainedModel:
    """Load the whole model in `folder` for scoring and generation, on the GPU if it fits. Raises DataError."""
    device = device_for(folder)
    if device.type == "cpu" and torch.cuda.is_available():
        say("evaluate: the GPU has no room for the whole model: on the CPUs, which takes hours")
    model = load_base(folder, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.config.use_cache = True
    model.to(device)  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
    model.train(False)
    return model


@torch.no_grad()
def score(model: nn.Module, blocks: Iterable[Block]) -> Losses:
    """Return the losses of `model` for each document of `blocks`, in order.

    Raises DataError if nothing is supervised, and TrainingError if the mean loss is not finite.
    """
    device = next(model.parameters()).device
    nats: list[float] = []
    tokens: list[int] = []
    for group in _groups(blocks):
        batch = make_batch(group)
        nats_of_tokens = token_losses(model, batch.to(device)).double().cpu().numpy()
        is_target = (batch.targets != IGNORED).numpy()
        for block, nats_of_block, targets in zip(group, nats_of_tokens, is_target, strict=True):
            documents = block.documents - PADDING_DOCUMENT  # 0 is the padding, which has no targets
            nats += np.bincount(documents, nats_of_block)[1:].tolist()
            tokens += np.bincount(documents, targets)[1:].astype(np.int64).tolist()
    losses = Losses(np.array(nats, np.float64), np.array(tokens, np.int64))
    if losses.total_tokens == 0:
        raise DataError("evaluate: nothing supervised was held out; raise data.validation_fraction")
    if not math.isfinite(losses.mean):
        raise TrainingError("evaluate: the held-out loss is not finite")
    return losses


def score_rows(documents: Sequence[Document], base: Losses, tuned: Losses) -> list[dict[str, Any]]:
    """Return a row for each document: a hash of its content, which is equal in all runs, and both losses in nats."""
    names = [sha256(each.tokens.tobytes() + each.supervised.tobytes()).hexdigest()[:16] for each in documents]
    columns = zip(names, base.tokens.tolist(), base.nats.tolist(), tuned.nats.tolist(), strict=True)
    return [{"document": name, "tokens": count, "base": old, "tuned": new} for name, count, old, new in columns]


def unigram_loss(training: BlockReader, held_out: BlockReader) -> float:
    """Return the held-out loss in nats per token of a unigram model of the training answers, with add-one smoothing."""
    seen, answers = _answer_counts(training), _answer_counts(held_out)
    size = max(len(seen), len(answers))
    seen = np.pad(seen, (0, size - len(seen)))
    answers = np.pad(answers, (0, size - len(answers)))
    return float(-(answers * np.log((seen + 1) / (seen.sum() + size))).sum() / answers.sum())


def _answer_counts(reader: BlockReader) -> NDArray[np.int64]:
    """Return how often each token is a target, indexed by token id, up to the largest id that occurs."""
    counts: Counter[int] = Counter()
    for block in range(len(reader)):
        targets = make_batch([reader[block]]).targets
        counts.update(targets[targets != IGNORED].tolist())
    return np.array([counts[token] for token in range(max(counts, default=-1) + 1)], np.int64)


def shuffle_prompts(documents: Sequence[Document], block_tokens: int) -> tuple[list[Block], list[Block]]:
    """Return blocks with each answer behind its own prompt, and blocks with it behind the next document's prompt.

    Each block holds one document. Pairs that do not fit into a block are left out of both lists.
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
    documents[len(tokens) :] = PADDING_DOCUMENT
    return Block(np.pad(tokens, (0, padding)), np.pad(supervised, (0, padding)), documents)


def judge(losses: Mapping[str, Losses], unigram: float) -> dict[str, Any]:
    """Return the verdict on the tuned model: against base and unigram, use of the prompt, and a summary text."""
    tuned, base = losses["tuned"], losses["base"]
    improved = tuned.is_below(base)
    known = "Better" if improved else "Not better" if tuned.mean >= base.mean else "Not proven better"
    few = "" if tuned.estimate.has_enough else f"; {TOO_FEW}"
    beats_unigram = tuned.mean < unigram
    uses_prompt = "shuffled" in losses and losses["own"].is_below(losses["shuffled"])
    text = (
        f"{known} than the base model on held-out answers "
        f"({tuned.mean:.3f} against {base.mean:.3f} nats a token{few}), "
        f"{'better' if beats_unigram else 'not better'} than guessing by frequency ({unigram:.3f}), "
        f"and {'it uses' if uses_prompt else 'nothing shows that it uses'} the question."
    )
    return {"improved": improved, "beats_unigram": beats_unigram, "uses_prompt": uses_prompt, "text": text}


def _scores(losses: Losses) -> dict[str, float | None]:
    estimate = losses.estimate
    error = estimate.standard_error if math.isfinite(estimate.standard_error) else None
    return {**_with_perplexity(losses.mean), "standard_error": error, "documents": estimate.documents}


def _with_perplexity(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def _groups(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield `blocks` in lists of at most BATCH_TOKENS tokens, or of one block if it is longer."""
    group: list[Block] = []
    for block in blocks:
        group.append(block)
        if (len(group) + 1) * len(block.tokens) > BATCH_TOKENS:
            yield group
            group = []
    if group:
        yield group
