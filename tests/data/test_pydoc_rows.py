import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.files import read_jsonl
from pipeline_lib.data.demo import conversations, write_rows
from pipeline_lib.data.encode import Encoder, Sample
from pipeline_lib.data.layouts import Layout, to_content
from pipeline_lib.data.library_docs import MODULES, read_entries

from .conftest import ROOT


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("pydoc") / "rows.jsonl"
    assert write_rows(path, 6000) == 6000
    return read_jsonl(path)


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    code = "import sys, pathlib; from pipeline_lib.data.demo import write_rows; "
    code += "write_rows(pathlib.Path(sys.argv[1]), 10**9)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, tmp_path / seed], env=environment, check=True)
    first = (tmp_path / "1").read_bytes()
    assert first == (tmp_path / "2").read_bytes()
    assert first.count(b"\n") > 10_000


def test_nothing_depends_on_where_python_lies() -> None:
    """platform.architecture defaults to sys.executable, which made another demo of each clone."""
    texts = [message["content"] for messages in conversations() for message in messages]
    assert len(texts) > 30_000
    assert [text for text in texts if sys.prefix in text or sys.base_prefix in text] == []


def test_importing_the_modules_says_and_starts_nothing() -> None:
    code = f"import importlib, threading\nfor name in {MODULES!r}: importlib.import_module(name)\n"
    code += "assert threading.active_count() == 1"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_row_is_a_conversation_of_its_own(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        to_content(row, Layout("messages"))
    assert len({json.dumps(row) for row in rows}) == len(rows)
    turns = Counter(sum(message["role"] == "user" for message in row["messages"]) for row in rows)
    assert turns.keys() == {1, 2} and turns[2] > 500
    assert sum(row["messages"][0]["role"] == "system" for row in rows) > 300
    asked = Counter(
        message["content"]
        for row in rows
        for message in row["messages"]
        if message["role"] == "user"
    )
    assert max(asked.values()) == 1  # or a held-out answer could be read off a training row
    text = json.dumps(rows)
    assert " at 0x" not in text and "<object" not in text and str(Path.home()) not in text


def test_there_are_many_kinds_of_questions_about_all_modules(rows: list[dict[str, Any]]) -> None:
    questions = [
        message["content"]
        for row in rows
        for message in row["messages"]
        if message["role"] == "user"
    ]
    kinds = Counter(re.sub("`[^`]*`", "X", question) for question in questions)
    assert sum(number > 100 for number in kinds.values()) >= 6
    assert sum(
        any(f"`{name}" in question for question in questions) for name in MODULES
    ) > 0.9 * len(MODULES)


def test_signatures_and_summaries_are_right() -> None:
    entries = {entry.name: entry for entry in read_entries()}
    join = entries["textwrap.fill"]
    assert (join.kind, join.holder, join.signature) == (
        "function",
        "textwrap",
        "(text, width=70, **kwargs)",
    )
    assert join.summary == "Fill a single paragraph of text, returning a new string."
    assert (
        entries["shlex.shlex.get_token"].kind == "method" and entries["shlex.shlex"].kind == "class"
    )
    assert entries["heapq"].kind == "module"
    assert not any(part.startswith("_") for name in entries for part in name.split("."))


def test_samples_are_short(rows: list[dict[str, Any]], tiny_folder: Path) -> None:
    rows = rows[:1500]
    contents = [to_content(row, Layout("messages")) for row in rows]
    encoded = Encoder(tiny_folder, Tokenize(max_tokens=100_000)).encode(contents)
    lengths = sorted(
        len(sample.tokens)
        for samples in encoded
        for sample in samples
        if isinstance(sample, Sample)
    )
    assert len(lengths) == sum(
        message["role"] == "assistant" for row in rows for message in row["messages"]
    )
    assert lengths[len(lengths) // 2] < 100 and lengths[-len(lengths) // 200] < 250


def test_a_limit_keeps_the_first(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert write_rows(tmp_path / "rows.jsonl", 10) == 10
    assert read_jsonl(tmp_path / "rows.jsonl") == rows[:10]
    assert next(conversations()) == rows[0]["messages"]
