"""Which questions of benchmarks are found in the rows that are trained on."""

import pytest

from pipeline_lib.data.overlap import Searched, units_of

LONG = "Which of the four largest rivers of South America flows into the Atlantic near the equator?"
ROW = f"As the book asks: {LONG.upper()} The Amazon."
CHINESE = "南美洲最大的四条河流中哪一条在赤道附近流入大西洋"


def found(question: str, row: str) -> bool:
    searched = Searched()
    assert searched.add(0, question)
    searched.read(row)
    return 0 in searched.found


def test_words_and_characters_are_units() -> None:
    assert units_of("It's 3,5 ＡＢ, naïve_x") == ["it", "s", "3", "5", "ab", "naïve", "x"]
    assert units_of("第3条河 river") == ["第", "3", "条", "河", "river"]
    assert units_of("한국 ไทย") == ["한", "국", "ไ", "ท", "ย"]


@pytest.mark.parametrize(
    ("question", "row", "is_found"),
    [
        (LONG, ROW, True),
        (LONG, "Which of the four largest rivers of South America flows into the Pacific?", False),
        # thirteen units of it in a row are enough, whatever is around them and between the words
        (
            LONG,
            "the four   largest rivers, of South-America flows into the Atlantic near the",
            True,
        ),
        (LONG, "the four largest rivers of South America", False),
        (CHINESE, f"问：{CHINESE}？答：亚马孙河。", True),
        (CHINESE, "南美洲最大的四条河流中哪一条", True),
        (CHINESE, "南美洲最大的四条河流中哪", False),
        # a shorter question is looked for as a whole
        ("What is the capital of Peru?", "Q: what is the capital of peru A: Lima", True),
        ("What is the capital of Peru?", "What is the capital of Chile?", False),
    ],
)
def test_a_question_is_found_in_a_row(question: str, row: str, is_found: bool) -> None:
    assert found(question, row) is is_found


def test_a_question_of_few_words_tells_nothing() -> None:
    assert not Searched().add(0, "7 * 8?")


def test_two_questions_with_one_beginning_are_told_apart() -> None:
    searched = Searched()
    searched.add(0, "What is the capital of Peru?")
    searched.add(1, "What is the capital of Chile?")
    searched.read("What is the capital of Chile? Santiago")
    assert set(searched.found) == {1}
