"""What became of the experiments of a sweep, by the logs that it left."""

import os
import time
from pathlib import Path

import pytest

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.store import Store
from pipeline_lib.report.outcomes import note_begin, tell_outcomes
from tests.status.stubs import CONFIG


@pytest.mark.parametrize(
    "ahead_s", [-3600, 0, 3600], ids=["server behind", "one clock", "server ahead"]
)
def test_a_log_of_this_call_is_told_from_an_older_one_whatever_the_server_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Logs may lie on a file server whose clock is not ours."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "swept.yaml"
    config.write_text(
        CONFIG.format(name="swept", lr="1.0e-3") + "sweep: {train.lr: [1.0e-3, 2.0e-3]}\n"
    )
    dag = Dag.compile([str(config)], {}, Store(tmp_path / "store"))
    first = next(iter(dag.experiments[0].specs.values()))
    said: list[str] = []
    log = tmp_path / "logs" / first.stage / f"{first.digest}.log"
    log.parent.mkdir(parents=True)
    log.touch()
    note_begin()
    begun = tmp_path / "logs" / "begun"
    begun_s = time.time() + ahead_s
    os.utime(begun, (begun_s, begun_s))

    for written_s in (begun_s - 5, begun_s + 5):
        os.utime(log, (written_s, written_s))
        tell_outcomes(dag, said.append)

    assert [text.splitlines()[-1] for text in said] == [
        "2 experiments: 2 not done",
        "2 experiments: 2 failed",
    ]
    note_begin()
    # touched anew by the next call
    assert begun.stat().st_mtime == pytest.approx(time.time(), abs=30)
