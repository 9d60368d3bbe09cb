from pathlib import Path

import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.chat.template import ChatTemplate
from pipeline_lib.data.tokenize.rendering import render_prompts
from pipeline_lib.data.tokenize.worker import Limits

QUESTIONS = [[{"role": "user", "content": text}] for text in ("Who?", "And why?")]


def test_prompts_are_those_of_the_template(folder: Path) -> None:
    template = ChatTemplate.load(folder)
    expected = [template.render(each, add_generation_prompt=True, enable_thinking=False) for each in QUESTIONS]
    assert render_prompts(folder, QUESTIONS, enable_thinking=False) == expected
    assert render_prompts(folder, []) == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 0.5 s of CPU time",
        ),
        ("{{ raise_exception('not today') }}", "not today"),
    ],
)
def test_a_hostile_template_is_stopped(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=message):
        render_prompts(tmp_path, QUESTIONS, Limits(cpu_s=0.5))
