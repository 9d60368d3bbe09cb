"""What is a right answer, what is wrong with one, and what choices a model finds probable."""

from decimal import Decimal
from pathlib import Path

import pytest
import torch

from pipeline_lib.config.benchmarks import Benchmark
from pipeline_lib.config.questions import BenchmarkQuestion, QuestionSet
from pipeline_lib.data.asked import Asked
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.evaluate.answers import Context
from pipeline_lib.evaluate.benchmark import Respondent, choice_nats
from pipeline_lib.evaluate.scoring import faults_of, is_loop, is_right, last_number
from pipeline_lib.model.build import load_plain


@pytest.mark.parametrize(
    ("answer", "right", "score", "expected"),
    [
        ("  lima. ", ["Lima"], "exact", True),
        ("It is Lima.", ["Lima"], "exact", False),
        ("It is  LIMA, of course", ["Lima"], "contains", True),
        ("Cusco", ["Lima"], "contains", False),
        ("Ｌｉｍａ。", ["Lima"], "exact", True),
        ("carbon dioxide", ["CO2", "Carbon  Dioxide"], "exact", True),
        ("<think>Lima?</think>Cusco", ["Lima"], "contains", False),
        ("<think>Cusco?</think>\n\nLima", ["Lima"], "exact", True),
        ("3 apples and 4 make 1,234.50 in all.", ["1234.5"], "number", True),
        ("It is 7, not 8", ["7"], "number", False),
        ("no idea", ["7"], "number", False),
        ("-3", ["-3.0"], "number", True),
    ],
)
def test_an_answer_is_right_by_its_score(
    answer: str, right: list[str], score: str, expected: bool
) -> None:
    assert is_right(answer, right, score) is expected  # type: ignore[arg-type]


def test_the_last_number_counts() -> None:
    assert last_number("from 3 to 1,000") == Decimal(1000)
    assert last_number("none") is None


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5] * 24, True),
        ([5] * 23, False),
        ([1, 2, 3, *[7, 8, 9] * 8], True),
        ([1, 2, 3, *[7, 8, 9] * 7], False),
        ([*[7, 8, 9] * 8, 4], False),  # it came to an end
        ([*range(10)] * 4, True),
        ([*range(10)] * 3, False),
        ([*range(200)], False),
    ],
)
def test_a_loop_is_seen_at_the_end(tokens: list[int], expected: bool) -> None:
    assert is_loop(tokens) is expected


@pytest.mark.parametrize(
    ("prompt", "answer", "is_ended", "faults"),
    [
        ("Why?", "so", True, ()),
        ("Why?", "so", False, ("unended",)),
        ("Why?", " ", True, ("empty",)),
        ("Why?<think>", "hm</think>so", True, ()),
        ("Why?<think>", "hm", False, ("unended", "think")),
        ("Why?<think></think>", "so</think>", True, ("empty", "think")),
    ],
)
def test_faults_are_counted_whatever_an_answer_says(
    prompt: str, answer: str, is_ended: bool, faults: tuple[str, ...]
) -> None:
    assert faults_of(prompt, answer, [1, 2], is_ended) == faults


def test_choices_are_as_probable_as_a_plain_pass_says(tiny: Path) -> None:
    """Of several lengths at once, each beside padding, as alone."""
    model = load_plain(tiny, torch.float32, device_map=torch.device("cpu"))
    prompt = [5, 6, 7]
    choices = [[8], [9, 10, 11], [12, 8]]
    found = choice_nats(model, prompt, choices)
    for choice, nats in zip(choices, found, strict=True):
        row = torch.tensor([[*prompt, *choice]])
        with torch.no_grad():
            logits = model(input_ids=row).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(choice) - 1)
        alone = -sum(float(logits[at, token]) for at, token in zip(places, choice, strict=True))
        assert nats == pytest.approx(alone, rel=1e-4)


def test_a_model_answers_and_chooses(tiny: Path) -> None:
    model = load_plain(tiny, torch.float32, device_map=torch.device("cpu"))
    said: list[str] = []
    respondent = Respondent(model, tiny, load_tokenizer(tiny), said.append)
    asks = ({"role": "user", "content": "Why?"},)
    settings = Benchmark(name="faq", path="faq.jsonl", max_new_tokens=3)
    [answer] = respondent.answers(
        Asked(settings, QuestionSet([BenchmarkQuestion(asks, ("so",))], [])), Context()
    )
    assert (answer.benchmark, answer.prompt, answer.right) == ("faq", "Why?", ("so",))
    assert not answer.is_right
    assert "unended" in answer.faults
    chosen = settings.model_copy(update={"score": "choice"})
    question = BenchmarkQuestion(asks, ("b",), ("a", "b"))
    [choice] = respondent.answers(Asked(chosen, QuestionSet([question], [])), Context())
    assert choice.answer in ("a", "b")
    assert choice.is_right is (choice.answer == "b")
    assert choice.faults == ()
