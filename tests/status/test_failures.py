"""What snakemake shows last: which jobs failed, why, where their logs are, what to type."""

from pathlib import Path

import pytest

from pipeline_lib.core.errors import BUG, CONTINUES, end_of_log, exit_line
from pipeline_lib.status.failures import MOST_FAILURES, Failure, last_words

COMMAND = "snakemake train"


def failed(folder: Path, text: str, name: str = "train", executor_message: str = "") -> Failure:
    log = folder / f"{name}.log"
    log.write_text(text)
    return Failure(f"demo: {name}", (log,), executor_message)


def test_a_failed_job_with_its_error_its_log_and_the_command(tmp_path: Path) -> None:
    text = f"step 1\nerror: rows cannot be used:\n  rows.jsonl:31: bad_json\n{exit_line(65)}\n"
    assert last_words([failed(tmp_path, text)], ["Snakemake's own"], COMMAND).splitlines() == [
        "error: 1 job failed",
        "- demo: train",
        "    rows cannot be used:",
        "      rows.jsonl:31: bad_json",
        f"    log: {tmp_path}/train.log",
        f"once the cause is fixed, the same command continues: {COMMAND}",
    ]


def test_each_of_several_is_named_and_what_was_only_interrupted_is_not_among_them(
    tmp_path: Path,
) -> None:
    failures = [
        failed(tmp_path, f"error: no room\n{exit_line(74)}\n", f"train {number}")
        for number in (1, 2)
    ]
    failures.append(failed(tmp_path, f"error: stopped by a signal\n{exit_line(75)}\n", "merge"))
    words = last_words(failures, [], COMMAND)
    assert words.startswith("error: 2 jobs failed\n")
    assert [name in words for name in ("train 1", "train 2", "merge")] == [True, True, False]
    assert words.count("no room") == 2


@pytest.mark.parametrize(
    "end", [f"error: saved; {CONTINUES}\n{exit_line(75)}\n", f"stopped; {CONTINUES}\n"]
)
def test_what_was_stopped_has_not_failed(tmp_path: Path, end: str) -> None:
    words = last_words([failed(tmp_path, f"step 1\n{end}")], [], COMMAND)
    assert words.startswith("stopped: 1 job interrupted\n")
    assert words.endswith(f"\nthe same command continues: {COMMAND}")


def test_a_job_that_was_killed_shows_the_end_of_its_log_and_what_slurm_said(tmp_path: Path) -> None:
    killed = failed(
        tmp_path,
        "step 1\nstep 2\n",
        executor_message="SLURM-job '7' failed, SLURM status is: 'OUT_OF_MEMORY'.",
    )
    assert "SLURM status is: 'OUT_OF_MEMORY'" in last_words([killed], [], COMMAND)
    assert "it was killed" in last_words([failed(tmp_path, "step 1\nstep 2\n")], [], COMMAND)
    assert "      step 2\n" in last_words([killed], [], COMMAND)


def test_a_job_that_was_never_submitted_says_why(tmp_path: Path) -> None:
    refused = Failure(
        "demo: train", (tmp_path / "none.log",), "SLURM sbatch failed: invalid account"
    )
    words = last_words([refused], [], COMMAND)
    assert "SLURM sbatch failed: invalid account" in words
    assert "log: " not in words


def test_without_a_failed_job_snakemakes_own_error_counts_and_else_the_user_stopped_it() -> None:
    assert last_words([], ["Missing files after 60 seconds", "later"], COMMAND).startswith(
        "error: Missing files"
    )
    assert (
        last_words([], [], COMMAND)
        == f"stopped before the end; the same command continues: {COMMAND}"
    )


def test_many_are_counted_and_no_secret_is_shown(tmp_path: Path) -> None:
    text = f"error: refused: token=abcdefghijklmnop\n{exit_line(69)}\n"
    words = last_words(
        [failed(tmp_path, text, f"train {number}") for number in range(MOST_FAILURES + 3)],
        [],
        COMMAND,
    )
    assert "error: 13 jobs failed" in words
    assert "and 3 more\n" in words
    assert "abcdefgh" not in words


def test_the_error_that_ends_a_log_is_the_last_one() -> None:
    end = end_of_log(
        f"error: first\n{exit_line(75)}\nstep 3\nerror: second\nin SLURM job 7\n{exit_line(65)}\n"
    )
    assert end is not None
    assert (end.message, end.exit_code, end.is_interruption) == (
        "second\nin SLURM job 7",
        65,
        False,
    )
    assert end_of_log("step 1\n") is None
    bug = end_of_log(
        f"Traceback (most recent call last):\n  ...\nKeyError: 'x'\n{BUG}; the traceback above "
        "says where\n"
    )
    assert bug is not None
    assert bug.message.startswith("KeyError: 'x'\n")
