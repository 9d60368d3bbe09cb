import numpy as np
import pytest

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.data.encode import Drop, Sample
from pipeline_lib.data.ledger import SourceLedger, ledger_json, total_of


def make_ledger(name: str, lengths: list[int]) -> SourceLedger:
    ledger = SourceLedger(name, "messages", rows=len(lengths) + 2, conversations=len(lengths) + 1)
    ledger.quarantined["empty"] += 1
    for length in lengths:
        supervised = np.arange(length) >= length // 2
        ledger.count_sample(Sample(np.zeros(length, dtype=np.int32), supervised, truncated=length == 9))
    ledger.count_sample(Drop.OVER_LONG)
    return ledger


def test_all_is_counted_and_summed() -> None:
    sources = [make_ledger("a", [4, 9]), make_ledger("b", [2])]
    found = ledger_json(sources, np.array([4, 9, 2]))
    assert found["sources"][0] == {
        "name": "a",
        "format": "messages",
        "rows": 4,
        "conversations": 3,
        "quarantined": {"empty": 1},
        "samples": 3,
        "kept": 2,
        "truncated": 1,
        "dropped": {"over_long": 1},
        "tokens": 13,
        "supervised_tokens": 7,
    }
    total = found["total"]
    assert (total["rows"], total["samples"], total["tokens"], total["quarantined"]) == (7, 5, 15, {"empty": 2})
    assert found["length_percentiles"] == {"p1": 2.04, "p10": 2.4, "p50": 4.0, "p90": 8.0, "p99": 8.9, "max": 9}
    histogram = found["length_histogram"]
    assert sum(histogram["counts"]) == 3
    assert (histogram["edges"][0], histogram["edges"][-1]) == (0, 9)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1


def test_the_total_leaves_its_sources_alone() -> None:
    sources = [make_ledger("a", [4]), make_ledger("b", [4])]
    before = sources[0].to_json()
    total_of(sources)
    assert sources[0].to_json() == before


@pytest.mark.parametrize("key", ["rows", "conversations", "samples", "kept", "tokens"])
def test_books_that_do_not_add_up_are_never_written(key: str) -> None:
    ledger = make_ledger("a", [4, 9])
    setattr(ledger, key, getattr(ledger, key) + 1)
    with pytest.raises(IntegrityError):
        ledger_json([ledger], np.array([4, 9]))
