"""The questions of a benchmark, read from its file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline_lib.config.benchmarks import Benchmark, Scoring
from pipeline_lib.core.errors import DataError

QUESTIONS_NAME = "questions.jsonl"  # of the file in the store
_ROLES = ("system", "user", "assistant")
_FORM = '{"question": "...", "answer": "..."}'
_CHOICE_FORM = '{"question": "...", "choices": ["...", "..."], "answer": 0}'


@dataclass(frozen=True)
class BenchmarkQuestion:
    """The messages that ask it, and the right answers; of a choice, the choices that are right.

    `choices` is empty unless one of them is to be chosen.
    """

    messages: tuple[dict[str, str], ...]
    right: tuple[str, ...]
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What the user asks last."""
        return self.messages[-1]["content"]

    @property
    def key(self) -> str:
        """A hash of its content, equal in all runs."""
        content = json.dumps([self.messages, self.right, self.choices], ensure_ascii=False)
        return sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class QuestionSet:
    """The questions that a benchmark asks, and those that it shows before them with an answer."""

    asked: list[BenchmarkQuestion]
    examples: list[BenchmarkQuestion]

    def messages_of(self, question: BenchmarkQuestion) -> list[dict[str, str]]:
        """Return the conversation that asks `question`, with the examples behind its system text."""
        if not self.examples:
            return list(question.messages)
        system = [message for message in question.messages if message["role"] == "system"]
        own = [message for message in question.messages if message["role"] != "system"]
        shown: list[dict[str, str]] = []
        for example in self.examples:
            shown += [message for message in example.messages if message["role"] != "system"]
            shown.append({"role": "assistant", "content": example.right[0]})
        return [*system, *shown, *own]

    def text_of(self, question: BenchmarkQuestion) -> str:
        """Return what asks `question` of a model without a chat template."""
        shown = [f"{example.text}\n{example.right[0]}\n\n" for example in self.examples]
        return "".join([*shown, question.text])


def read_questions(path: Path, benchmark: Benchmark) -> QuestionSet:
    """Return what `benchmark` asks and shows of the questions in the file at `path`.

    Raises DataError naming the file and the first line that is no question, or if no row is left to
    ask.
    """
    most = None
    if benchmark.max_questions is not None and benchmark.seed is None:
        most = benchmark.few_shot + benchmark.max_questions
    found: list[BenchmarkQuestion] = []
    for number, row in _rows(path):
        if len(found) == most:
            break
        try:
            found.append(_question(row, benchmark.score))
        except _NoQuestion as error:
            raise DataError(f"{path}: line {number}: {error}") from error
    if not found:
        raise DataError(f"{path}: it has no questions; write one on each line, as {_FORM}")
    if len(found) <= benchmark.few_shot:
        raise DataError(
            f"{path}: {benchmark.name}: few_shot shows {benchmark.few_shot} of its {len(found)} "
            "questions, and none is left to ask; lower it"
        )
    if benchmark.seed is not None:
        found.sort(key=lambda question: _drawn(question, benchmark.seed))
    asked = found[benchmark.few_shot :][: benchmark.max_questions]
    return QuestionSet(asked, found[: benchmark.few_shot])


def _drawn(question: BenchmarkQuestion, seed: int | None) -> str:
    """Return by what questions are sorted to be drawn at random."""
    return sha256(f"{seed} {question.key}".encode()).hexdigest()


class _NoQuestion(Exception):
    """Why a row is no question, and what to write."""


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line that is not empty: its number, and what it holds as JSON."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); it has to be UTF-8 text") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: line {number}: it is no JSON ({error}); write one object on each line, "
                f"as {_FORM}"
            ) from error


def _question(row: Any, score: Scoring) -> BenchmarkQuestion:
    form = _CHOICE_FORM if score == "choice" else _FORM
    if not isinstance(row, dict):
        raise _NoQuestion(f"it is no object; write {form}")
    messages = _messages(row, form)
    if score == "choice":
        choices = _texts(row.get("choices"), "choices", form)
        return BenchmarkQuestion(
            messages, _right_choices(row.get("answer"), choices, form), choices
        )
    return BenchmarkQuestion(messages, _texts(row.get("answer"), "answer", form))


def _messages(row: dict[str, Any], form: str) -> tuple[dict[str, str], ...]:
    """Return the conversation that asks: `question`, or `messages` that end with the user's."""
    if "messages" not in row:
        (text,) = _texts(row.get("question"), "question", form)[:1]
        return ({"role": "user", "content": text},)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise _NoQuestion("its `messages` are no list of messages")
    found = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str) or not content.strip():
            raise _NoQuestion(
                f"a message needs a `role` ({', '.join(_ROLES)}) and its `content` as text"
            )
        found.append({"role": role, "content": content})
    if found[-1]["role"] != "user":
        raise _NoQuestion(
            "its `messages` have to end with the user's; the right answer is `answer`"
        )
    return tuple(found)


def _texts(value: Any, key: str, form: str) -> tuple[str, ...]:
    """Return a text or several; a number counts as it is written."""
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    found = []
    for one in values:
        is_number = isinstance(one, (int, float)) and not isinstance(one, bool)
        text = str(one) if is_number else one
        if not isinstance(text, str) or not text.strip():
            raise _NoQuestion(f"its `{key}` is missing or no text; write {form}")
        found.append(text)
    if not found:
        raise _NoQuestion(f"its `{key}` is an empty list; write {form}")
    return tuple(found)


def _right_choices(answer: Any, choices: Sequence[str], form: str) -> tuple[str, ...]:
    """Return the choices that `answer` names, by place from 0, by letter from A, or by text."""
    values = answer if isinstance(answer, list) else [answer]
    letters = {chr(ord("A") + place): choice for place, choice in enumerate(choices)}
    found = []
    for one in values:
        is_place = isinstance(one, int) and not isinstance(one, bool)
        if is_place and 0 <= one < len(choices):
            found.append(choices[one])
        elif isinstance(one, str) and one in choices:
            found.append(one)
        elif isinstance(one, str) and one in letters:
            found.append(letters[one])
        else:
            raise _NoQuestion(
                f"its `answer` {one!r} is none of the {len(choices)} choices, by place from 0, by "
                f"letter from A, or by text; write {form}"
            )
    return tuple(found)
