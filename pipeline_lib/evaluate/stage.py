"""The evaluate stage: the base's and tuned model's held-out scores, and answers side by side.

The base's are an instance of the stage by themselves, which the tuned model's reads.

Two baselines show whether the tuned model learned anything: a unigram model of the training
answers, and the tuned model itself with each answer behind another document's prompt.
"""

import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.generation_config import generation_config_of
from pipeline_lib.arch.geometry import HALF_BYTES
from pipeline_lib.arch.weight_files import weights_bytes
from pipeline_lib.config.content import WEIGHTS_SUFFIXES
from pipeline_lib.config.rope import Rope, rope_in, without_rope
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.stages import LAST_MERGE
from pipeline_lib.core.errors import DataError, IntegrityError, TrainingError
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.language import N_
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.stage import Job, Say
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block, BlockReader, documents_of
from pipeline_lib.data.documents import ARRAYS, Document, Samples, prompt_length
from pipeline_lib.data.how_to_call import Mode, modes_in
from pipeline_lib.data.packing import Split
from pipeline_lib.evaluate.answers import Context, bounded, generate_all, modes_of
from pipeline_lib.evaluate.loading import (
    answers_here,
    is_loaded_once_here,
    load_to_answer,
    load_to_score,
)
from pipeline_lib.model.batch import IGNORED, Batch, make_batch, token_losses
from pipeline_lib.model.build import prepare_to_generate
from pipeline_lib.model.gpu import device_with
from pipeline_lib.model.offload import page_lock, page_unlock
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.plan.evaluation import (
    BATCH_TOKENS,
    MAX_SHUFFLED,
    Answers,
    scoring_bytes,
    waiting_tokens,
)
from pipeline_lib.records.data import LEDGER_NAME, Ledger
from pipeline_lib.records.evaluation import (
    EVALUATION_NAME,
    GENERATIONS_NAME,
    SCORES_NAME,
    BaseAnswer,
    BaseEvaluation,
    BaseScore,
    Conditions,
    DocumentScore,
    Evaluation,
    EvaluationVerdict,
    Generation,
    NoScores,
    NoVerdict,
    Score,
    Scores,
    SourceScore,
    UnigramScore,
)
from pipeline_lib.records.record import read_record, read_records, to_json
from pipeline_lib.report.conclusion import conclusion_of, mean_against_last, not_judged
from pipeline_lib.report.statistics import DocumentLosses


def run(job: Job) -> dict[str, Any]:
    """Evaluate the base model or, after a merge, the tuned model beside it; return the metrics.

    A model is scored on the validation blocks, and answers prompts. If nothing is held out, it only
    answers the prompts of the settings. The base's evaluation depends on no training, and is an
    instance of its own that a sweep shares.
    """
    return _run_tuned(job) if "merge" in job.inputs else _run_base(job)


@dataclass(frozen=True)
class Exam:
    """What both models are evaluated on; `texts` has the tokenizer and the chat template."""

    settings: Evaluate
    context: Context
    blocks: list[Block]
    documents: list[Document]
    texts: Path

    @staticmethod
    def of(job: Job, modes: Sequence[Mode]) -> "Exam":
        """Return that of the job, whose training has those thinking modes."""
        values = without_rope(job.spec.settings)
        context = Context.of(values.pop("context", {}), modes)
        settings = read_settings(Evaluate, values)
        held_out = BlockReader(job.inputs["shard"].folder() / "validation")
        blocks = [held_out[block] for block in range(len(held_out))]
        documents = [document for block in blocks for document in documents_of(block)]
        if not documents:
            settings = settings.model_copy(update={"generations": 0})
        model = job.inputs["model"]
        names = [name for name in model.manifest.files if not name.endswith(WEIGHTS_SUFFIXES)]
        texts = model.folder(*names) if names else model.path
        return Exam(settings, context, blocks, documents, texts)


@dataclass(frozen=True)
class Evaluated:
    """What a model came to: its losses for each set of blocks, and its answers.

    `conditions` are those under which other models have to be evaluated to be compared with it.
    """

    losses: list[DocumentLosses]
    answers: list[BaseAnswer]
    place: Answers
    conditions: Conditions


def evaluated(
    folder: Path,
    sets: Sequence[Sequence[Block]],
    exam: Exam,
    say: Say,
    spans: Spans,
    rope: Rope | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> Evaluated:
    """Evaluate the model in `folder`, with `rope` and `generation` if its files lack them.

    Raises as `score` does, and DataError if the model cannot be loaded or its generation config
    cannot be used.
    """
    place = answers_here(folder, exam.settings)
    if place.is_bounded:
        say(f"evaluate: {place}")
    asked = bounded(exam.settings, place)
    precision = precision_here(folder, sets) if sets else None
    losses, model = scored_and_loaded(folder, sets, place, say, spans, rope)
    answers: list[BaseAnswer] = []
    if model is not None:
        spans.begin(N_("answer"))
        if generation:
            model.generation_config = GenerationConfig.from_dict(dict(generation))
        answers = generate_all(model, exam.texts, exam.documents, asked, exam.context, say)
    del model
    # the model is in reference cycles, and would still take memory beside the next one
    gc.collect()
    conditions = Conditions(
        precision=precision,
        prompts=len(asked.prompts),
        generations=asked.generations,
        max_new_tokens=asked.max_new_tokens,
    )
    return Evaluated(losses, answers, place, conditions)


def _run_base(job: Job) -> dict[str, Any]:
    """Evaluate the base model by itself."""
    exam = Exam.of(job, modes_in(job.inputs["tokenize"].manifest))
    found = _evaluated_base(job, exam)
    rows: list[BaseScore] = []
    if found.losses:
        job.say(_loss_line("base", _score_of(found.losses[0])))
        losses = found.losses[0]
        pairs = zip(losses.nats.tolist(), losses.tokens.tolist(), strict=True)
        rows = [BaseScore(nats=nats, tokens=tokens) for nats, tokens in pairs]
    evaluation = BaseEvaluation(conditions=found.conditions, answers=_bound(found.place))
    return _leave(job, evaluation, rows, found.answers)


def _bound(place: Answers) -> str | None:
    """Return why fewer or shorter answers were generated than asked for; None if all were."""
    return str(place) if place.is_bounded else None


def _leave(
    job: Job,
    evaluation: Evaluation | BaseEvaluation,
    scores: Sequence[DocumentScore | BaseScore],
    answers: Sequence[Generation | BaseAnswer],
) -> dict[str, Any]:
    """Write the three files of the stage; return the content of metrics.json."""
    metrics: dict[str, Any] = to_json(evaluation)
    write_json(job.out / EVALUATION_NAME, metrics)
    write_jsonl(job.out / SCORES_NAME, to_json(scores))
    write_jsonl(job.out / GENERATIONS_NAME, to_json(answers))
    return metrics


def _evaluated_base(job: Job, exam: Exam) -> Evaluated:
    """Evaluate the base model of the job, with its own generation config."""
    sets = [exam.blocks] if exam.blocks else []
    if sets:
        job.say(f"evaluate: base model on {len(exam.blocks):,} held-out blocks")
    folder = job.inputs["model"].folder()
    rope = rope_in(job.spec.settings)
    return evaluated(folder, sets, exam, job.say, job.spans, rope, generation_config_of(job.inputs))


def _sealed_base(job: Job, tuned: Evaluated) -> Evaluated | None:
    """Return the base model's sealed evaluation; None if its conditions were not `tuned`'s."""
    sealed = job.inputs["baseline"]
    conditions = read_record(BaseEvaluation, sealed.file(EVALUATION_NAME)).conditions
    if conditions != tuned.conditions:
        return None
    rows = read_records(BaseScore, sealed.file(SCORES_NAME))
    nats = np.array([row.nats for row in rows], np.float64)
    losses = DocumentLosses(nats, np.array([row.tokens for row in rows], np.int64))
    answers = read_records(BaseAnswer, sealed.file(GENERATIONS_NAME))
    return Evaluated([losses] if rows else [], answers, tuned.place, conditions)


def _run_tuned(job: Job) -> dict[str, Any]:
    """Evaluate the tuned model, and compare it with the base model."""
    folder = job.inputs["merge"].folder()
    exam = Exam.of(job, modes_of(folder))
    sources = sources_of(job, exam.documents)
    sets: list[list[Block]] = []
    shuffled = list[Block]()
    kept = list[int]()
    if exam.blocks:
        shuffled, kept = shuffle_prompts(exam.documents[:MAX_SHUFFLED], _longest([exam.blocks]))
        sets = [exam.blocks, shuffled]
        job.say(f"evaluate: tuned model on {len(exam.blocks):,} held-out blocks")
    tuned = evaluated(folder, sets, exam, job.say, job.spans)
    base = _sealed_base(job, tuned)
    if base is None:
        job.say(
            "evaluate: the base model was evaluated in another precision or with other prompts, so "
            "again here"
        )
        base = _evaluated_base(job, exam)
    scores: Scores | NoScores = NoScores(samples=0)
    verdict: EvaluationVerdict | NoVerdict = NoVerdict(text=not_judged())
    rows: list[DocumentScore] = []
    if exam.documents:
        losses = {"base": base.losses[0], "tuned": tuned.losses[0]}
        if shuffled:
            losses |= {"own": tuned.losses[0].of_documents(kept), "shuffled": tuned.losses[1]}
        shard = job.inputs["shard"].path
        unigram = unigram_loss(BlockReader(shard / "train"), BlockReader(shard / "validation"))
        by_source = scores_by_source(sources, losses["base"], losses["tuned"])
        scores = _scores(losses, unigram, len(exam.documents), by_source)
        verdict = judge(losses, unigram)
        if LAST_MERGE in job.inputs:
            last = _score_last(job, exam.blocks)
            scores = replace(scores, last=_score_of(last))
            verdict = _with_last(verdict, tuned.losses[0], last)
        rows = score_rows(exam.documents, losses["base"], losses["tuned"])
        job.say(_loss_line("base", scores.base))
        job.say(_loss_line("tuned", scores.tuned))
    job.say(f"evaluate: {verdict.text}")
    side_by_side = []
    for of_base, of_tuned in zip(base.answers, tuned.answers, strict=True):
        generation = Generation(
            prompt=of_base.prompt,
            reference=of_base.reference,
            base=of_base.answer,
            tuned=of_tuned.answer,
        )
        side_by_side.append(generation)
    evaluation = Evaluation(eval=scores, verdict=verdict, answers=_bound(tuned.place))
    return _leave(job, evaluation, rows, side_by_side)


def _score_last(job: Job, blocks: Sequence[Block]) -> DocumentLosses:
    """Return the held-out losses of the last checkpoint, beside the mean of several."""
    job.say("evaluate: the last checkpoint on the same blocks")
    folder = job.inputs[LAST_MERGE].folder()
    job.spans.begin(N_("score last"), weights_bytes(folder))
    (losses,) = score(folder, [blocks], job.say)
    job.say(_loss_line("last", _score_of(losses)))
    return losses


def _with_last(
    verdict: EvaluationVerdict, mean: DocumentLosses, last: DocumentLosses
) -> EvaluationVerdict:
    """Return `verdict` with which of the mean of several checkpoints and the last one is better."""
    is_told_apart = mean.is_below(last) or last.is_below(mean)
    words = mean_against_last(mean.mean, last.mean, is_told_apart)
    return replace(verdict, text=f"{verdict.text} {words}", is_mean_told_apart=is_told_apart)


def _loss_line(name: str, score: Score) -> str:
    return f"evaluate: {name:5} loss {score.loss:.4f}  perplexity {score.perplexity:.2f}"


def sources_of(job: Job, documents: Sequence[Document]) -> dict[str, list[int]]:
    """Return the numbers of each source's held-out `documents`, by its name in the ledger.

    Empty unless the job reads the tokenize stage, as it does if samples of several sources are held
    out. Blocks do not record sources, so the order of the documents is computed again as the shard
    stage computed it. Raises IntegrityError if the documents have other lengths than those that it
    gives.
    """
    if "tokenize" not in job.inputs:
        return {}
    tokenize = job.inputs["tokenize"]
    shard = job.inputs["shard"].manifest
    samples = Samples(tokenize.folder(*(f"{name}.npy" for name in ARRAYS)))
    split = Split.of(shard.spec["settings"], {})
    order = split.held_out_order(samples)
    lengths = [len(document.tokens) for document in documents]
    if np.diff(samples.offsets)[order].tolist() != lengths:
        raise IntegrityError(
            f"{job.store.sealed(job.spec.inputs['shard'])}: its held-out documents are not those "
            "that the tokens give "
            "with its settings, so their sources are not known; this is a bug, report it"
        )
    ledgers = read_record(Ledger, tokenize.file(LEDGER_NAME)).sources
    # [documents], each one's source
    number_of = np.searchsorted(samples.source_offsets, order, side="right") - 1
    first = len(ledgers) - split.validation_sources if split.validation_sources else 0
    names = distinct([ledger.name for ledger in ledgers])
    return {
        names[number]: np.flatnonzero(number_of == number).tolist()
        for number in range(first, len(ledgers))
    }


def distinct(names: Sequence[str]) -> list[str]:
    """Return `names`, with a number behind those that are there already."""
    seen = Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def scores_by_source(
    sources: Mapping[str, list[int]], base: DocumentLosses, tuned: DocumentLosses
) -> list[SourceScore]:
    """Return both models' scores on each source's documents; none without supervised tokens."""
    found = []
    for name, numbers in sources.items():
        tokens = tuned.of_documents(numbers).total_tokens
        row = SourceScore(source=name, samples=len(numbers), supervised_tokens=tokens)
        if tokens:
            row = replace(
                row,
                base=_score_of(base.of_documents(numbers)),
                tuned=_score_of(tuned.of_documents(numbers)),
            )
        found.append(row)
    return found


def _scores(
    losses: Mapping[str, DocumentLosses],
    unigram: float,
    samples: int,
    by_source: Sequence[SourceScore],
) -> Scores:
    return Scores(
        base=_score_of(losses["base"]),
        tuned=_score_of(losses["tuned"]),
        unigram=UnigramScore(loss=unigram, perplexity=_perplexity(unigram)),
        shuffled=_score_of(losses["shuffled"]) if "shuffled" in losses else None,
        supervised_tokens=losses["tuned"].total_tokens,
        samples=samples,
        by_source=tuple(by_source),
    )


def precision_here(folder: Path, sets: Sequence[Sequence[Block]]) -> Literal["bf16", "fp32"]:
    """Return the precision in which this machine computes the losses of the model in `folder`."""
    return "bf16" if device_to_score(folder, _longest(sets)).type == "cuda" else "fp32"


def scored_and_loaded(
    folder: Path,
    sets: Sequence[Sequence[Block]],
    place: Answers,
    say: Say,
    spans: Spans,
    rope: Rope | None = None,
) -> tuple[list[DocumentLosses], PreTrainedModel | None]:
    """Return the losses as `score` does, and the model to answer at `place`, or None.

    Without `sets` there are no losses. The model is loaded once for both if it has room there; the
    losses have the same bits.
    """
    if sets and is_loaded_once_here(folder, place, _longest(sets)):
        spans.begin(N_("load"), weights_bytes(folder))
        model = load_to_score(folder, place, rope)
        spans.begin(N_("score"))
        losses = score_whole(model, sets)
        prepare_to_generate(model)
        return losses, model
    losses = []
    if sets:
        spans.begin(N_("score"), weights_bytes(folder))
        losses = score(folder, sets, say, rope)
    if not place.answers:
        return losses, None
    spans.begin(N_("load"), weights_bytes(folder))
    return losses, load_to_answer(folder, place, rope)


def score_whole(model: PreTrainedModel, sets: Sequence[Sequence[Block]]) -> list[DocumentLosses]:
    """Return what `score` does, of a model of `load_base`."""
    return [
        _losses_of(groups, [_losses_in(model, group) for group in groups])
        for groups in _grouped(sets)
    ]


@torch.no_grad()
def _losses_in(model: PreTrainedModel, group: Sequence[Block]) -> Tensor:
    """Return the losses [B, T] of the tokens of `group`, on the CPU."""
    return token_losses(model, make_batch(group).to(model.device)).cpu()


def _grouped(sets: Sequence[Sequence[Block]]) -> list[list[list[Block]]]:
    return [list(_groups(blocks)) for blocks in sets]


def _longest(sets: Sequence[Sequence[Block]]) -> int:
    """Return the number of tokens of the longest block."""
    return max(len(blocks[0].tokens) for blocks in sets if blocks)


def score(
    folder: Path, sets: Sequence[Sequence[Block]], say: Say, rope: Rope | None = None
) -> list[DocumentLosses]:
    """Return the losses of the model in `folder`, with `rope`, by document and set, in order.

    The model is read layer by layer, once for all sets, or more often if the host has no memory for
    the hidden states of all tokens. Raises DataError if nothing is supervised, and TrainingError if
    the mean loss is not finite.
    """
    device = device_to_score(folder, _longest(sets))
    if device.type == "cpu" and torch.cuda.is_available():
        say(
            "evaluate: the GPU has no room for two layers of the model: on the CPUs, which takes "
            "hours"
        )
    model = StreamedModel(
        folder, torch.bfloat16 if device.type == "cuda" else torch.float32, device, rope
    )
    groups = _grouped(sets)
    batches = [make_batch(group) for group in chain.from_iterable(groups)]
    passes = _passes(
        batches, waiting_tokens(read_geometry(folder), model.dtype.itemsize, host_free_bytes())
    )
    if len(passes) > 1:
        say(
            f"evaluate: host memory holds the hidden states of a part of the blocks: {len(passes)} "
            "passes of the model"
        )
    with _waiting_room(model, max(map(_tokens_of, passes))) as waiting:
        found = iter([nats for batches in passes for nats in model.token_losses(batches, waiting)])
    return [_losses_of(blocks, [next(found) for _ in blocks]) for blocks in groups]


def device_to_score(folder: Path, block_tokens: int) -> torch.device:
    """Return the GPU if it has enough free memory to score blocks of that length, else the CPU."""
    return device_with(scoring_bytes(read_geometry(folder), block_tokens, HALF_BYTES))


def _passes(batches: Sequence[Batch], most_tokens: int) -> list[list[Batch]]:
    """Divide `batches` into passes of at most `most_tokens` tokens, or of one larger batch."""
    passes: list[list[Batch]] = []
    for batch in batches:
        if not passes or _tokens_of([*passes[-1], batch]) > most_tokens:
            passes.append([])
        passes[-1].append(batch)
    return passes


def _tokens_of(batches: Sequence[Batch]) -> int:
    return sum(batch.tokens.numel() for batch in batches)


@contextmanager
def _waiting_room(model: StreamedModel, tokens: int) -> Iterator[Tensor]:
    """Yield host memory for the tokens' hidden states, page-locked for a GPU if possible."""
    room = model.waiting_room(tokens)
    is_locked = False
    if model.device.type == "cuda":
        with suppress(RuntimeError):  # copies then take longer
            page_lock(room)
            is_locked = True
    try:
        yield room
    finally:
        if is_locked:
            page_unlock(room)


def _losses_of(groups: Sequence[Sequence[Block]], nats: Sequence[Tensor]) -> DocumentLosses:
    """Return the losses of each document in `groups`; `nats` [B, T] are their tokens' losses."""
    sums: list[float] = []
    tokens: list[int] = []
    for group, nats_of_tokens in zip(groups, nats, strict=True):
        is_target = (make_batch(group).targets != IGNORED).numpy()
        for block, nats_of_block, targets in zip(
            group, nats_of_tokens.double().numpy(), is_target, strict=True
        ):
            documents = block.documents - PADDING_DOCUMENT  # 0 is the padding, which has no targets
            sums += np.bincount(documents, nats_of_block)[1:].tolist()
            tokens += np.bincount(documents, targets)[1:].astype(np.int64).tolist()
    losses = DocumentLosses(np.array(sums, np.float64), np.array(tokens, np.int64))
    if groups and losses.total_tokens == 0:
        raise DataError("evaluate: nothing supervised was held out; raise data.validation_fraction")
    if groups and not math.isfinite(losses.mean):
        raise TrainingError("evaluate: the held-out loss is not finite")
    return losses


def score_rows(
    documents: Sequence[Document], base: DocumentLosses, tuned: DocumentLosses
) -> list[DocumentScore]:
    """Return a row per document: its content's hash, equal in all runs, and its losses in nats."""
    names = [
        sha256(each.tokens.tobytes() + each.supervised.tobytes()).hexdigest()[:16]
        for each in documents
    ]
    columns = zip(names, base.tokens.tolist(), base.nats.tolist(), tuned.nats.tolist(), strict=True)
    return [
        DocumentScore(document=name, tokens=count, base=old, tuned=new)
        for name, count, old, new in columns
    ]


def unigram_loss(training: BlockReader, held_out: BlockReader) -> float:
    """Return the held-out loss, in nats per token, of a unigram model of training answers.

    The model has add-one smoothing.
    """
    seen = _answer_counts(training)
    answers = _answer_counts(held_out)
    size = max(len(seen), len(answers))
    seen = np.pad(seen, (0, size - len(seen)))
    answers = np.pad(answers, (0, size - len(answers)))
    return float(-(answers * np.log((seen + 1) / (seen.sum() + size))).sum() / answers.sum())


def _answer_counts(reader: BlockReader) -> NDArray[np.int64]:
    """Return how often each token is a target, by token id up to the largest that occurs."""
    counts: Counter[int] = Counter()
    for block in range(len(reader)):
        targets = make_batch([reader[block]]).targets
        counts.update(targets[targets != IGNORED].tolist())
    return np.array([counts[token] for token in range(max(counts, default=-1) + 1)], np.int64)


def shuffle_prompts(
    documents: Sequence[Document], block_tokens: int
) -> tuple[list[Block], list[int]]:
    """Return blocks with each answer behind the next prompt, and their documents' numbers.

    The prompt is that of the next document. Answers that do not fit into a block behind that prompt
    are left out.
    """
    pairs, kept = [], []
    for number, (document, other) in enumerate(
        zip(documents, [*documents[1:], *documents[:1]], strict=True)
    ):
        start = prompt_length(document)
        answer = document.tokens[start:]
        prompt = other.tokens[: prompt_length(other)]
        if len(prompt) + len(answer) > block_tokens:
            continue
        supervised = np.concatenate([np.zeros(len(prompt), np.bool_), document.supervised[start:]])
        pairs.append(Document(np.concatenate([prompt, answer]), supervised))
        kept.append(number)
    return list(_packed(pairs, block_tokens)), kept


def _packed(documents: Iterable[Document], block_tokens: int) -> Iterator[Block]:
    """Yield blocks with `documents` in their order, each as full as the next document allows."""
    waiting: list[Document] = []
    for document in documents:
        if sum(len(each.tokens) for each in waiting) + len(document.tokens) > block_tokens:
            yield _block_of(waiting, block_tokens)
            waiting = []
        waiting.append(document)
    if waiting:
        yield _block_of(waiting, block_tokens)


def _block_of(documents: Sequence[Document], block_tokens: int) -> Block:
    lengths = [len(document.tokens) for document in documents]
    padding = block_tokens - sum(lengths)
    numbers = np.repeat(np.arange(len(documents), dtype=np.int32), lengths)
    return Block(
        np.pad(np.concatenate([document.tokens for document in documents]), (0, padding)),
        np.pad(np.concatenate([document.supervised for document in documents]), (0, padding)),
        np.pad(numbers, (0, padding), constant_values=PADDING_DOCUMENT),
    )


def judge(losses: Mapping[str, DocumentLosses], unigram: float) -> EvaluationVerdict:
    """Return the verdict on the tuned model: against base and unigram, prompt use, a summary."""
    tuned = losses["tuned"]
    base = losses["base"]
    improved = tuned.is_below(base)
    beats_unigram = tuned.mean < unigram
    uses_prompt = "shuffled" in losses and losses["own"].is_below(losses["shuffled"])
    text = conclusion_of(
        tuned=tuned.mean,
        base=base.mean,
        unigram=unigram,
        has_enough=tuned.estimate.has_enough,
        improved=improved,
        beats_unigram=beats_unigram,
        uses_prompt=uses_prompt,
    )
    return EvaluationVerdict(
        improved=improved, beats_unigram=beats_unigram, uses_prompt=uses_prompt, text=text
    )


def _score_of(losses: DocumentLosses) -> Score:
    estimate = losses.estimate
    return Score(
        loss=losses.mean,
        perplexity=_perplexity(losses.mean),
        standard_error=estimate.standard_error if math.isfinite(estimate.standard_error) else None,
        documents=estimate.documents,
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


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
