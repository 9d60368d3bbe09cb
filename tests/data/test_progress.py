import time

import pytest

from pipeline_lib.core.text import Progress


def test_a_line_has_done_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    told = Progress(said.append, "tokenize: a.jsonl", "rows")
    for elapsed_s, done, fraction in (
        (1, 10, 0.01),
        (6, 6000, 0.25),
        (7, 6500, 0.3),
        (12, 12_000, 0.5),
    ):
        now_s[0] = 100.0 + elapsed_s
        told.update(done, fraction)
    assert said == [
        "tokenize: a.jsonl: 6,000 rows (25%), 1,000 rows/s, 18 s left",
        "tokenize: a.jsonl: 12,000 rows (50%), 1,000 rows/s, 12 s left",
    ]
