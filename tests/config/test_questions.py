"""Files of questions, and the rules of `ship` that name them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.compile import compile_config
from pipeline_lib.config.content import HashCache, read_content
from pipeline_lib.config.load import load_config
from pipeline_lib.config.questions import BenchmarkQuestion, QuestionSet, read_questions
from pipeline_lib.core.errors import ConfigError, DataError

CONFIG = """\
experiment: asked
model: {source: tiny}
data: {train: [{source: pydoc}]}
"""


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "faq.jsonl"
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def questions(path: Path, **keys: Any) -> QuestionSet:
    return read_questions(path, Benchmark(name="faq", path=str(path), **keys))


def asked(path: Path, **keys: Any) -> list[BenchmarkQuestion]:
    return questions(path, **keys).asked


def test_a_question_is_read_in_each_of_its_forms(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 * 8?"}]
    path = written(
        tmp_path,
        {"question": "Why?", "answer": "so", "id": 7},
        "",
        {"question": "Which gas?", "answer": ["CO2", "carbon dioxide"]},
        {"messages": messages, "answer": 56},
    )
    first, second, third = asked(path)
    assert first.messages == ({"role": "user", "content": "Why?"},)
    assert (first.text, first.right) == ("Why?", ("so",))
    assert second.right == ("CO2", "carbon dioxide")
    assert third.messages == tuple(messages)
    assert third.right == ("56",)
    assert asked(path, max_questions=2) == [first, second]
    assert len({first.key, second.key, third.key}) == 3


@pytest.mark.parametrize("answer", [1, "B", "Jupiter", [1]])
def test_a_choice_is_named_by_place_letter_or_text(tmp_path: Path, answer: Any) -> None:
    path = written(
        tmp_path, {"question": "Largest?", "choices": ["Mars", "Jupiter"], "answer": answer}
    )
    [question] = asked(path, score="choice")
    assert (question.choices, question.right) == (("Mars", "Jupiter"), ("Jupiter",))


@pytest.mark.parametrize(
    ("row", "score", "said"),
    [
        ("{", "exact", "line 2: it is no JSON"),
        ([], "exact", "line 2: it is no object"),
        ({"answer": "so"}, "exact", "line 2: its `question` is missing"),
        ({"question": "Why?"}, "exact", "line 2: its `answer` is missing"),
        ({"question": "Why?", "answer": []}, "exact", "line 2: its `answer` is an empty list"),
        ({"question": "Why?", "answer": True}, "exact", "line 2: its `answer` is missing or no"),
        ({"messages": [], "answer": "so"}, "exact", "line 2: its `messages` are no list"),
        (
            {"messages": [{"role": "assistant", "content": "so"}], "answer": "so"},
            "exact",
            "line 2: its `messages` have to end with the user's",
        ),
        ({"question": "Why?", "answer": 0}, "choice", "line 2: its `choices` is missing"),
        (
            {"question": "Why?", "choices": ["a", "b"], "answer": 2},
            "choice",
            "line 2: its `answer` 2 is none of the 2 choices",
        ),
    ],
)
def test_a_row_that_is_no_question_is_named(
    tmp_path: Path, row: Any, score: Any, said: str
) -> None:
    good = {"question": "Why?", "choices": ["a", "b"], "answer": "a"}
    with pytest.raises(DataError, match=re.escape(said)):
        asked(written(tmp_path, good, row), score=score)


def test_an_empty_file_has_no_questions(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no questions; write one on each line"):
        asked(written(tmp_path, ""))


def numbered(folder: Path, count: int = 9) -> Path:
    rows = [{"question": f"Number {n}?", "answer": n} for n in range(count)]
    return written(folder, *rows)


def test_examples_are_shown_with_their_answers_and_not_asked(tmp_path: Path) -> None:
    path = numbered(tmp_path)
    found = questions(path, few_shot=2, max_questions=3)
    assert [one.right for one in found.examples] == [("0",), ("1",)]
    assert [one.right for one in found.asked] == [("2",), ("3",), ("4",)]
    assert found.messages_of(found.asked[0]) == [
        {"role": "user", "content": "Number 0?"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "Number 1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Number 2?"},
    ]
    assert found.text_of(found.asked[0]) == "Number 0?\n0\n\nNumber 1?\n1\n\nNumber 2?"
    # the same question without examples has the same name
    assert found.asked[0].key == asked(path)[2].key


def test_examples_stand_behind_the_system_text_of_the_question(tmp_path: Path) -> None:
    def row(system: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
        return {"messages": messages, "answer": "so"}

    found = questions(written(tmp_path, row("one"), row("two")), few_shot=1)
    shown = found.messages_of(found.asked[0])
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "user"]
    assert shown[0]["content"] == "two"


def test_a_seed_draws_questions_and_examples_from_the_whole_file(tmp_path: Path) -> None:
    path = numbered(tmp_path, 100)
    one = questions(path, few_shot=2, max_questions=5, seed=1)
    assert one == questions(path, few_shot=2, max_questions=5, seed=1)
    assert one != questions(path, few_shot=2, max_questions=5, seed=2)
    drawn = [int(question.right[0]) for question in one.examples + one.asked]
    assert len(set(drawn)) == 7
    assert max(drawn) > 20


def test_examples_that_leave_nothing_to_ask_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="few_shot shows 9 of its 9 questions"):
        questions(numbered(tmp_path), few_shot=9)


def digests(folder: Path, more: str) -> dict[str, str]:
    path = folder / "config.yaml"
    path.write_text(CONFIG + more, encoding="utf-8")
    config = load_config(path)
    found = compile_config(config, read_content(config, path, HashCache(None)))
    return {part: spec.digest for part, spec in found.specs.items()}


def benchmark(path: Path, name: str = "faq") -> str:
    return f"{{name: {name}, path: {path}}}"


def test_benchmarks_are_stages_of_their_own(tmp_path: Path) -> None:
    """Nothing but the report depends on them, and nothing but it on the rules."""
    path = written(tmp_path, {"question": "Why?", "answer": "so"})
    without = digests(tmp_path, "")
    section = f"evaluate: {{benchmarks: [{benchmark(path)}]}}\n"
    found = digests(tmp_path, section)
    more = {"questions.0", "overlap", "base_benchmark", "benchmark"}
    assert found.keys() - without.keys() == more
    assert {part for part in without if without[part] != found[part]} == {"report"}
    ruled = digests(tmp_path, f"{section}ship: {{gain: {{faq: 0.1}}}}\n")
    assert {part for part in found if ruled[part] != found[part]} == {"report"}
    moved = path.rename(tmp_path / "moved.jsonl")
    section = f"evaluate: {{benchmarks: [{benchmark(moved)}]}}\n"
    assert digests(tmp_path, section) == found
    written(tmp_path, {"question": "Why?", "answer": "because"})
    section = f"evaluate: {{benchmarks: [{benchmark(path)}]}}\n"
    other = digests(tmp_path, section)
    changed = {part for part in found if other[part] != found[part]}
    assert changed == {*more, "report"}


@pytest.mark.parametrize(
    ("names", "ship", "said"),
    [
        (["faq", "faq"], "{}", ["evaluate.benchmarks[1].name: 'faq' is the name of two"]),
        (["faq"], "{gain: {fag: 0.1}}", ["ship.gain.fag: no benchmark of that name"]),
        (
            ["faq"],
            "{gain: {faq: 0.1}, keep: {faq: -0.1}}",
            ["ship.keep.faq: has a rule of ship.gain too"],
        ),
        ([], "{loops: 0.1}", ["ship.loops: counts answers to evaluate.benchmarks"]),
    ],
)
def test_rules_name_benchmarks_that_are_there(
    tmp_path: Path, names: list[str], ship: str, said: list[str]
) -> None:
    file = written(tmp_path, {"question": "Why?", "answer": "so"})
    listed = ", ".join(benchmark(file, name) for name in names)
    path = tmp_path / "config.yaml"
    path.write_text(f"{CONFIG}evaluate: {{benchmarks: [{listed}]}}\nship: {ship}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.problems) == len(said)
    for problem, wanted in zip(caught.value.problems, said, strict=True):
        assert wanted in problem


def test_a_file_that_is_not_there_or_holds_none_is_a_problem_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    bad = written(tmp_path, "{")
    listed = f"{benchmark(bad)}, {benchmark(tmp_path / 'gone.jsonl', 'gone')}"
    path.write_text(f"{CONFIG}evaluate: {{benchmarks: [{listed}]}}\n")
    with pytest.raises(ConfigError) as caught:
        read_content(load_config(path), path, None)
    first, second = caught.value.problems
    assert first.startswith(f"evaluate.benchmarks[0].path: {bad}: line 1: it is no JSON")
    assert second.startswith("evaluate.benchmarks[1].path: ")
    assert "is no file here" in second
