"""The benchmarks of a config: files of questions that both models answer, and what may ship."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from pipeline_lib.config.section import Fraction, LocalPath, Positive, Section, Seed, Tokens

Scoring = Literal["exact", "contains", "number", "choice"]
Difference = Annotated[FiniteFloat, Field(ge=-1.0, le=1.0)]


class Benchmark(Section):
    """Questions with known answers, in a file on this machine."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = Field(
        description="name of the benchmark: letters, digits, '_' and '-'"
    )
    path: LocalPath = Field(
        description="a jsonl file; each row has a `question` (or `messages` that end with the "
        "user's), its `answer` or several right ones, and for `score: choice` the `choices`"
    )
    score: Scoring = Field(
        "exact",
        description="what makes an answer right: `exact`, it is a right one, up to case, spaces "
        "and a full stop; `contains`, it has a right one in it; `number`, its last number is the "
        "right one; `choice`, of the `choices` the model finds the right one most probable by byte",
    )
    max_new_tokens: Tokens = Field(256, description="maximum length of an answer in tokens")
    max_questions: Positive | None = Field(
        None, description="ask only this many questions, from the beginning"
    )
    few_shot: Annotated[int, Field(ge=0, le=100)] = Field(
        0,
        description="rows from the beginning that are shown with their answers before each "
        "question, and are not asked",
    )
    seed: Seed | None = Field(
        None,
        description="draw the rows of `few_shot` and `max_questions` at random by this number, not "
        "from the beginning",
    )
    thinking: bool = Field(
        False, description="let the models think before they answer, by their chat template"
    )


class Ship(Section):
    """What the tuned model has to be, so that it may ship: by the benchmarks of `evaluate`."""

    gain: dict[str, Difference] = Field(
        {},
        description="benchmark, then by how much more of its questions the tuned model has to "
        "answer right than the base model: `{faq: 0.05}`",
    )
    keep: dict[str, Difference] = Field(
        {},
        description="benchmark, then how much may be lost there, below 0: `{general: -0.02}`",
    )
    loops: Fraction | None = Field(
        None,
        description="fraction of the tuned model's answers to benchmarks that may end in a loop",
    )
    unended: Fraction | None = Field(
        None,
        description="fraction of the tuned model's answers to benchmarks that may not come to an "
        "end within `max_new_tokens`",
    )

    @property
    def differences(self) -> dict[str, float]:
        """The least difference, tuned minus base, of each benchmark that `gain` or `keep` names."""
        return {**self.keep, **self.gain}


NO_RULES = Ship()
