"""Held-out losses by source of sealed evaluations, compared in the text, the page and the JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.compare.differences import DifferingRow
from pipeline_lib.compare.page import write_page
from pipeline_lib.core.store import Store
from pipeline_lib.evaluate.stage import scores_by_source
from pipeline_lib.records.evaluation import DocumentScore
from pipeline_lib.records.record import to_json
from pipeline_lib.report.statistics import DocumentLosses
from tests.compare.fakes import Samples, compared, curve, evaluated, experiment, made, seal
from tests.compare.test_command import run
from tests.report.fakes import realistic_files

SOURCES = {
    "chats.jsonl": range(0, 150),
    "code.jsonl": range(150, 280),
    "rest.jsonl": range(280, 287),
    "empty.jsonl": (),
}
TWO_SOURCES = {"train": [{"source": "pydoc"}, {"source": "pydoc", "max_rows": 50}]}


def with_sources(
    store: Store, name: str, shifts: dict[str, float], seed: int, **changes: Any
) -> dict[str, float]:
    """An evaluated experiment that needs `shifts` nats a token more on a source; its losses.

    The losses are on each source.
    """
    scores = Samples.drawn(0).scores(0.0, 0)
    for source, shift in shifts.items():
        for number in SOURCES[source]:
            scores[number]["tuned"] += shift * scores[number]["tokens"]
    files = realistic_files()
    files["tokenize"]["ledger.json"]["sources"].pop()
    curve(files, seed)
    evaluated(scores, files)
    rows = [DocumentScore(**row) for row in scores]
    numbers = {source: list(SOURCES[source]) for source in shifts}
    by_source = scores_by_source(
        numbers, DocumentLosses.of(rows, "base"), DocumentLosses.of(rows, "tuned")
    )
    files["evaluate"]["metrics.json"]["eval"]["by_source"] = to_json(by_source)
    seal(store, experiment(name, data=TWO_SOURCES, **changes), files)
    return {row.source: row.tuned.loss for row in by_source if row.tuned}


@pytest.fixture
def losses(store: Store) -> list[dict[str, float]]:
    """Two experiments: the second is better at code, worse at chats, and the same at the rest."""
    return [
        with_sources(store, "one", {"chats.jsonl": 0.0, "code.jsonl": 0.0, "rest.jsonl": 0.0}, 0),
        with_sources(
            store,
            "two",
            {"chats.jsonl": 0.25, "code.jsonl": -0.5, "rest.jsonl": 0.0},
            1,
            train={"lr": 1e-3},
        ),
    ]


def test_the_losses_of_each_source_stand_beside_one_another(
    store: Store, losses: list[dict[str, float]]
) -> None:
    one, two = losses
    assert two["chats.jsonl"] == pytest.approx(one["chats.jsonl"] + 0.25)
    found = compared(store, "one", "two").differences.sources

    assert found == [
        DifferingRow("chats.jsonl", (f"{one['chats.jsonl']:.4f}", f"{two['chats.jsonl']:.4f}")),
        DifferingRow("code.jsonl", (f"{one['code.jsonl']:.4f}", f"{two['code.jsonl']:.4f}")),
    ]


def test_text_json_and_page_have_them(
    store: Store, losses: list[dict[str, float]], tmp_path: Path
) -> None:
    one, two = (f"{loss['code.jsonl']:.4f}" for loss in losses)
    page = tmp_path / "page.html"
    said = run(store, "one", "two", "--page", str(page)).stdout
    assert "Held-out loss by source" in said
    # the best first
    assert ["code.jsonl", two, one] in [line.split() for line in said.splitlines()]

    found = json.loads(run(store, "one", "two", "--json").stdout)
    assert found["held_out_by_source"]["code.jsonl"] == [one, two]
    assert "Held-out loss by source" in page.read_text()
    assert two in page.read_text()


def test_a_source_that_only_one_has_held_out_is_unknown_in_the_other(store: Store) -> None:
    with_sources(store, "one", {"chats.jsonl": 0.0, "code.jsonl": 0.0}, 0)
    with_sources(store, "two", {"chats.jsonl": 0.0, "rest.jsonl": 0.0}, 1, train={"lr": 1e-3})
    found = compared(store, "one", "two").differences.sources

    assert [(row.name, row.values.index("-")) for row in found] == [
        ("code.jsonl", 1),
        ("rest.jsonl", 0),
    ]


def test_without_losses_by_source_none_are_shown(store: Store, tmp_path: Path) -> None:
    """As of an experiment that holds out one source, or of an older version."""
    with_sources(store, "one", {"chats.jsonl": 0.0, "code.jsonl": 0.0}, 0)
    made(store, "two", 0.1, 1)
    comparison = compared(store, "one", "two")
    assert comparison.differences.sources == []
    write_page(comparison, tmp_path / "page.html")
    assert "by source" not in (tmp_path / "page.html").read_text()


def test_a_source_without_supervised_tokens_has_no_loss(store: Store) -> None:
    with_sources(store, "one", {"chats.jsonl": 0.0, "code.jsonl": 0.0}, 0)
    with_sources(store, "two", {"chats.jsonl": 0.0, "empty.jsonl": 0.0}, 1, train={"lr": 1e-3})

    assert [
        (row.name, row.values[1]) for row in compared(store, "one", "two").differences.sources
    ] == [("code.jsonl", "-")]
