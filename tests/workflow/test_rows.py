"""What `check` says of the rows that it reads: broken, too long, or too few held out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.config.load import load_config
from pipeline_lib.workflow.rows import on_rows

CONFIG = """\
experiment: rows
model: {source: tiny}
data: {train: [{source: file, path: rows.jsonl}], validation_fraction: FRACTION}
tokenize: {max_tokens: 64}
shard: {block_tokens: 64}
cluster: {cpu_ranks: 1}
train: {precision: fp32, global_batch_tokens: 128}
"""
Say = Callable[..., list[str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """The lines of the warnings about rows.jsonl with these lines, under this fraction."""
    monkeypatch.chdir(tmp_path)

    def lines(rows: list[str], fraction: float = 0.2) -> list[str]:
        (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows))
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.replace("FRACTION", str(fraction)))
        return [finding.line for finding in on_rows(load_config(path))]

    return lines


def row(answer: str = "an answer", number: int = 0) -> str:
    return json.dumps({"instruction": f"question {number}", "output": answer})


def test_rows_that_will_do_are_not_mentioned(say: Say) -> None:
    assert say([row(number=number) for number in range(200)]) == []
    assert say([row(number=number) for number in range(10)], fraction=0.0) == []


def test_too_few_held_out_are_told_with_the_fraction_that_would_do(say: Say) -> None:
    [line] = say([row(number=number) for number in range(100)], fraction=0.05)
    assert "about 5 rows would be held out, and with fewer than 20" in line
    assert "data.validation_fraction 0.25 would hold out 20" in line
    [line] = say([row(number=number) for number in range(30)])
    assert "more rows are needed" in line


def test_nothing_is_said_of_what_is_held_out_of_rows_that_cannot_be_used(say: Say) -> None:
    preferences = '{"chosen": "yes", "rejected": "no"}'
    assert say([preferences] * 9) == []


def test_a_broken_row_behind_the_first_is_told_with_its_line(say: Say) -> None:
    rows = [row(number=number) for number in range(200)]
    rows[30] = '{"instruction": "half'
    [line] = say(rows)
    assert "1 row of the first 200 cannot be used" in line
    assert "rows.jsonl:31" in line


def test_a_row_of_another_layout_is_told(say: Say) -> None:
    rows = [row(number=number) for number in range(200)]
    rows[60] = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    [line] = say(rows)
    assert "1 row of the first 200 cannot be used" in line


def test_rows_that_are_all_too_long_are_told_with_a_length_that_holds_them(say: Say) -> None:
    [line] = say([row("word " * 200, number) for number in range(200)])
    assert "200 rows of the first 200 are longer than 64 tokens" in line
    assert "to 256 or more" in line
