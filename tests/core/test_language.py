"""The Chinese of texts: the catalogue is that of the code, and the terminal's language decides."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from jinja2 import Environment
from jinja2.ext import babel_extract
from jinja2.nodes import Output, TemplateData

from pipeline_lib.config.schema import ConfigFile
from pipeline_lib.core.language import CATALOGUE, Language, _, language_of, read_catalogue, speaking

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipeline_lib"
MARKS = ("_", "N_")


def texts_in_code() -> Iterator[str]:
    """Yield the text of each `_("...")` and `N_("...")` of modules and templates."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in MARKS
                and isinstance(node.args[0], ast.Constant)
            ):
                yield str(node.args[0].value)
    for path in PACKAGE.rglob("*.html.jinja"):
        with path.open("rb") as file:
            for _line, _mark, text, _comments in babel_extract(file, ["_"], [], {}):
                assert isinstance(text, str), path
                yield text
    yield from descriptions(ConfigFile.model_json_schema())


def descriptions(schema: Any) -> Iterator[str]:
    """Yield what a JSON schema says of its objects: the texts of docs/config.md."""
    if isinstance(schema, list):
        for item in schema:
            yield from descriptions(item)
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "description" and isinstance(value, str):
                yield value
            else:
                yield from descriptions(value)


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "report/templates").glob("*.html.jinja")), ids=lambda path: path.name
)
def test_a_page_of_the_report_has_no_text_that_is_not_translated(path: Path) -> None:
    parsed = Environment(autoescape=True).parse(path.read_text(encoding="utf-8"))
    bare = "".join(
        str(part.data)
        for output in parsed.find_all(Output)
        for part in output.nodes
        if isinstance(part, TemplateData)
    )
    words = re.sub(r"<[^>]*>?|[^<]*>", " ", bare)
    assert re.findall(r"[A-Za-z]{3,} [a-z]{2,}", words) == []


def catalogue() -> dict[str, str]:
    return read_catalogue(CATALOGUE.read_text(encoding="utf-8"))


def fields(text: str) -> set[tuple[str, str | None]]:
    """The placeholders of a text, with how each is shown."""
    return {(name, shown) for _before, name, shown, _as in Formatter().parse(text) if name}


def test_the_catalogue_has_every_text_of_the_code_and_no_other() -> None:
    used = set(texts_in_code())
    known = set(catalogue())
    assert used - known == set(), "texts without Chinese: add them to locale/zh.po"
    assert known - used == set(), "texts that no code has: remove them from locale/zh.po"


def test_no_text_stands_twice_in_the_catalogue() -> None:
    lines = CATALOGUE.read_text(encoding="utf-8").splitlines()
    starts = [line for line in lines if line.startswith("msgid") and line != 'msgid ""']
    assert len(starts) == len(set(starts))


@pytest.mark.parametrize(("english", "chinese"), catalogue().items())
def test_a_translation_has_the_placeholders_of_its_text(english: str, chinese: str) -> None:
    assert chinese
    assert fields(chinese) == fields(english)


def test_a_catalogue_joins_strings_and_ignores_comments() -> None:
    text = '# head\nmsgid ""\nmsgstr "Language: zh\\n"\n\n# x\nmsgid ""\n"a\\n"\n"b"\nmsgstr "甲\\n\\"乙\\""\n'
    assert read_catalogue(text) == {"a\nb": '甲\n"乙"'}


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "QWEN3_LANG": "en"}, "en"),
        ({"LC_ALL": "C", "QWEN3_LANG": "zh"}, "zh"),
    ],
)
def test_the_terminals_language(environ: dict[str, str], language: Language) -> None:
    assert language_of(environ) == language


def test_texts_are_english_but_where_chinese_is_spoken() -> None:
    assert _("weights") == "weights"
    with speaking("zh"):
        assert _("weights") == "权重"
        with speaking("en"):
            assert _("weights") == "weights"
        assert _("no such text") == "no such text"
    assert _("weights") == "weights"


def said(*arguments: str, folder: Path = ROOT, **environ: str) -> str:
    """What `qwen3 ARGUMENTS` prints, with its errors."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "", "QWEN3_LANG": "", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def test_help_speaks_the_terminals_language() -> None:
    chinese = said("--help", LANG="zh_CN.UTF-8")
    assert "运行之前" in chinese
    assert "before a run" not in chinese
    assert "before a run" in said("--help", LANG="en_US.UTF-8")
    assert "配置文件" in said("run", "--help", QWEN3_LANG="zh")


def test_a_plan_speaks_chinese_and_its_json_never_does() -> None:
    recipe = "config/recipes/lora-8b-1x24gb.yaml"
    chinese = said("plan", recipe, QWEN3_LANG="zh")
    assert "放得下" in chinese
    assert "FITS" not in chinese
    as_json = said("plan", recipe, "--json", QWEN3_LANG="zh")
    assert as_json == said("plan", recipe, "--json", QWEN3_LANG="en")


def test_an_error_says_in_chinese_what_to_do(tmp_path: Path) -> None:
    assert "是不是想写 'check'" in said("chek", QWEN3_LANG="zh")
    (tmp_path / "my.yaml").write_text("experiment: a\n")
    error = said("check", "my.yaml", folder=tmp_path, QWEN3_LANG="zh")
    assert error.startswith("错误：my.yaml：2 个问题")
