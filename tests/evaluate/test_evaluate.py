"""Scores against counts made by hand, and a verdict that is not fooled by chance."""

import math
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.sizes import model_config
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import read_json, read_jsonl, write_json
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.stage import Job, Sealed
from pipeline_lib.core.store import Manifest, Ref, Spec, Store
from pipeline_lib.data import shard
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Document, Samples
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.evaluate.answers import bounded
from pipeline_lib.evaluate.loading import answers_here, device_for, load_to_answer, load_to_score
from pipeline_lib.evaluate.stage import (
    judge,
    run,
    score,
    score_rows,
    scored_and_loaded,
    shuffle_prompts,
    unigram_loss,
)
from pipeline_lib.model.batch import empty_block
from pipeline_lib.model.build import load_base
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.plan.evaluation import CPU_BYTES, Answers, Place, is_loaded_once
from pipeline_lib.records.record import to_json
from pipeline_lib.report.conclusion import not_judged
from pipeline_lib.report.statistics import DocumentLosses
from tests.complete import ledger, source
from tests.data.test_shard import write_samples
from tests.families import FAMILIES, write_family
from tests.locks import hold
from tests.train.conftest import BLOCK_TOKENS, make_documents, write_model


def document(tokens: list[int], supervised_from: int) -> Document:
    return Document(np.array(tokens, np.int32), np.arange(len(tokens)) >= supervised_from)


def test_packed_blocks_score_as_the_documents_do_alone(tmp_path: Path) -> None:
    """Transformers' own loss of each document by itself is the reference."""
    write_model(tmp_path / "model")
    model = load_base(tmp_path / "model", torch.float32)
    bins = make_documents(11, seed=3)
    write_blocks(tmp_path / "blocks", bins, BLOCK_TOKENS, 1)
    (losses,) = score(
        tmp_path / "model",
        [[BlockReader(tmp_path / "blocks")[block] for block in range(11)]],
        print,
    )
    nats: list[float] = []
    tokens: list[int] = []
    alone_each = [document for documents in bins for document in documents]
    for alone in alone_each:
        ids = torch.from_numpy(alone.tokens.astype(np.int64)).unsqueeze(0)
        labels = torch.where(torch.from_numpy(alone.supervised), ids, torch.tensor(-100))
        count = int((labels[:, 1:] >= 0).sum())
        with torch.no_grad():
            nats.append(float(model(ids, labels=labels).loss) * count)
        tokens.append(count)
    assert losses.tokens.tolist() == tokens
    assert losses.nats == pytest.approx(nats, rel=1e-5)
    rows = score_rows(alone_each, losses, losses)
    assert len({row.document for row in rows}) == len(rows) == len(alone_each)


def test_unigram_loss_by_hand(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", [[document([9, 1, 1, 1, 2], 1)]], 8, 1)
    write_blocks(tmp_path / "held", [[document([9, 1, 2], 1)]], 8, 1)
    # Counts of tokens 0, 1, 2 are 0, 3, 1; one is added to each.
    expected = -(math.log(4 / 7) + math.log(2 / 7)) / 2
    found = unigram_loss(BlockReader(tmp_path / "train"), BlockReader(tmp_path / "held"))
    assert found == pytest.approx(expected)


def test_shuffling_keeps_answers_and_changes_prompts() -> None:
    documents = [
        document([1, 2, 10, 11], 2),
        document([3, 20], 1),
        document([4, 5, 6, 30, 31, 32], 3),
    ]
    shuffled, kept = shuffle_prompts(documents, 8)
    assert kept == [0, 1, 2]
    assert [document.tokens.tolist() for block in shuffled for document in documents_of(block)] == [
        [3, 10, 11],
        [4, 5, 6, 20],
        [1, 2, 30, 31, 32],
    ]
    assert [block.tokens[block.supervised].tolist() for block in shuffled] == [
        [10, 11, 20],
        [30, 31, 32],
    ]
    # of which one pair does not fit
    unequal = [document([1, 2, 3, 4, 5, 10], 5), document([6, 20, 21, 22], 1)]
    blocks, kept = shuffle_prompts(unequal, 6)
    assert (len(blocks), kept) == (1, [0])


def losses(mean: float, noise: float, seed: int) -> DocumentLosses:
    random = np.random.default_rng(seed)
    tokens = np.full(200, 10)
    return DocumentLosses(tokens * (mean + noise * random.standard_normal(200)), tokens)


def test_a_gain_counts_and_noise_does_not() -> None:
    for seed in range(5):
        low, high = losses(2.0, 0.5, seed), losses(2.5, 0.5, seed + 100)
        assert low.is_below(high)
        assert not high.is_below(low)
        assert not low.is_below(low)


def test_the_verdict_says_what_the_figures_say() -> None:
    high, low = losses(5.0, 0.1, 0), losses(2.0, 0.1, 1)
    good = judge({"base": high, "tuned": low, "own": low, "shuffled": high}, unigram=4.0)
    assert (good.improved, good.beats_unigram, good.uses_prompt) == (True, True, True)
    bad = judge({"base": low, "tuned": high, "own": high, "shuffled": high}, unigram=4.0)
    assert (bad.improved, bad.beats_unigram, bad.uses_prompt) == (False, False, False)
    assert bad.text.startswith("Not better than the base model")


def test_nothing_supervised_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(DataError, match="nothing supervised was held out"):
        score(tmp_path, [[empty_block(BLOCK_TOKENS)]], print)


def test_few_documents_prove_no_gain_however_large() -> None:
    tokens = np.full(19, 10)
    low, high = DocumentLosses(2.0 * tokens, tokens), DocumentLosses(5.0 * tokens, tokens)
    found = judge({"base": high, "tuned": low, "own": low, "shuffled": high}, unigram=4.0)
    assert (found.improved, found.uses_prompt) == (False, False)
    assert found.text.startswith(
        "Not proven better than the base model on held-out answers (2.000 against 5.000 nats a "
        "token; fewer than 20 "
    )


@pytest.fixture
def base_job(tmp_path: Path, tiny: Path) -> Job:
    """Of the base of two small models, to score and ask."""
    for name in ("model", "merge"):
        shutil.copytree(tiny, tmp_path / name)
    for name in ("train", "validation"):
        write_blocks(tmp_path / "shard" / name, make_documents(4, seed=3), BLOCK_TOKENS, 1)
    inputs = {name: sealed_at(tmp_path / name) for name in ("model", "shard", "tokenize")}
    spec = Spec(
        "evaluate",
        4,
        {"generations": 1, "max_new_tokens": 1, "prompts": ["?"], "context": {"system": "!"}},
    )
    (tmp_path / "baseline").mkdir()
    store, lock = Store(tmp_path / "store"), hold(tmp_path / "lock")
    return Job(spec, store, inputs, tmp_path / "baseline", lambda _: None, lock)


@pytest.fixture
def job(base_job: Job, tmp_path: Path) -> Job:
    """Of the tuned model, beside the base whose evaluation is not made yet."""
    (tmp_path / "out").mkdir()
    inputs = {name: base_job.inputs[name] for name in ("model", "shard")}
    inputs |= {name: sealed_at(tmp_path / name) for name in ("merge", "baseline")}
    return replace(base_job, inputs=inputs, out=tmp_path / "out")


def sealed_at(path: Path) -> Sealed:
    return Sealed(path, Manifest(stage="any", digest="0", spec={}, files={}))


def run_both(base_job: Job, job: Job, **settings: Any) -> dict[str, Any]:
    """Evaluate the base and then the tuned model, with `settings`; what the latter returns."""
    jobs = [
        replace(one, spec=replace(one.spec, settings={**one.spec.settings, **settings}))
        for one in (base_job, job)
    ]
    run(jobs[0])
    return run(jobs[1])


def test_the_base_model_answers_as_its_own_generation_config_says(
    base_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a local model is sealed by itself, beside the model."""
    path = base_job.inputs["model"].path / "generation_config.json"
    path.write_text('{"eos_token_id": "x"}')
    with pytest.raises(DataError, match=rf"{path}: eos_token_id: 'x' is not a token id"):
        run(base_job)
    write_json(tmp_path / "generation" / path.name, {"eos_token_id": 3, "repetition_penalty": 1.5})
    path.unlink()
    asked: list[tuple[object, object]] = []

    def ask(model: PreTrainedModel, *arguments: Any) -> list[dict[str, Any]]:
        found: Any = model.generation_config
        asked.append((found.eos_token_id, found.repetition_penalty))
        return []

    monkeypatch.setattr("pipeline_lib.evaluate.stage.generate_all", ask)
    manifest = Manifest(stage="download", digest="0", spec={}, files={})
    run(
        replace(
            base_job,
            inputs={**base_job.inputs, "generation": Sealed(tmp_path / "generation", manifest)},
        )
    )
    assert asked == [(3, 1.5)]


@pytest.mark.parametrize("has_room", [True, False])
def test_one_model_is_held_at_a_time_and_loaded_once_where_it_has_room(
    base_job: Job, job: Job, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """The plan, the job's memory and the choice of the device count one."""
    held: list[weakref.ref[object]] = []
    streamed: list[Path] = []

    def holding(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(*arguments: Any) -> Any:
            assert [reference for reference in held if reference() is not None] == []
            model = load(*arguments)
            held.append(weakref.ref(model))
            return model

        return loaded

    def stream(folder: Path, *arguments: Any) -> StreamedModel:
        streamed.append(folder)
        return StreamedModel(folder, *arguments)

    monkeypatch.setattr("pipeline_lib.evaluate.stage.load_to_answer", holding(load_to_answer))
    monkeypatch.setattr("pipeline_lib.evaluate.stage.load_to_score", holding(load_to_score))
    monkeypatch.setattr("pipeline_lib.evaluate.stage.StreamedModel", stream)
    if not has_room:  # for the model with what the loss computes; it has for the model alone
        free_bytes = CPU_BYTES * read_geometry(job.inputs["model"].path).parameters
        monkeypatch.setattr("pipeline_lib.evaluate.loading.host_free_bytes", lambda: free_bytes)
    run_both(base_job, job)
    assert len(held) == 2
    assert len(streamed) == (0 if has_room else 2)
    assert [row["prompt"] for row in read_jsonl(job.out / "generations.jsonl")][0] == "?"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_loaded_once_gives_the_bits_of_one_that_is_loaded_twice(
    tmp_path: Path, family: str
) -> None:
    folder = write_family(tmp_path / "model", family, "instruct-2507")
    write_blocks(tmp_path / "blocks", make_documents(4, seed=3), BLOCK_TOKENS, 1)
    blocks = [BlockReader(tmp_path / "blocks")[block] for block in range(4)]
    place = Answers("cpu", 0, 1, 8, 1, 8)
    (parts,) = score(folder, [blocks], print)
    (whole,), model = scored_and_loaded(folder, [blocks], place, print, Spans())
    assert model is not None
    assert whole.nats.tolist() == parts.nats.tolist()
    assert whole.tokens.tolist() == parts.tokens.tolist()
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        found, expected = (
            one(tokens, use_cache=True).logits for one in (model, load_to_answer(folder, place))
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("place", "gpu_gib", "host_gib", "is_once"),
    [
        ("gpu", 24, 4, True),  # 1.2 GB of weights in bf16
        ("gpu", 2, 64, False),  # what is computed at a time takes 2.7 GB
        ("cpu", 0, 8, True),  # 3 GB of weights, 2.8 GB computed at a time
        ("cpu", 0, 4, False),
        ("cpu", 24, 64, False),  # the loss is computed on the GPU, layer by layer
        ("none", 24, 64, False),
    ],
)
def test_a_model_is_loaded_once_where_both_have_room(
    tmp_path: Path, place: Place, gpu_gib: int, host_gib: int, is_once: bool
) -> None:
    write_json(tmp_path / "config.json", model_config("0.6B", None))
    answers = Answers(place, int(place == "gpu"), 1, 8, 1, 8)
    assert (
        is_loaded_once(read_geometry(tmp_path), 4096, answers, gpu_gib * 2**30, host_gib * 2**30)
        == is_once
    )


@pytest.mark.parametrize(
    ("free_gib", "dtype", "device"),
    [(6, torch.bfloat16, "cuda"), (5, torch.bfloat16, "cpu"), (6, torch.float32, "cpu")],
)
def test_a_model_without_room_on_the_gpu_answers_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, dtype: torch.dtype, device: str
) -> None:
    """1.2 GB of weights for 0.6B in bf16, 2.4 GB in fp32, and 4 GiB to work with."""
    write_json(tmp_path / "config.json", model_config("0.6B", None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free_gib * 2**30, 24 * 2**30))
    assert device_for(tmp_path, dtype).type == device


def test_with_little_host_memory_the_model_is_read_more_often_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of 32 fp32 numbers; half the memory holds three groups of blocks of eight."""
    write_model(tmp_path / "model")
    blocks = len(make_documents(32, seed=3))
    write_blocks(tmp_path / "blocks", make_documents(32, seed=3), BLOCK_TOKENS, 1)
    held = [BlockReader(tmp_path / "blocks")[block] for block in range(blocks)]
    monkeypatch.setattr("pipeline_lib.evaluate.stage.BATCH_TOKENS", 4 * BLOCK_TOKENS)
    said: list[str] = []
    (whole,) = score(tmp_path / "model", [held], said.append)
    assert said == []
    monkeypatch.setattr(
        "pipeline_lib.evaluate.stage.host_free_bytes", lambda: 2 * 3 * 4 * BLOCK_TOKENS * 32 * 4
    )
    (parts,) = score(tmp_path / "model", [held], said.append)
    assert said == [
        "evaluate: host memory holds the hidden states of a part of the blocks: 3 passes of the "
        "model"
    ]
    assert parts.nats.tolist() == whole.nats.tolist()


def test_answers_that_have_no_room_are_left_out_and_the_results_say_so(
    base_job: Job, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("pipeline_lib.evaluate.loading.host_free_bytes", lambda: 1000)
    metrics = run_both(base_job, replace(job, say=said.append))
    why = "no answers: there is no GPU, and on CPUs it would take "
    assert metrics["answers"].startswith(why)
    assert said[1].startswith(f"evaluate: {why}")
    assert read_jsonl(job.out / "generations.jsonl") == []
    assert math.isfinite(metrics["eval"]["tuned"]["loss"])


@pytest.mark.parametrize(("free_gib", "gpus"), [(40, 2), (100, 1)])
def test_a_model_larger_than_one_gpu_answers_on_as_many_as_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, gpus: int
) -> None:
    write_json(tmp_path / "config.json", model_config("32B", None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free_gib * 2**30, 80 * 2**30))
    asked: list[dict[str, Any]] = []

    def load(folder: Path, dtype: torch.dtype, rope: Rope | None, **options: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(config=SimpleNamespace(), train=lambda mode: None)

    monkeypatch.setattr("pipeline_lib.evaluate.loading.load_plain", load)
    place = answers_here(tmp_path, Evaluate())
    load_to_answer(tmp_path, place)
    assert (place.place, place.gpus, place.is_bounded) == ("gpu", gpus, False)
    room = (free_gib - 4) * 2**30
    spread = {"device_map": "auto", "max_memory": {0: room, 1: room}}
    assert asked == [spread if gpus == 2 else {"device_map": torch.device("cuda", 0)}]


def test_the_users_own_prompts_are_answered_before_held_out_ones() -> None:
    settings = Evaluate(prompts=("a", "b"), generations=6, max_new_tokens=96)
    for answers, prompts, generations in ((1, ("a",), 0), (3, ("a", "b"), 1), (8, ("a", "b"), 6)):
        found = bounded(settings, Answers("cpu", 0, answers, 20, 8, 96))
        assert (found.prompts, found.generations, found.max_new_tokens) == (
            prompts,
            generations,
            20,
        )


def with_sources(job: Job, tmp_path: Path, **settings: Any) -> Job:
    """The job with the blocks of two sources, tokenized and split as the stages do it."""
    of_sources = [
        [[[first + number % 20, *range(6, 7 + number % 9), 7]] for number in range(count)]
        for first, count in ((10, 70), (30, 50))
    ]
    write_samples(tmp_path / "tokenize", *of_sources)
    write_json(
        tmp_path / "tokenize" / "ledger.json",
        to_json(ledger(source("rows.jsonl"), source("rows.jsonl"))),
    )
    spec = Spec("shard", 2, {"block_tokens": 64, **settings}, {"tokenize": Ref("tokenize", "0")})
    tokenize = Sealed(
        tmp_path / "tokenize", Manifest(stage="tokenize", digest="0", spec={}, files={})
    )
    shutil.rmtree(tmp_path / "shard")
    (tmp_path / "shard").mkdir()
    shard.run(replace(job, spec=spec, inputs={"tokenize": tokenize}, out=tmp_path / "shard"))
    manifest = Manifest(stage="shard", digest="0", spec=spec.to_json(), files={})
    inputs = {**job.inputs, "tokenize": tokenize, "shard": Sealed(tmp_path / "shard", manifest)}
    refs = {"shard": Ref("shard", "0")}
    return replace(job, spec=Spec("evaluate", 4, {"generations": 0}, refs), inputs=inputs)


@pytest.mark.parametrize(
    "settings", [{"validation_fraction": 0.4, "weights": [1.0, 3.0]}, {"validation_fraction": 0.5}]
)
def test_the_loss_of_each_source_is_that_of_its_own_documents(
    base_job: Job, job: Job, tmp_path: Path, settings: dict[str, Any]
) -> None:
    of_sources = with_sources(job, tmp_path, **settings)
    metrics = run_both(base_job, of_sources, generations=0, prompts=[])

    by_source = metrics["eval"]["by_source"]
    assert [one["source"] for one in by_source] == ["rows.jsonl", "rows.jsonl (2)"]
    samples, rows = Samples(tmp_path / "tokenize"), read_jsonl(job.out / "scores.jsonl")
    for number, one in enumerate(by_source):
        first, end = samples.source_offsets[number : number + 2]
        none = DocumentLosses(np.zeros(end - first), np.zeros(end - first, np.int64))
        names = {
            row.document
            for row in score_rows([samples[each] for each in range(first, end)], none, none)
        }
        own = [row for row in rows if row["document"] in names]
        assert (one["samples"], one["supervised_tokens"]) == (
            len(own),
            sum(row["tokens"] for row in own),
        )
        for model in ("base", "tuned"):
            mean = sum(row[model] for row in own) / one["supervised_tokens"]
            assert one[model]["loss"] == pytest.approx(mean)
    assert sum(one["samples"] for one in by_source) == metrics["eval"]["samples"] == len(rows)


def test_documents_that_are_not_those_of_the_tokens_have_no_source(
    job: Job, tmp_path: Path
) -> None:
    changed = with_sources(job, tmp_path, validation_fraction=0.4)
    spec = changed.inputs["shard"].manifest.spec
    spec["settings"]["seed"] = 5
    with pytest.raises(IntegrityError, match="its held-out documents are not those"):
        run(changed)


def test_if_nothing_is_held_out_the_models_answer_the_users_prompts_alone(
    base_job: Job, job: Job, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "shard" / "validation")
    write_blocks(tmp_path / "shard" / "validation", [], BLOCK_TOKENS, 1)

    metrics = run_both(base_job, job, generations=5)

    assert metrics["eval"] == {"samples": 0}
    assert metrics["verdict"] == {"text": not_judged()}
    assert [row["prompt"] for row in read_jsonl(job.out / "generations.jsonl")] == ["?"]
    assert read_jsonl(job.out / "scores.jsonl") == []


def test_the_sealed_evaluation_of_the_base_gives_the_bits_of_one_made_beside_the_tuned_model(
    base_job: Job, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again where nothing compares it: in another precision, with other prompts."""
    loaded: list[Path] = []

    def load(folder: Path, *arguments: Any) -> PreTrainedModel:
        loaded.append(folder)
        return load_to_score(folder, *arguments)

    names = ("metrics.json", "scores.jsonl", "generations.jsonl")
    run_both(base_job, job)
    expected = [(job.out / name).read_bytes() for name in names]
    sealed = read_json(base_job.out / "metrics.json")
    monkeypatch.setattr("pipeline_lib.evaluate.stage.load_to_score", load)
    model, merge = job.inputs["model"].path, job.inputs["merge"].path
    changes: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"max_new_tokens": 7}]
    for change in changes:
        write_json(
            base_job.out / "metrics.json", {"conditions": {**sealed["conditions"], **change}}
        )
        run(job)
        assert [(job.out / name).read_bytes() for name in names] == expected
        assert loaded == ([merge, model] if change else [merge])
        loaded.clear()
