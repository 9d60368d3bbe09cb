"""The table as people see it."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from pipeline_lib.status.progress import Numbers
from pipeline_lib.status.survey import STATES, Status
from pipeline_lib.status.table import render, to_json

FULL = Numbers(
    step=12_345, last_step=100_000, loss=11.2345, tokens_per_s=1_234_567.0, eta_s=360_000.0, elapsed_s=86_400.0,
    since_step_s=1.0, attempt=3, requeues=2, peak_memory_bytes=10**11, checkpoint_step=12_000, checkpoint_age_s=3599.0,
)  # fmt: skip
LONG = Status(
    experiment="qwen3-8b-lora-lr=0.0002-seed=17",
    frozen="0123456789abcdef",
    stage="tokenize",
    digest="fedcba9876543210",
    state="interrupted",
    numbers=FULL,
    job="12345678",
    reason="rank 3: [/red] lost a peer: " + "words " * 60,
    advice="run snakemake again",
    log="logs/train/fedcba9876543210.log",
)


def text_of(found: list[Status], width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False, highlight=False).print(
        render(found, "store/experiments", width)
    )
    return stream.getvalue().rstrip("\n").split("\n")


HEAD = "experiment stage state step loss tokens/s ETA elapsed attempt memory job saved"


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (60, ["loss", "tokens/s", "elapsed", "attempt", "memory", "job", "saved"]),
        (80, ["tokens/s", "elapsed", "attempt", "memory", "job"]),
        (100, ["elapsed", "attempt", "memory"]),
        (160, []),
    ],
)
def test_the_widest_row_fits_with_nothing_cut_off(width: int, left_out: list[str]) -> None:
    lines = text_of([LONG], width)

    assert max(len(line.rstrip()) for line in lines) <= width
    rows = lines[: next(index for index, line in enumerate(lines) if not line.strip())]
    assert rows[0].split() == [name for name in HEAD.split() if name not in left_out]
    assert "".join(row.split(" ")[0] for row in rows) == f"experiment{LONG.experiment}"
    values = dict(
        zip(
            HEAD.split()[1:],
            ["tokenize", "interrupted", "12345/100000", "11.2345", "1,234,567"],
            strict=False,
        )
    )
    values |= {
        "ETA": "100:00:00",
        "elapsed": "24:00:00",
        "attempt": "3,",
        "memory": "GiB",
        "job": "12345678",
        "saved": "12000",
    }
    cells = rows[1].replace(",  59", " 59").replace("12000,", "12000").split()
    assert [
        values[name] for name in values if name not in left_out and values[name] not in cells
    ] == []


def test_columns_without_a_value_are_left_out() -> None:
    plain = Status("demo", "0", "download", "1", "running")

    assert text_of([plain], 100)[0].split() == ["experiment", "stage", "state"]
    assert text_of([plain, replace(LONG, job=None)], 180)[0].split() == [
        "experiment", "stage", "state", "step", "loss", "tokens/s", "ETA", "elapsed", "attempt", "memory", "saved",
    ]  # fmt: skip


def test_what_to_do_is_said_once_for_all_that_wait_for_a_stage() -> None:
    names = [f"sweep-{number}" for number in range(7)]
    lines = text_of([replace(LONG, experiment=name) for name in names], 100)

    text = "\n".join(lines)
    assert text.count("then: run snakemake again") == 1
    assert "sweep-0, sweep-1, sweep-2, sweep-3, sweep-4 and 2 more: interrupted in tokenize" in text
    assert "attempt 3, queued again by SLURM 2 times" in text
    assert "log: logs/train/fedcba9876543210.log" in text


def test_an_empty_store_says_so() -> None:
    assert text_of([], 100) == [
        "store/experiments: no experiments yet; snakemake adds them when it starts"
    ]


def test_the_keys_of_the_json_stay() -> None:
    """Other programs read them."""
    [value] = json.loads(to_json([LONG]))

    assert list(value) == [
        "experiment", "frozen", "stage", "digest", "state", "owner", "job", "job_state", "reason", "advice", "log",
        "slurm_log", "finished", "step", "last_step", "loss", "tokens_per_s", "eta_s", "elapsed_s", "since_step_s",
        "attempt", "requeues", "peak_memory_bytes", "checkpoint_step", "checkpoint_age_s", "is_stalled",
        "gpu_utilization", "warnings",
    ]  # fmt: skip
    assert set(STATES) == {
        "running", "requeued", "waiting", "failed", "interrupted", "unreadable", "not begun", "stopped", "done",
    }  # fmt: skip
