"""What benchmarks cost before they run: the tokens that a model reads and generates, and the time.

The tokens of a prompt are estimated by its bytes; an answer counts as long as it may get.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, Geometry
from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.questions import BenchmarkQuestion, QuestionSet, read_questions
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import count
from pipeline_lib.plan.evaluation import answers_at_once, pass_s, step_s
from pipeline_lib.plan.machine import End, Machine, Speeds, figure_of
from pipeline_lib.records.plan import Figure

# bytes of UTF-8 for a token: 3 or more of Chinese, and 4 of English
_TOKEN_BYTES = 3
_TEMPLATE_TOKENS = 20  # around a prompt


@dataclass(frozen=True)
class Asking:
    """What a model is asked by one benchmark.

    `read_tokens` are those of all prompts, with each choice where one is chosen; `new_tokens` an
    answer may have, 0 of a choice.
    """

    questions: int
    read_tokens: int
    new_tokens: int

    @property
    def generated_tokens(self) -> int:
        """The most tokens that are generated."""
        return self.questions * self.new_tokens


def askings_of(config: Config) -> tuple[Asking, ...]:
    """Return what each benchmark of `config` asks; those whose files cannot be read are left out.

    They are named where the files are hashed.
    """
    found = []
    for benchmark in config.evaluate.benchmarks:
        try:
            questions = read_questions(Path(benchmark.path), benchmark)
        except DataError:
            continue
        found.append(_asking(benchmark, questions))
    return tuple(found)


def _asking(benchmark: Benchmark, questions: QuestionSet) -> Asking:
    is_choice = benchmark.score == "choice"
    read = 0
    for question in questions.asked:
        read += _read_tokens(questions, question)
    return Asking(len(questions.asked), read, 0 if is_choice else benchmark.max_new_tokens)


def _read_tokens(questions: QuestionSet, question: BenchmarkQuestion) -> int:
    messages = questions.messages_of(question)
    prompt_bytes = sum(len(message["content"].encode()) for message in messages)
    prompt = _TEMPLATE_TOKENS + math.ceil(prompt_bytes / _TOKEN_BYTES)
    if not question.choices:
        return prompt
    longest = max(len(choice.encode()) for choice in question.choices)
    return len(question.choices) * (prompt + math.ceil(longest / _TOKEN_BYTES))


def asking_s(geometry: Geometry, askings: Sequence[Asking], machine: Machine) -> Figure:
    """Return the seconds in which one model answers all of them, without loading it."""
    number_bytes = HALF_BYTES if machine.is_gpu else FP32_BYTES

    def computing_s(speeds: Speeds) -> float:
        total_s = 0.0
        for asking in askings:
            total_s += pass_s(geometry, asking.read_tokens, speeds)
            prompt = math.ceil(asking.read_tokens / asking.questions)
            # fp32 products of two to eight rows take CPUs as long as the rows one by one
            most = 1
            if machine.is_gpu:
                most = answers_at_once(geometry, prompt, asking.new_tokens, number_bytes)
            batches = math.ceil(asking.questions / most)
            rows = asking.questions / batches
            one_s = step_s(geometry, rows, number_bytes, speeds)
            total_s += batches * asking.new_tokens * one_s
        return total_s

    return figure_of({end: computing_s(machine.speeds(end)) for end in End})


def in_words(askings: Sequence[Asking]) -> str:
    """Return what each model is asked: `500 questions, up to 128,000 tokens to generate`."""
    questions = sum(asking.questions for asking in askings)
    generated = sum(asking.generated_tokens for asking in askings)
    return (
        f"each of both models: {count(questions, 'questions')}, up to "
        f"{count(generated, 'tokens')} to generate"
    )
