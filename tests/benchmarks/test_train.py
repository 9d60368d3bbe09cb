"""The races of the training step: every case can be run, with equal documents and weights.

Both sides of a case get the same ones.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.sizes import model_config
from benchmarks.train.__main__ import main, parse, sides_of
from benchmarks.train.cases import CASES, Case, changed, parsed, train_settings
from benchmarks.train.documents import documents_of, lengths_of
from benchmarks.train.foreseen import cells, foreseen
from benchmarks.train.ours import batches_of
from benchmarks.train.report import row_of
from benchmarks.train.rows import IGNORED, dealt, padded
from benchmarks.train.rows import row_of as document_row
from benchmarks.train.table import show_scaling
from benchmarks.train.weights import fill, put_whole_or_zero_3
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.core.units import GIB


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_case_has_a_model_settings_and_documents_that_fill_its_blocks(case: Case) -> None:
    geometry_in(model_config(case.size, case.layers))
    train = train_settings(case)
    assert case.rank_blocks % train.micro_batch_blocks == 0
    assert all(
        case.rank_documents % peer.documents == 0 for peer in case.peers if peer.batches != "trl"
    )
    (lengths,) = lengths_of(case, 0, 1)
    assert len(lengths) == case.rank_documents
    assert lengths.max() <= case.max_tokens
    assert lengths.sum() > 0.93 * case.rank_blocks * case.block_tokens
    batches = batches_of(case, documents_of(case, 0, 1)[0], train.micro_batch_blocks)
    assert sum(batch.real_tokens for batch in batches) == lengths.sum()
    assert sum(batch.squared_lengths for batch in batches) == (lengths**2).sum()


def test_the_first_steps_are_the_same_however_many_there_are() -> None:
    case = CASES["tiny-full"]
    for few, many in zip(documents_of(case, 1, 2), documents_of(case, 1, 4), strict=False):
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(few, many, strict=True))


def test_ranks_take_micro_batches_in_turns() -> None:
    of_ranks = [
        [[{"step": step, "rank": rank, "row": row} for row in range(4)] for step in range(2)]
        for rank in "ab"
    ]
    found = " ".join("{rank}{step}{row}".format(**row) for row in dealt(of_ranks, 2))
    assert found == "a00 a01 b00 b01 a02 a03 b02 b03 a10 a11 b10 b11 a12 a13 b12 b13"


def test_padding_is_neither_seen_nor_learned() -> None:
    documents = documents_of(CASES["tiny-full"], 0, 1)[0][:2]
    batch = padded([document_row(document) for document in documents], 256)
    assert batch["attention_mask"].sum(1).tolist() == [
        len(document.tokens) for document in documents
    ]
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


def test_weights_depend_on_their_names_alone() -> None:
    config = AutoConfig.for_model(**model_config("demo", layers=1))
    one, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))  # type: ignore[no-untyped-call]
    for model in (one, other):
        fill(model, torch.device("cpu"), put_whole_or_zero_3)
    assert all(
        torch.equal(parameter, other.get_parameter(name))
        for name, parameter in one.named_parameters()
    )
    assert (
        0.018 < float(one.get_parameter("model.layers.0.mlp.up_proj.weight").detach().std()) < 0.022
    )
    assert (one.get_parameter("model.norm.weight") == 1).all()


def test_mfu_is_that_of_the_reference() -> None:
    told: list[dict[str, Any]] = [{"kind": "start", "gpu": "NVIDIA H200"}]
    told += [{"kind": "step", "step_s": 16384 / 10040, "loss": 1.0}] * 5
    row = row_of(CASES["full-8B-8192"], "ours", 2, told, 3.0)
    assert row["tokens_per_s"] == pytest.approx(10040)
    assert row["mfu"] == pytest.approx(0.535, abs=2e-3)
    assert row["documents_per_s"] == pytest.approx(2 * 2 / (16384 / 10040))


def test_a_side_that_ended_in_its_warm_up_has_no_rates() -> None:
    row = row_of(CASES["tiny-full"], "ours", 1, [{"kind": "step", "step_s": 1.0, "loss": 7.5}], 1.0)
    assert "tokens_per_s" not in row
    assert row["losses"] == [7.5]


def test_keys_are_set_and_variants_are_sides() -> None:
    case = changed(CASES["full-8B-8192"], ["layers=12"])
    assert model_config(case.size, case.layers)["num_hidden_layers"] == 12
    assert parsed(["a=true", "b=none", "c=2"]) == {"a": True, "b": "none", "c": 2}
    assert train_settings(case, ["recompute=full"]).recompute == "full"
    found = list(sides_of(case, ["ours", "zero2"], ["compile=false,recompute=full"]))
    assert [name for name, _ in found] == ["ours", "ours: compile=false,recompute=full", "zero2"]
    assert found[1][1] == ["compile=false", "recompute=full"]


def test_documents_that_a_peer_would_leave_out_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train", "lora-8B-1000", "--set", "rank_documents=31", "--sides", "ours"]
    )
    assert parse().sides == ["ours"]
    sys.argv.append("tutorial")
    with pytest.raises(SystemExit):
        parse()
    assert "tutorial takes 4 documents at a time" in capsys.readouterr().err


@pytest.mark.slow
def test_a_race_ends_with_rows_of_equal_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setenv("COLUMNS", "160")
    command = f"train tiny-lora --sides ours flattened --ranks 1 --steps 5 --out {out} --variant"
    monkeypatch.setattr(sys, "argv", [*command.split(), "lr=oops"])
    with pytest.raises(SystemExit):
        main()
    sys.argv[-1] = "recompute=full"
    main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["side"] for row in rows] == ["ours", "ours: recompute=full", "flattened"]
    assert all(row["losses"][0] == pytest.approx(rows[0]["losses"][0], abs=1e-3) for row in rows)
    assert all(row["tokens_per_s"] > 0 and row["start_s"] > 0 for row in rows)
    assert "tiny-lora: flattened: " in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_that_share_blocks_take_the_documents_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    command = (
        f"train tiny-full --sides ours --ranks 2 --steps 4 --out {out} --variant "
        "context_ranks=2,strategy=fsdp"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    main()
    apart, shared = json.loads(out.read_text())["rows"]
    assert shared["side"] == "ours: context_ranks=2,strategy=fsdp"
    assert shared["losses"] == pytest.approx(apart["losses"], abs=1e-3)


def test_ranks_in_turn_make_a_table_of_scaling(capsys: pytest.CaptureFixture[str]) -> None:
    told = [{"kind": "step", "step_s": 0.5, "loss": 1.0}] * 5
    one, two = (row_of(CASES["tiny-full"], "ours", ranks, told, 3.0) for ranks in (1, 2))
    two["tokens_per_s"] *= 0.9
    show_scaling([one, two])
    table = capsys.readouterr().out.rpartition("100 M tokens")[2]
    assert f"{1e8 / two['tokens_per_s'] / 2 / 60:.1f} min" in table
    assert "100.0%" in table and f"{two['tokens_per_s'] / one['tokens_per_s']:.1%}" in table


def test_the_plan_is_put_beside_what_was_measured() -> None:
    row = {
        "case": "full-8B-1000",
        "side": "ours",
        "name": "full-8B-1000: ours",
        "ranks": 2,
        "layers": 8,
    }
    # on two H200, benchmarks/RESULTS.md
    measured = {**row, "step_s": 0.419, "peak_bytes": 42.4 * 2**30}
    shown = cells(measured, foreseen(measured, "h200", []))
    assert all(abs(float(error.rstrip("%"))) < 5 for error in (shown[4], shown[7]))
    less = foreseen({**measured, "side": "ours: recompute=full"}, "h200", [])
    assert (
        less.peak_memory_bytes.value < 0.8 * foreseen(measured, "h200", []).peak_memory_bytes.value
    )
    assert (
        foreseen(measured, "h200", ["recompute=full"]).peak_memory_bytes.value
        == less.peak_memory_bytes.value
    )
    four = foreseen(measured, "h200", [], ["rank_blocks=4", "rank_documents=64"])
    assert 3.5 < four.step_s.value / 0.419 < 4.0  # one update for four micro-batches


@pytest.mark.parametrize(
    ("side", "layers", "ranks", "step_s", "peak_gib", "changes"),
    [
        ("ours", 6, 1, 0.244, 73.3, []),
        ("ours: compile=false", 4, 2, 0.247, 37.9, ["strategy=fsdp", "router_aux_loss=0.001"]),
    ],
)
def test_the_plan_foresees_what_experts_took_on_h200(
    side: str, layers: int, ranks: int, step_s: float, peak_gib: float, changes: list[str]
) -> None:
    """RESULTS.md, 2026-11-23; time by a rate that these runs set, memory by a formula."""
    found = foreseen(
        {"case": "moe-30B-A3B-cut", "side": side, "layers": layers, "ranks": ranks}, "h200", changes
    )
    assert found.step_s.value == pytest.approx(step_s, rel=0.065)
    assert found.peak_memory_bytes.value == pytest.approx(peak_gib * GIB, rel=0.1)
