"""With accounting, sacct knows what became of jobs, and only users with an account submit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_accounting

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_accounting]
NO_ACCOUNT = "Invalid account or account/partition combination specified"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=1, accounting=True) as made:
        yield made


def test_sacct_shows_what_became_of_jobs(slurm: Loopback, tmp_path: Path) -> None:
    good = slurm.submit("true", tmp_path / "good.log", "--account=lab", "--gres=gpu:2")
    bad = slurm.submit("exit 3", tmp_path / "bad.log")
    assert (slurm.wait(good, 30), slurm.wait(bad, 30)) == ("COMPLETED", "FAILED")

    def recorded() -> list[str]:
        shown = [
            "--noheader",
            "--parsable2",
            "--allocations",
            "--format=JobID,State,ExitCode,AllocTRES%80,Account",
        ]
        return slurm.call("sacct", *shown, f"--jobs={good},{bad}").splitlines()

    wait_for(
        lambda: [line.split("|")[1] for line in recorded()] == ["COMPLETED", "FAILED"],
        "the records",
    )
    first, second = recorded()
    assert first.startswith(f"{good}|COMPLETED|0:0|") and first.endswith("|lab")
    assert "gres/gpu=2" in first
    assert second.startswith(f"{bad}|FAILED|3:0|")


def test_without_an_account_nobody_may_submit(slurm: Loopback) -> None:
    of_stranger = slurm.attempt("runuser", "-u", "nobody", "--", "sbatch", "--wrap=true")
    of_unknown = slurm.attempt("sbatch", "--account=nosuch", "--wrap=true")

    assert of_stranger.returncode == of_unknown.returncode == 1
    assert NO_ACCOUNT in of_stranger.stderr
    assert NO_ACCOUNT in of_unknown.stderr
