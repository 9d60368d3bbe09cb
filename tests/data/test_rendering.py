import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.encode import Encoder, load_tokenizer
from pipeline_lib.data.pool import Limits
from pipeline_lib.data.template_worker import check_template, end_of_turn, render_prompts

from .chats import NO_TEMPLATE, TEMPLATES, change_template

QUESTIONS = [[{"role": "user", "content": text}] for text in ("Who?", "And why?")]


def test_prompts_are_those_of_the_template(folder: Path) -> None:
    template = ChatTemplate.load(folder)
    expected = [
        template.render(each, add_generation_prompt=True, enable_thinking=False)
        for each in QUESTIONS
    ]
    assert render_prompts(folder, QUESTIONS, enable_thinking=False) == expected
    assert render_prompts(folder, []) == []


def test_answers_end_as_the_template_says(folder: Path) -> None:
    assert end_of_turn(folder) == load_tokenizer(folder).token_to_id("<|im_end|>")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


LIMITS = Limits(cpu_s=0.5)
FAILING = {
    LOOP: "a worker process was ended while rendering the chat template of .*: more than 0.5 s of "
    "CPU time",
    "{{ raise_exception('not today') }}": "not today",
}


@pytest.mark.parametrize(
    "template", [*FAILING, "{% for message in messages %}{{ message.content }}{% endfor %}"]
)
def test_a_template_may_end_no_answer(tmp_path: Path, tiny_folder: Path, template: str) -> None:
    """Raw text needs no template, so its training is exported all the same."""
    model = change_template(tiny_folder, tmp_path / "model", template)
    assert end_of_turn(model, LIMITS) is None
    if template in FAILING:
        with pytest.raises(DataError, match=FAILING[template]):
            render_prompts(model, QUESTIONS, LIMITS)


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
)
NEVER_OFF = (
    "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('it "
    "thinks') }}{% endif %}"
)


@pytest.mark.parametrize("before", ["", NEEDS_SYSTEM, NEVER_OFF])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != NO_TEMPLATE])
def test_each_published_template_ends_its_answers(
    tmp_path: Path, tiny_folder: Path, name: str, before: str
) -> None:
    model = change_template(tiny_folder, tmp_path / "model", before + TEMPLATES[name])
    end = "<｜end▁of▁sentence｜>" if name == "r1-distill" else "<|im_end|>"
    state = Encoder(model, Tokenize())
    assert state.end_of_turn() == state.tokenizer.token_to_id(end)


def render_questions(model: Path, limits: Limits) -> list[str]:
    return render_prompts(model, QUESTIONS, limits)


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        "{% set number = 9 ** (9 ** 9) %}",  # jinja2 computes what is constant while it compiles
        "{{ 9 ** (9 ** 9) }}",
        "{% autoescape 9 ** (9 ** 9) %}{% endautoescape %}",
        "{% set text = 'a' * 10_000_000_000 %}",
        "{{ message }} and more " * 50_000,
    ],
)
@pytest.mark.parametrize("work", [check_template, render_questions])
def test_a_template_is_compiled_within_the_limits(
    tmp_path: Path, tiny_folder: Path, template: str, work: Callable[[Path, Limits], object]
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(template)
    limits = Limits(memory_bytes=300 << 20, cpu_s=0.5)
    with pytest.raises(DataError, match="a worker process was ended while .*: more than 0.[35]"):
        work(model, limits)


def test_a_template_that_wants_another_question_is_in_order(
    tmp_path: Path, tiny_folder: Path
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ raise_exception('give me tools') }}")
    check_template(model)
    (model / "chat_template.jinja").write_text("{{ (")
    with pytest.raises(DataError, match="not a chat template"):
        check_template(model)
