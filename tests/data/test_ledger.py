from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.data.chat_template import repetition
from pipeline_lib.data.encoded import Encoded
from pipeline_lib.data.keys import KeyCounts
from pipeline_lib.data.ledger import (
    FileLedger,
    SourceLedger,
    ledger_of,
    table,
    total_of,
    unread_lines,
)
from pipeline_lib.records.record import to_json

EMPTY = Encoded(
    source=0,
    file=0,
    format="messages",
    rows=0,
    rejected=[],
    keys=KeyCounts(),
    place="rows.jsonl:1 to 9",
    content=np.zeros(0, dtype=np.uint64),
    prompts=np.zeros(0, dtype=np.uint64),
    turns=np.zeros(0, dtype=np.int32),
    turns_found=np.zeros(0, dtype=np.int32),
    signatures=None,
    drops=[],
    conversations=np.zeros(0, dtype=np.int32),
    lengths=np.zeros(0, dtype=np.int64),
    truncated=np.zeros(0, dtype=np.bool_),
    split=np.zeros(0, dtype=np.bool_),
    asked_to_think=np.zeros((0, 2), dtype=np.int32),
    tokens=np.zeros(0, dtype=np.int32),
    supervised=np.zeros(0, dtype=np.bool_),
    how="tokenizers",
)


def encoded_of(lengths: list[int], drops: list[tuple[int, str]] = []) -> Encoded:  # noqa: B006
    """A conversation for each of `lengths`, half of it supervised, and one more a drop.

    The second half is supervised.
    """
    total = len(lengths) + len(drops)
    supervised = [np.arange(length) >= length // 2 for length in lengths]
    return replace(
        EMPTY,
        rows=total,
        content=np.arange(total, dtype=np.uint64) * 7,
        prompts=np.arange(total, dtype=np.uint64) * 3,
        turns=np.full(total, 2, dtype=np.int32),
        turns_found=np.full(total, 2, dtype=np.int32),
        drops=drops,
        conversations=np.arange(len(lengths), dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int64),
        truncated=np.array(lengths, dtype=np.int64) == 9,
        split=np.array(lengths, dtype=np.int64) == 4,
        asked_to_think=np.tile(np.array([[0, 1]], dtype=np.int32), (len(lengths), 1)),
        tokens=np.arange(sum(lengths), dtype=np.int32),
        supervised=np.concatenate([np.zeros(0, dtype=np.bool_), *supervised]),
    )


def make_ledger(name: str, lengths: list[int]) -> SourceLedger:
    rows = len(lengths) + 4
    files = [FileLedger("1.jsonl", "messages", rows - 1), FileLedger("2.jsonl", "text", 1)]
    files[0].keys.add(KeyCounts(Counter({"source": 3, "id": 5}), others=1))
    ledger = SourceLedger(name, files, rows)
    ledger.quarantined["empty"] += 1
    ledger.duplicates.update(exact=2, near=0)
    ledger.duplicates_dropped = 2
    ledger.count_samples(encoded_of(lengths, [(len(lengths), "over_long")]))
    return ledger


def test_all_is_counted_and_summed() -> None:
    sources = [make_ledger("a", [4, 9]), make_ledger("b", [2])]
    total_of(sources)
    # the sum leaves its sources alone
    found = to_json(ledger_of(sources, [np.array([4, 9]), np.array([2])]))
    assert found["sources"][0] == {
        "name": "a",
        "files": [
            {
                "name": "1.jsonl",
                "format": "messages",
                "rows": 5,
                "unread": {"id": 5, "source": 3},
                "unread_others": 1,
            },
            {"name": "2.jsonl", "format": "text", "rows": 1, "unread": {}, "unread_others": 0},
        ],
        "format": "messages, text",
        "rows": 6,
        "conversations": 3,
        "quarantined": {"empty": 1},
        "duplicates": {"exact": 2},
        "duplicates_dropped": 2,
        "turns": 6,
        "samples": 3,
        "kept": 2,
        "truncated": 1,
        "split": 1,
        "dropped": {"over_long": 1},
        "prompts": {"thinking_on": 2},
        "tokens": 13,
        "repeated_tokens": 0,
        "supervised_tokens": 7,
        "length_percentiles": {
            "p1": 4.05,
            "p10": 4.5,
            "p50": 6.5,
            "p90": 8.5,
            "p99": 8.95,
            "max": 9,
        },
    }
    assert found["sources"][1]["length_percentiles"]["max"] == 2
    total = found["total"]
    assert (total["rows"], total["samples"], total["tokens"], total["quarantined"]) == (
        11,
        5,
        15,
        {"empty": 2},
    )
    assert total["prompts"] == {"thinking_on": 3}
    assert total["format"] == "messages, text" and "files" not in total
    assert found["length_percentiles"] == {
        "p1": 2.04,
        "p10": 2.4,
        "p50": 4.0,
        "p90": 8.0,
        "p99": 8.9,
        "max": 9,
    }
    histogram = found["length_histogram"]
    assert sum(histogram["counts"]) == 3
    assert (histogram["edges"][0], histogram["edges"][-1]) == (0, 9)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1


@pytest.mark.parametrize("key", ["rows", "conversations", "duplicates_dropped", "kept", "tokens"])
def test_books_that_do_not_add_up_are_never_written(key: str) -> None:
    ledger = make_ledger("a", [4, 9])
    setattr(ledger, key, getattr(ledger, key) + 1)
    with pytest.raises(IntegrityError):
        ledger_of([ledger], [np.array([4, 9])])


def test_the_files_have_to_add_up_too() -> None:
    ledger = make_ledger("a", [4, 9])
    ledger.files[0].rows -= 1
    with pytest.raises(IntegrityError, match="a: the files do not add up to 6 rows"):
        ledger_of([ledger], [np.array([4, 9])])


def test_a_source_of_which_nothing_is_kept_has_no_lengths() -> None:
    found = ledger_of(
        [make_ledger("a", [4]), make_ledger("b", [])], [np.array([4]), np.array([], dtype=np.int64)]
    )
    assert found.sources[1].length_percentiles == {} and found.length_percentiles["max"] == 4


def test_a_turn_that_is_in_no_sample_and_no_drop_is_noticed() -> None:
    whole = encoded_of([4, 9, 2])
    whole.check()
    found = np.array([2, 1, 1], dtype=np.int32)
    message = (
        r"rows\.jsonl:1 to 9: of 2 turns .*, 1 are in a sample or dropped for a reason \(2 such"
    )
    with pytest.raises(IntegrityError, match=message):
        replace(whole, turns_found=found).check()


def test_the_table_has_a_line_for_each_source_and_one_for_all() -> None:
    lines = table([make_ledger("a", [4, 9]), make_ledger("bees.jsonl", [2])])
    assert lines[0].split()[:4] == ["source", "format", "rows", "quarantined"]
    cells: list[Any] = [line.split() for line in lines[2:]]
    assert [row[0] for row in cells] == ["a", "bees.jsonl", "total"]
    assert cells[2][3:] == ["11", "2", "4", "5", "2", "3", "1", "1", "15", "8"]
    ends = {len(line) for line in lines[2:]}
    assert len(ends) == 1  # aligned
    assert len(table([make_ledger("a", [4, 9])])) == 3  # without a sum


def test_what_is_not_read_is_a_line_for_files_of_the_same_keys() -> None:
    sources = [make_ledger("a", [4]), make_ledger("b", [4])]
    sources[0].files[1].keys.add(KeyCounts(Counter({"id": 2, "source": 1})))
    sources[1].files[1].keys.add(
        KeyCounts(Counter({f"key {number:02}": 1 for number in range(22)}))
    )

    assert unread_lines(sources)[:2] == [
        "tokenize: 1.jsonl and 1 file like it: columns and keys that are not read: 'id' in 7, "
        "'source' in 4, and 1 value of further keys",
        "tokenize: 1.jsonl: columns and keys that are not read: 'id' in 5, 'source' in 3, and 1 "
        "value of further keys",
    ]
    assert unread_lines(sources)[2].endswith("'key 18' in 1, 'key 19' in 1 and 2 more")


def test_conversations_are_taken_out_with_their_samples_and_drops() -> None:
    whole = encoded_of([4, 9, 2], [(3, "over_long")])
    left = whole.only(np.array([True, False, True, True]))
    assert left.content.tolist() == [0, 14, 21] and left.prompts.tolist() == [0, 6, 9]
    assert left.conversations.tolist() == [0, 1] and left.drops == [(2, "over_long")]
    assert left.asked_to_think.tolist() == [[0, 1], [0, 1]]
    assert left.lengths.tolist() == [4, 2] and left.tokens.tolist() == [0, 1, 2, 3, 13, 14]
    assert left.supervised.tolist() == [False, False, True, True, False, True]
    assert whole.only(np.ones(4, dtype=np.bool_)) is whole
    nothing = whole.only(np.zeros(4, dtype=np.bool_))
    assert len(nothing.tokens) == len(nothing.content) == len(nothing.drops) == 0


def test_tokens_of_samples_that_repeat_a_longer_one_are_counted() -> None:
    three = replace(encoded_of([3, 5, 9, 6]), conversations=np.array([0, 0, 0, 1], dtype=np.int32))
    assert three.repeated_tokens == 3 + 5
    # pieces repeat nothing
    assert replace(three, split=np.array([True, True, True, False])).repeated_tokens == 0
    assert repetition(2, 4, 23, three.repeated_tokens).startswith(
        "4 samples of 2 conversations have 1.5 times the tokens of one sample each (23 against 15)"
    )
    assert repetition(2, 4, 23, 1) == repetition(2, 4, 23, 0) == repetition(2, 4, 23, None) == ""
