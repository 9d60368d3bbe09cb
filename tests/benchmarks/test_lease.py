"""Commands side by side on the GPUs of a machine that is lent for a while."""

import importlib.util
import shlex
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.lease import Job, read_jobs, run
from benchmarks.train.__main__ import parse

ROOT = Path(__file__).parents[2]


def test_each_job_has_gpus_of_its_own_and_the_first_line_goes_first(tmp_path: Path) -> None:
    tell = "echo $CUDA_VISIBLE_DEVICES; cp /proc/uptime {out}/%s; sleep 0.5"
    jobs = [
        Job("two", 2, 60, tell % "two.up"),
        Job("one", 1, 60, tell % "one.up"),
        Job("all", 3, 60, tell % "all.up"),
    ]
    assert run(jobs, 3, tmp_path, time.monotonic() + 100) == {"two": 0, "one": 0, "all": 0}
    assert [(tmp_path / f"{job.name}.log").read_text() for job in jobs] == [
        "0,1\n",
        "2\n",
        "0,1,2\n",
    ]
    begun_s = {
        name: float((tmp_path / f"{name}.up").read_text().split()[0])
        for name in ("two", "one", "all")
    }
    assert begun_s["all"] >= max(begun_s["two"], begun_s["one"]) + 0.4


def test_what_is_late_is_killed_with_its_children_and_its_log_is_kept(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    late = Job("late", 1, 1, "echo begun; sleep 300 & sleep 300")
    codes = run([late, Job("failing", 1, 60, "exit 3")], 1, tmp_path, time.monotonic() + 100)
    assert codes == {"late": -9, "failing": 3}
    assert time.monotonic() - begun_s < 30
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["failing.log", "late.log"]
        log = archive.extractfile("late.log")
        assert log is not None
        assert log.read() == b"begun\n"


def test_nothing_starts_that_the_limit_would_cut_short(tmp_path: Path) -> None:
    jobs = [
        Job("first", 1, 60, "true"),
        Job("too large", 2, 60, "true"),
        Job("second", 1, 60, "true"),
    ]
    assert run(jobs, 1, tmp_path, time.monotonic() + 1) == {}
    assert run(jobs, 1, tmp_path, time.monotonic() + 100) == {"first": 0, "second": 0}


def test_a_list_is_read_and_a_wrong_line_named() -> None:
    assert read_jobs("# scaling\n\na 2 60 echo {out} x\n") == [Job("a", 2, 60.0, "echo {out} x")]
    with pytest.raises(
        ValueError, match=r"line 2: expected NAME GPUS SECONDS COMMAND, found 'b two 3 x'"
    ):
        read_jobs("a 1 2 x\nb two 3 x")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "leases").glob("*.txt")), ids=lambda path: path.stem
)
def test_the_lists_that_are_kept_ask_for_what_exists(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job in read_jobs(path.read_text()):
        python, _, module, *arguments = shlex.split(job.command)
        assert python == "python"
        if module == "benchmarks.train":
            monkeypatch.setattr("sys.argv", [module, *arguments])
            assert parse().cases
        elif module == "pytest":
            assert all((ROOT / part).exists() for part in arguments if part.startswith("tests/"))
        else:
            assert importlib.util.find_spec(module) is not None
