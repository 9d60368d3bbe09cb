"""The page by symptom: it explains every exit code, and quotes only messages that users meet."""

import ast
import inspect
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline_lib.cli.main import KEYBOARD_INTERRUPT_CODE
from pipeline_lib.core import errors
from pipeline_lib.core.events import EventName
from pipeline_lib.data.conversations import BadRow
from pipeline_lib.data.layouts import detect
from pipeline_lib.train.metrics import print_progress
from tests.docs.pages import INLINE, ROOT, chinese_of, read, sections_of

PAGE = "docs/troubleshooting.md"
PAGES = [PAGE, chinese_of(PAGE)]
VALUE = "\0"  # stands for what is inserted into a message
GAP = "..."  # the same, in a page
SUCCESS = 0
PRODUCED = {  # messages that the code assembles from several strings: the tests below produce them
    "data wait",
    "checkpoint wait",
    "none of alpaca, sharegpt, messages, prompt_completion, text; ...",
}


def rows(page: str, *, of_codes: bool = False) -> list[list[str]]:
    """The cells of the table of exit codes, in the last section, or of all other tables."""
    sections = sections_of(read(page))
    chosen = sections[-1:] if of_codes else sections[:-1]
    lines = [
        line for section in chosen for line in section.prose.splitlines() if line.startswith("| ")
    ]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [
        each
        for each in cells
        if each[0] not in ("Code", "退出码", "Message or symptom", "消息或现象")
    ]


def quoted(page: str) -> list[str]:
    """The messages: the code in the first column of the tables by symptom."""
    return [message for row in rows(page) for message in INLINE.findall(row[0])]


def text_of(node: ast.expr) -> str | None:
    """The text of a string, with VALUE for what is inserted; None for other expressions."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or VALUE for part in parts)
        case ast.BinOp(op=ast.Add()):
            return (text_of(node.left) or VALUE) + (text_of(node.right) or VALUE)
    return None


@cache
def texts() -> str:
    """All strings of the package and of the parts of Snakemake that print, one to a line."""
    snakemake = find_spec("snakemake")
    assert snakemake is not None
    assert snakemake.origin is not None
    of_snakemake = Path(snakemake.origin).parent
    files = [
        *ROOT.glob("pipeline_lib/**/*.py"),
        of_snakemake / "exceptions.py",
        of_snakemake / "common/__init__.py",
    ]
    nodes = (
        node
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr)
    )
    return "\n".join(text.replace("\n", " ") for node in nodes if (text := text_of(node)))


def is_said(message: str) -> bool:
    """Whether every part between gaps occurs in a string of the code."""
    return all(part in texts() for part in message.split(GAP) if len(part.strip()) > 1)


@pytest.mark.parametrize("page", PAGES)
def test_quoted_messages_exist(page: str) -> None:
    messages = [message for message in quoted(page) if message not in PRODUCED]

    assert [message for message in messages if not is_said(message)] == []
    assert len(messages) > 50


def test_a_message_that_nobody_prints_is_noticed() -> None:
    assert is_said("gave up at step ...: ...")
    assert not is_said("gave up after step ...")


def test_progress_lines_name_what_is_waited_for() -> None:
    lines: list[str] = []
    step = {
        "step": 1,
        "loss": 1.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_s": 10.0,
        "elapsed_s": 1.0,
        "step_s": 1.0,
    }
    waits = {"peak_memory_bytes": 2**20, "data_wait_s": 0.5, "checkpoint_wait_s": 0.5}

    print_progress(lines.append, last_step=1)(EventName.STEP_END, {**step, **waits})

    assert [word for word in PRODUCED if "wait" in word and word not in lines[-1]] == []


def test_a_row_of_no_known_layout_is_refused_with_the_quoted_message() -> None:
    with pytest.raises(BadRow) as refused:
        detect({"foo": "x"}, {})

    [message] = [message for message in PRODUCED if message.startswith("none of ")]
    assert message.removesuffix(GAP) in str(refused.value)


def codes_in_code() -> dict[int, set[str]]:
    """The classes of `pipeline_lib.core.errors` by exit code."""
    found: dict[int, set[str]] = {}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.PipelineError):
            found.setdefault(kind.exit_code, set()).add(name)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_table_has_every_exit_code_and_no_other(page: str) -> None:
    table = {
        int(code): set(INLINE.findall(classes)) for code, classes, *_ in rows(page, of_codes=True)
    }

    assert table == {SUCCESS: set(), KEYBOARD_INTERRUPT_CODE: set(), **codes_in_code()}


def test_no_other_class_of_the_package_has_an_exit_code_that_is_missing() -> None:
    known = {*codes_in_code(), KEYBOARD_INTERRUPT_CODE, SUCCESS}
    of_classes = re.compile(r"^    exit_code = (\d+)$", re.MULTILINE)
    found = {
        int(code)
        for path in ROOT.glob("pipeline_lib/**/*.py")
        for code in of_classes.findall(path.read_text())
    }

    assert found <= known
    assert len(found) > 5


def test_both_languages_quote_the_same_messages_in_the_same_order() -> None:
    assert quoted(PAGE) == quoted(chinese_of(PAGE))
