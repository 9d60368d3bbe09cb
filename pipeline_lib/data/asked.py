"""The benchmarks that a stage reads, each with its questions."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.questions import QUESTIONS_NAME, QuestionSet, read_questions
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.stage import Job


@dataclass(frozen=True)
class Asked:
    """A benchmark with its questions."""

    settings: Benchmark
    questions: QuestionSet


def asked_in(job: Job) -> Iterator[Asked]:
    """Yield the benchmarks of `job`, in the order of the config. Raises DataError."""
    for number, settings in enumerate(job.spec.settings["benchmarks"]):
        path = job.inputs[f"questions.{number}"].file(QUESTIONS_NAME)
        benchmark = read_settings(Benchmark, {**settings, "path": str(path)})
        yield Asked(benchmark, read_questions(path, benchmark))
