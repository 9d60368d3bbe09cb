"""The benchmark stage: the base's and the tuned model's answers to questions with known answers.

The base's are an instance of the stage by themselves, which every experiment on that base with the
same questions shares.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.generation_config import generation_config_of
from pipeline_lib.arch.weight_files import weights_bytes
from pipeline_lib.config.questions import (
    BenchmarkQuestion,
    QuestionSet,
)
from pipeline_lib.config.rope import Rope, rope_in
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.language import N_
from pipeline_lib.core.stage import Job, Say
from pipeline_lib.core.text import Progress
from pipeline_lib.core.units import count, percent
from pipeline_lib.data.asked import Asked, asked_in
from pipeline_lib.data.chat_template import has_template
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.evaluate.answers import Context, render, stops_of, tokens_of_answers
from pipeline_lib.evaluate.loading import answers_here, load_to_answer
from pipeline_lib.evaluate.scoring import faults_of, is_right
from pipeline_lib.records.benchmark import (
    ANSWERS_NAME,
    BENCHMARK_NAME,
    BaseBenchmarks,
    BenchmarkAnswer,
    Benchmarks,
    Fault,
)
from pipeline_lib.records.record import read_record, read_records, to_json
from pipeline_lib.report.paired import compared, score_of

Precision = Literal["bf16", "fp32"]
Answered = dict[str, list[BenchmarkAnswer]]  # by benchmark, in the order of its questions


def run(job: Job) -> dict[str, Any]:
    """Ask the base model or, after a merge, the tuned model; return the scores.

    Raises DataError if the model has no room here, or cannot be loaded.
    """
    return _run_tuned(job) if "merge" in job.inputs else _run_base(job)


def _run_base(job: Job) -> dict[str, Any]:
    answers, precision = _ask_base(job)
    scores = {name: score_of(own) for name, own in answers.items()}
    return _leave(job, BaseBenchmarks(precision=precision, scores=scores), answers)


def _run_tuned(job: Job) -> dict[str, Any]:
    folder = job.inputs["merge"].folder()
    tuned, precision = _ask(job, folder, "tuned")
    sealed = job.inputs["base_benchmark"]
    base = _by_benchmark(read_records(BenchmarkAnswer, sealed.file(ANSWERS_NAME)))
    if read_record(BaseBenchmarks, sealed.file(BENCHMARK_NAME)).precision != precision:
        job.say(f"benchmark: the base model did not answer in {precision}, so again here")
        base, _ = _ask_base(job)
    found = {name: compared(base[name], tuned[name]) for name in tuned}
    return _leave(job, Benchmarks(precision=precision, compared=found), tuned)


def _by_benchmark(answers: Sequence[BenchmarkAnswer]) -> Answered:
    found: Answered = {}
    for answer in answers:
        found.setdefault(answer.benchmark, []).append(answer)
    return found


def _leave(job: Job, scores: BaseBenchmarks | Benchmarks, answers: Answered) -> dict[str, Any]:
    """Write both files of the stage; return the content of benchmark.json."""
    metrics: dict[str, Any] = to_json(scores)
    write_json(job.out / BENCHMARK_NAME, metrics)
    write_jsonl(job.out / ANSWERS_NAME, [to_json(one) for own in answers.values() for one in own])
    return metrics


def _ask_base(job: Job) -> tuple[Answered, Precision]:
    folder = job.inputs["model"].folder()
    rope = rope_in(job.spec.settings)
    return _ask(job, folder, "base", rope, generation_config_of(job.inputs))


def _ask(
    job: Job,
    folder: Path,
    name: str,
    rope: Rope | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Answered, Precision]:
    """Return the answers of the model in `folder` to all benchmarks, and its precision here.

    `rope` and `generation` are what its files lack.
    """
    benchmarks = list(asked_in(job))
    context = job.spec.settings.get("context", {})
    total = sum(len(asked.questions.asked) for asked in benchmarks)
    model = _load(folder, benchmarks, rope, job)
    if generation:
        model.generation_config = GenerationConfig.from_dict(dict(generation))
    precision: Precision = "bf16" if model.dtype == torch.bfloat16 else "fp32"
    respondent = Respondent(model, folder, load_tokenizer(folder), job.say)
    job.spans.begin(N_("answer"))
    job.say(f"benchmark: {count(total, 'questions')} to the {name} model, in {precision}")
    answers: Answered = {}
    for asked in benchmarks:
        own = replace(Context.of(context), thinking=asked.settings.thinking)
        answers[asked.settings.name] = respondent.answers(asked, own)
        score = score_of(answers[asked.settings.name])
        job.say(
            f"benchmark: {asked.settings.name}: {name} {score.right:,} of {score.questions:,} right "
            f"({percent(score.fraction)})"
        )
    del respondent, model
    gc.collect()  # it is in reference cycles, and would still take memory beside the next one
    return answers, precision


def _load(
    folder: Path, benchmarks: Sequence[Asked], rope: Rope | None, job: Job
) -> PreTrainedModel:
    """Return the model in `folder`, where it has room. Raises DataError if it has none."""
    longest = max(asked.settings.max_new_tokens for asked in benchmarks)
    place = answers_here(folder, Evaluate(generations=1, max_new_tokens=longest))
    if not place.answers:
        raise DataError(f"benchmark: {place.why}; take a machine with more memory")
    job.spans.begin(N_("load"), weights_bytes(folder))
    return load_to_answer(folder, place, rope)


@dataclass(frozen=True)
class Respondent:
    """A model that answers, with the tokenizer and the chat template of its folder."""

    model: PreTrainedModel
    folder: Path
    tokenizer: Tokenizer
    say: Say

    def answers(self, asked: Asked, context: Context) -> list[BenchmarkAnswer]:
        """Return the model's answers to the questions of a benchmark, in their order."""
        prompts = self._prompts(asked.questions, context)
        if asked.settings.score == "choice":
            return self._chosen(asked, prompts)
        encoded = [self._encode(prompt) for prompt in prompts]
        answered = tokens_of_answers(
            self.model,
            encoded,
            asked.settings.max_new_tokens,
            read_geometry(self.folder),
            self._progress(),
        )
        stops = stops_of(self.model)
        found = []
        for question, prompt, tokens in zip(asked.questions.asked, prompts, answered, strict=True):
            is_ended = bool(tokens) and tokens[-1] in stops
            said = str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
            was_right = is_right(said, question.right, asked.settings.score)
            faults = faults_of(prompt, said, tokens, is_ended)
            found.append(_answer(asked, question, said, was_right, faults))
        return found

    def _prompts(self, questions: QuestionSet, context: Context) -> list[str]:
        """Return the rendered prompts; without a chat template, what the user asks last."""
        if not has_template(self.folder):
            return [questions.text_of(question) for question in questions.asked]
        conversations = [questions.messages_of(question) for question in questions.asked]
        return render(self.folder, conversations, context)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _chosen(self, asked: Asked, prompts: Sequence[str]) -> list[BenchmarkAnswer]:
        """Return the choice that the model finds most probable by byte, for each question."""
        progress = self._progress()
        found: list[BenchmarkAnswer] = []
        for question, prompt in zip(asked.questions.asked, prompts, strict=True):
            encoded = [self._encode(choice) for choice in question.choices]
            nats = choice_nats(self.model, self._encode(prompt), encoded)
            by_byte = [
                own / len(choice.encode())
                for own, choice in zip(nats, question.choices, strict=True)
            ]
            answer = question.choices[by_byte.index(min(by_byte))]
            found.append(_answer(asked, question, answer, answer in question.right))
            progress.update(len(found), len(found) / len(prompts))
        return found

    def _progress(self) -> Progress:
        return Progress(self.say, "benchmark", "questions")


def _answer(
    asked: Asked,
    question: BenchmarkQuestion,
    answer: str,
    was_right: bool,
    faults: tuple[Fault, ...] = (),
) -> BenchmarkAnswer:
    return BenchmarkAnswer(
        benchmark=asked.settings.name,
        question=question.key,
        prompt=question.text,
        right=question.right,
        answer=answer,
        is_right=was_right,
        faults=faults,
    )


@torch.no_grad()
def choice_nats(
    model: PreTrainedModel, prompt: Sequence[int], choices: Sequence[Sequence[int]]
) -> list[float]:
    """Return -log p of each of `choices` after `prompt`, summed over its tokens, in nats."""
    longest = max(map(len, choices))
    rows = []
    masks = []
    for choice in choices:
        missing = longest - len(choice)  # in front, so that all choices end in the last column
        rows.append([prompt[0]] * missing + [*prompt, *choice])
        masks.append([0] * missing + [1] * (len(prompt) + len(choice)))
    device = model.device
    mask = torch.tensor(masks, device=device)
    tokens = torch.tensor(rows, device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        logits_to_keep=longest + 1,
        use_cache=False,
    )
    log_probabilities = output.logits[:, :-1].float().log_softmax(-1)
    of_tokens = log_probabilities.gather(-1, tokens[:, -longest:, None]).squeeze(-1)
    nats = []
    for row, choice in zip(of_tokens.cpu(), choices, strict=True):
        nats.append(-float(row[longest - len(choice) :].sum()))
    return nats
