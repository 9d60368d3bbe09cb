"""Batches in samples, and the number of steps: exact with blocks, estimated from files before."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
import pytest

from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.store import Store
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.plan.steps import (
    Steps,
    batch_without_data,
    estimated_steps,
    idle_ranks,
    plan_batches,
    step_warnings,
)
from pipeline_lib.plan.warnings import on_steps
from pipeline_lib.plan.workload import assumed_workload, workload_from
from pipeline_lib.records.data import BlockGroup
from pipeline_lib.records.plan import Workload
from tests.stages import run_stages_here

BLOCK = 60


def blocks_of(folder: Path, *groups: tuple[float, int, int]) -> BlockReader:
    """Groups of (weight, blocks, documents in each block), all blocks full."""
    bins = []
    for _, blocks, documents in groups:
        tokens = np.arange(BLOCK // documents, dtype=np.int32)
        bins += [[Document(tokens, tokens >= len(tokens) / 2)] * documents] * blocks
    write_blocks(
        folder, bins, BLOCK, 3, [BlockGroup(weight, blocks) for weight, blocks, _ in groups]
    )
    return BlockReader(folder)


def steps_found(config: Config, store: Store) -> tuple[list[str], list[str]]:
    """The notes on the number of steps, and the warnings about them."""
    found = list(on_steps(config, store))
    notes = [one.text for one in found if one.kind == "note"]
    return notes, [one.text for one in found if one.kind == "warning"]


def planned(reader: BlockReader, ranks: int = 1, **train: Any) -> Any:
    workload = workload_from(reader.index, reader.costs, reader.samples_per_block(), 1)
    return plan_batches(Train(**train), ranks, reader.index, workload)


def test_samples_of_a_block_are_a_mean_over_what_an_epoch_uses(tmp_path: Path) -> None:
    assert blocks_of(tmp_path / "one", (1.0, 7, 4)).samples_per_block() == 4
    reader = blocks_of(tmp_path / "two", (0.5, 8, 10), (2.0, 3, 2))
    assert reader.samples_per_block() == pytest.approx(
        (0.5 * 8 * 10 + 2.0 * 3 * 2) / (0.5 * 8 + 2.0 * 3)
    )


@pytest.mark.parametrize(
    ("samples", "ranks", "blocks"), [(16, 1, 4), (64, 8, 16), (17, 1, 4), (60, 8, 15), (23, 1, 6)]
)
def test_a_step_takes_the_blocks_that_hold_its_samples(
    tmp_path: Path, samples: int, ranks: int, blocks: int
) -> None:
    batch = planned(
        blocks_of(tmp_path / "blocks", (1.0, 50, 4)), ranks, global_batch_samples=samples
    )
    assert batch.global_batch_blocks == blocks
    assert batch.accumulation == -(-blocks // ranks)
    assert (batch.samples_per_step, batch.supervised_tokens_per_step) == (
        4 * blocks,
        blocks * 4 * 7,
    )
    assert (batch.tokens_per_step, batch.steps) == (blocks * BLOCK, -(-50 // blocks))


@pytest.mark.parametrize(
    ("settings", "ranks", "problem"),
    [
        (
            {"global_batch_samples": 2},
            1,
            "2 cannot be met within 10%: .* 4.0 samples .*; set 4, or .*block_tokens .and "
            "tokenize.max_tokens. to 30",
        ),
    ],
)
def test_samples_that_blocks_cannot_meet_are_refused_with_what_would_do(
    tmp_path: Path, settings: dict[str, Any], ranks: int, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        planned(blocks_of(tmp_path / "blocks", (1.0, 50, 4)), ranks, **settings)


@pytest.mark.parametrize(
    ("settings", "ranks", "warning"),
    [
        (
            {"global_batch_samples": 48},
            8,
            "12 blocks .* 8 ranks are idle for 25%.* set 32 or 64, or 6 ranks",
        ),
        (
            {"global_batch_samples": 12, "context_ranks": 1},
            8,
            "3 blocks .*idle for 62%.* set 32, or 3 ranks, or shard.block_tokens .and "
            "tokenize.max_tokens. 22",
        ),
        (
            {"global_batch_samples": 20, "micro_batch_blocks": 4},
            1,
            "1 rank x 4 blocks are idle for 38%",
        ),
        (
            {"global_batch_samples": 96, "micro_batch_blocks": 2},
            8,
            "8 ranks x 2 blocks are idle for 25%",
        ),
        # 8 ranks take 16 blocks at a time, and 8 of them if two share each.
        ({"global_batch_samples": 32, "micro_batch_blocks": 2}, 8, None),
    ],
)
def test_ranks_that_samples_leave_idle_are_named_with_what_would_keep_them_busy(
    tmp_path: Path, settings: dict[str, Any], ranks: int, warning: str | None
) -> None:
    reader = blocks_of(tmp_path / "blocks", (1.0, 50, 4))
    workload = workload_from(reader.index, reader.costs, reader.samples_per_block(), 0)
    assert planned(reader, ranks, **settings).steps
    found = idle_ranks(Train(**settings), ranks, workload)
    assert (found is None) == (warning is None)
    if warning is not None:
        assert re.search(warning, str(found))


def test_local_sgd_refuses_idle_ranks(tmp_path: Path) -> None:
    """Such a rank has nothing to update with."""
    reader = blocks_of(tmp_path / "blocks", (1.0, 50, 4))
    with pytest.raises(DataError, match="8 ranks are idle for 25%"):
        planned(reader, 8, global_batch_samples=48, local_sgd_steps=2)


def test_max_steps_is_the_length_of_the_run_and_may_pass_the_data(tmp_path: Path) -> None:
    reader = blocks_of(tmp_path / "blocks", (1.0, 50, 4))
    batch = planned(reader, global_batch_samples=40, max_steps=12)
    assert (batch.steps, batch.steps_per_epoch, batch.epochs) == (12, 5, 2.4)
    assert planned(reader, global_batch_samples=40, max_steps=12, until_step=3).steps == 3
    assert planned(reader, global_batch_samples=40, epochs=0.5).steps == 3


def test_a_warm_up_as_long_as_the_run_is_refused(tmp_path: Path) -> None:
    reader = blocks_of(tmp_path / "blocks", (1.0, 50, 4))
    with pytest.raises(DataError, match=r"warmup_steps: 50 of the 50 steps.*; 5 would be a tenth"):
        planned(reader, global_batch_samples=4, warmup_steps=50)
    assert planned(reader, global_batch_samples=4, warmup_steps=49).steps == 50


def store_in(folder: Path) -> Store:
    """A store that remembers what its files hold."""
    return Store(folder / "store", UserCache(folder / "cache"))


def rows_file(path: Path, rows: int) -> Path:
    row = {
        "instruction": "What is a list in Python, and what is it good for? " * 2,
        "output": "A sequence. " * 8,
    }
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(rows)))
    return path


def config_of(folder: Path, data: Path, train: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(
        f"experiment: my\nmodel: {{source: tiny}}\ndata: {{train: [{{source: file, path: "
        f"{data}}}]}}\n"
        f"tokenize: {{max_tokens: 256}}\nshard: {{block_tokens: 256}}\ncluster: {{cpu_ranks: "
        f"1}}\ntrain: {train}\n"
    )
    return path


@pytest.mark.parametrize("rows", [900, 5000])  # all of which are read, and more than are read
def test_rows_are_counted_or_extrapolated(tmp_path: Path, rows: int) -> None:
    path = config_of(
        tmp_path, rows_file(tmp_path / "rows.jsonl", rows), "{global_batch_samples: 8, epochs: 2}"
    )
    config = load_config(path)
    steps = estimated_steps(
        config, batch_without_data(config.train, 1, assumed_workload(config)), None
    )
    assert steps is not None
    kept = rows * (1 - config.data.validation_fraction)
    assert steps.epoch is not None
    assert steps.epoch[1] == pytest.approx(kept / 8, rel=0.02)
    assert steps.run[1] == 2 * steps.epoch[1]
    assert steps.epoch[0] < kept / 8 < steps.epoch[2]


def test_the_range_of_a_small_vocabulary_holds_what_packing_makes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = [
        {"prompt": f"Where is order {n}?", "completion": f"Order {n} has left our warehouse."}
        for n in range(600)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    path = config_of(tmp_path, rows, "{global_batch_tokens: 1024, epochs: 2}")
    store = store_in(tmp_path)
    config = load_config(path)
    [told], _ = steps_found(config, store)
    run_stages_here(path, store, last="shard")
    [exact], _ = steps_found(config, store)
    low, high = map(int, re.search(r"\((\d+) to (\d+)\)", told).groups())  # type: ignore[union-attr]
    assert low <= int(exact.split()[0]) <= high, (told, exact)


def test_the_range_of_chinese_text_in_the_demo_vocabulary_holds_what_packing_makes(
    tmp_path: Path,
) -> None:
    """None of its characters are in that vocabulary: each is three tokens."""
    rows = tmp_path / "rows.jsonl"
    asked = [
        {
            "prompt": f"第{n}号订单现在到哪里了？",
            "completion": "您的订单已经离开仓库，预计明天送达。",
        }
        for n in range(200)
    ]
    rows.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in asked), encoding="utf-8"
    )
    path = config_of(tmp_path, rows, "{global_batch_tokens: 1024, epochs: 1}")
    store = store_in(tmp_path)
    [told], _ = steps_found(load_config(path), store)
    run_stages_here(path, store, last="shard")
    [exact], _ = steps_found(load_config(path), store)
    low, high = map(int, re.findall(r"\d+", told)[1:3])
    assert low <= int(exact.split()[0]) <= high, (told, exact)


@pytest.mark.parametrize(("over_long", "most"), [("drop", 0), ("truncate", 2)])
def test_a_row_counts_for_no_more_than_the_tokenize_stage_keeps_of_it(
    tmp_path: Path, over_long: str, most: int
) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", 400)
    path = config_of(tmp_path, rows, "{global_batch_tokens: 256}")
    path.write_text(
        path.read_text().replace("max_tokens: 256", f"max_tokens: 256, over_long: {over_long}")
    )
    config = load_config(path)
    batch = batch_without_data(config.train, 1, assumed_workload(config))
    without = estimated_steps(config, batch, None)
    with rows.open("a") as file:
        file.write(json.dumps({"instruction": "What is this?", "output": "word " * 200_000}) + "\n")
    found = estimated_steps(config, batch, None)
    assert found is not None and without is not None
    assert all(0 <= one - other <= most for one, other in zip(found.run, without.run, strict=True))


def test_the_rows_of_a_saved_data_set_are_counted_in_its_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(
        list(map(json.loads, rows_file(tmp_path / "rows.jsonl", 5000).open()))
    )
    datasets.DatasetDict(dev=rows.select([0]), test=rows).save_to_disk(tmp_path / "saved")
    path = config_of(tmp_path, Path("saved, split: test"), "{global_batch_samples: 8}")
    path.write_text(path.read_text().replace("path: saved", f"path: {tmp_path}/saved"))
    config = load_config(path)
    steps = estimated_steps(
        config, batch_without_data(config.train, 1, assumed_workload(config)), None
    )
    assert steps is not None and steps.epoch is not None
    assert steps.epoch[1] == pytest.approx(
        5000 * (1 - config.data.validation_fraction) / 8, rel=0.02
    )
    path.write_text(path.read_text().replace("split: test", "split: train"))
    config = load_config(path)
    assert (
        estimated_steps(config, batch_without_data(config.train, 1, assumed_workload(config)), None)
        is None
    )


def test_data_that_is_not_here_is_not_guessed(tmp_path: Path) -> None:
    path = config_of(tmp_path, tmp_path / "rows.jsonl", "{}")
    path.write_text(
        path.read_text().replace(f"source: file, path: {tmp_path}/rows.jsonl", "source: pydoc")
    )
    config = load_config(path)
    assert (
        estimated_steps(config, batch_without_data(config.train, 1, assumed_workload(config)), None)
        is None
    )
    assert steps_found(config, Store(tmp_path / "store")) == ([], [])


def warned(steps: int, band: int = 0, ranks: int = 1, **train: Any) -> list[str]:
    settings = Train(**{"global_batch_tokens": 64 * BLOCK, **train})
    batch = batch_without_data(
        settings, ranks, Workload(BLOCK, 1.0, 0.5, 15.0, None, None, samples_per_block=4.0)
    )
    return list(
        step_warnings(settings, batch, Steps(None, (steps - band, steps, steps + band)), ranks)
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (warned(50), []),
        (warned(49, band=1), []),
        (
            warned(10),
            [
                "train.global_batch_tokens: 10 opt.* in all, fewer than 50; "
                "train.global_batch_tokens 720 or .* 5 would"
            ],
        ),
        (
            warned(10, ranks=8),
            ["fewer than 50; train.global_batch_tokens 480 or train.epochs 5 would"],
        ),
        (warned(10, ranks=16), ["fewer than 50; train.epochs 5 would make 50$"]),
        (
            warned(10, global_batch_samples=256),
            [
                "train.global_batch_samples: .* train.global_batch_samples 48 or train.epochs 5 "
                "would make 50"
            ],
        ),
        (warned(20, epochs=0.5), ["; train.global_batch_tokens 1,500 or train.epochs 2 would"]),
        (
            warned(40, max_steps=40),
            ["train.max_steps: 40 optimizer steps in all, fewer than 50; set .* to 50 or more"],
        ),
        (
            warned(100, save_every_steps=101),
            ["train.save_every_steps: 101 is beyond the end .*, 100 .*; try 25"],
        ),
        (
            warned(100, validate_every_steps=500),
            ["train.validate_every_steps: 500 is beyond the end .*; try 25"],
        ),
        (warned(100, until_step=101), ["train.until_step: 101 is beyond the end .*; try 25"]),
        (
            warned(100, sample_every_steps=200, profile_every_steps=200),
            ["train.sample_every_steps: 200 is", "train.profile_every_steps: 200 is"],
        ),
        (warned(60), []),  # the default of save_every_steps, 100, is nobody's wish
        (
            warned(100, band=20, warmup_steps=100),
            ["warmup_steps: 100 of about 100 optimizer steps .80 to 120.; 10 is"],
        ),
    ],
)
def test_short_runs_are_warned_of_with_the_value_that_would_do(
    found: list[str], expected: list[str]
) -> None:
    assert len(found) == len(expected)
    assert all(re.search(pattern, text) for pattern, text in zip(expected, found, strict=True)), (
        found
    )


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"global_batch_tokens": 2048},
            "train.global_batch_tokens 800 with {shorter} 400 or train.epochs 3 would make 50",
        ),
        (
            {"global_batch_samples": 16},
            "train.global_batch_samples 6 with {shorter} 400 or train.epochs 3 would make 50",
        ),
    ],
)
def test_a_smaller_batch_than_the_blocks_allow_takes_shorter_blocks(
    settings: dict[str, Any], remedy: str
) -> None:
    """Where the block alone is shorter, a step takes more of them, and the step count stays."""
    train = Train(**settings)
    batch = batch_without_data(
        train, 2, Workload(1024, 1.0, 0.5, 128.0, None, None, samples_per_block=8.0)
    )
    [found] = step_warnings(train, batch, Steps(None, (10, 20, 30)), 2)
    assert found.endswith(
        "; " + remedy.format(shorter="shard.block_tokens (and tokenize.max_tokens)")
    )


def rows_of(config: Path, **train: Any) -> Config:
    loaded = load_config(config)
    return loaded.model_copy(update={"train": loaded.train.model_copy(update=train)})


def test_samples_that_short_rows_will_not_meet_are_warned_of_before_packing(tmp_path: Path) -> None:
    """As the plan of the packed blocks refuses them; the values named do then."""
    rows = tmp_path / "rows.jsonl"
    asked = [
        {"prompt": f"Where is order {n}?", "completion": f"Order {n} has left our warehouse."}
        for n in range(600)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    path = config_of(tmp_path, rows, "{global_batch_samples: 16, epochs: 40}")
    store = store_in(tmp_path)
    path.write_text(path.read_text().replace("block_tokens: 256", "block_tokens: 2048"))
    [warning] = steps_found(load_config(path), store)[1]
    found = re.fullmatch(
        r"train.global_batch_samples: 16 is likely to be refused once the data is packed: by the first rows of the "
        r"files, a block of 2,048 tokens would hold about (\d+) samples, and a step takes whole blocks; set "
        r"train.global_batch_tokens: 2,048 instead, about \1 samples, or train.global_batch_samples to (\d+) or more, "
        r"or shard.block_tokens \(and tokenize.max_tokens\) to (\d+) or less",
        warning,
    )
    assert found is not None, warning
    run_stages_here(path, store, last="shard")
    [refusal] = on_steps(load_config(path), store)
    assert (refusal.kind, refusal.key) == ("refusal", "train.global_batch_samples")
    assert refusal.sentence.startswith("16 cannot be met within 10%")
    for settings in (
        {"global_batch_samples": None, "global_batch_tokens": 2048},
        {"global_batch_samples": int(found[2])},
    ):
        assert steps_found(rows_of(path, **settings), store)[0]
    shorter = path.read_text().replace("block_tokens: 2048", f"block_tokens: {found[3]}")
    path.write_text(shorter.replace("max_tokens: 256", f"max_tokens: {found[3]}"))
    assert steps_found(load_config(path), store)[1] == []
    run_stages_here(path, store, last="shard")
    assert steps_found(load_config(path), store)[0]


def test_ranks_that_short_rows_would_leave_idle_are_warned_of_before_packing(
    tmp_path: Path,
) -> None:
    path = config_of(
        tmp_path,
        rows_file(tmp_path / "rows.jsonl", 400),
        "{global_batch_samples: 14, context_ranks: 1}",
    )
    path.write_text(path.read_text().replace("cpu_ranks: 1", "cpu_ranks: 4"))
    [_, warning] = steps_found(load_config(path), store_in(tmp_path))[1]
    assert re.search(r"4 ranks are idle for \d+% of the time; set \d+", warning)


def test_sixteen_short_samples_on_four_ranks_train_as_articles_have_them(tmp_path: Path) -> None:
    """A length of 1,024 for samples of 50 tokens: shorter blocks are offered before packing.

    After packing they do.
    """
    rows = tmp_path / "rows.jsonl"
    asked = [
        {"prompt": f"Where is order {n}?", "completion": f"Order {n} has left our house."}
        for n in range(600)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    path = config_of(tmp_path, rows, "{strategy: zero2, global_batch_samples: 16, epochs: 4}")
    store = store_in(tmp_path)
    text = (
        path.read_text()
        .replace("cpu_ranks: 1", "cpu_ranks: 4")
        .replace("tokens: 256", "tokens: 1024")
    )
    path.write_text(text)
    [warning] = [text for text in steps_found(load_config(path), store)[1] if "refused" in text]
    offered = re.search(r"shard.block_tokens .and tokenize.max_tokens. to (\d+) or less$", warning)
    assert offered is not None, warning
    path.write_text(text.replace("tokens: 1024", f"tokens: {offered[1]}"))
    run_stages_here(path, store, last="plan")
    [exact], _ = steps_found(load_config(path), store)
    assert exact.split()[0].isdecimal()


def said_by(command: str, path: Path) -> str:
    """All that the command says of the config at `path`, in one line."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", command, str(path)], capture_output=True, text=True, check=False,
        cwd=path.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_check_and_the_plan_say_how_many_steps_there_will_be(tmp_path: Path) -> None:
    path = config_of(
        tmp_path, rows_file(tmp_path / "rows.jsonl", 400), "{global_batch_samples: 40}"
    )
    for command in ("check", "plan"):
        shown = said_by(command, path)
        assert re.search(
            r"about 10 optimizer steps \(6 to 13(\), estimated from| by) the first rows", shown
        )
        assert (
            "train.global_batch_samples: about 10 optimizer steps (6 to 13) in all, fewer than 50; "
            "train." in shown
        )
        assert "is likely to be refused" not in shown


def test_check_and_the_plan_warn_of_samples_that_blocks_will_not_meet(tmp_path: Path) -> None:
    path = config_of(tmp_path, rows_file(tmp_path / "rows.jsonl", 400), "{global_batch_samples: 2}")
    for command in ("check", "plan"):
        shown = said_by(command, path)
        assert shown.count("warning: train.global_batch_samples: 2 is likely to be refused") == 1, (
            shown
        )
