"""The fast way through pieces and tiktoken gives the ids of `Tokenizer.encode`, or is not taken."""

import copy
import json
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pipeline_lib.data import bpe
from pipeline_lib.data.bpe import (
    CHECK_EVERY,
    FIRST_CHECKED,
    BatchTokenizer,
    NotConvertible,
    WrongIds,
    is_plain,
    to_tiktoken,
)
from pipeline_lib.data.encode import load_tokenizer

some = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def load(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    return load_tokenizer(folder), json.loads((folder / "tokenizer.json").read_bytes())


@cache
def batches(folder: Path) -> BatchTokenizer:
    return BatchTokenizer(*load(folder))


def ids_of(found: list[bytes]) -> list[list[int]]:
    return [np.frombuffer(ids, dtype=np.int32).tolist() for ids in found]


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


added = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<|im_end|",
        "<<think>>",
        "<|im_<|im_end|>end|>",
    ]
)
whitespace = st.text(" \t\r\n\u00a0\u3000\u2028\x85\x1c", max_size=6)
words = st.sampled_from(
    [
        "don't",
        "I'LL",
        "'\u017f",
        "\u212a",
        "e\u0301",
        "한\u11a8",
        "１２",
        "Ⅷ",
        "👩\u200d👧",
        "क्ष",
        "ﷺ",
    ]
)
mixed = st.lists(st.text(max_size=12) | added | whitespace | words, max_size=8).map("".join)


@some
@given(texts=st.lists(mixed, max_size=6))
def test_any_text_has_the_ids_that_tokenizers_gives_it(folder: Path, texts: list[str]) -> None:
    assert batches(folder).how == "tiktoken"
    assert ids_of(batches(folder).encode(texts)) == expected(load(folder)[0], texts)
    assert batches(folder).how == "tiktoken"


letters = st.sampled_from(list("aZ1 9.,'-_\n\t\r!，。？好あ゙が한ㄱéß\u0301\u00a0\u3099²Ⅷ"))


@some
@given(text=st.text(letters, max_size=60) | mixed)
def test_a_long_text_has_the_ids_of_the_whole(folder: Path, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "MAX_PIECE_CHARS", 4)
        pieces = list(bpe.short_pieces(text))
        assert "".join(pieces) == text
    tokenizer, _ = load(folder)
    whole = expected(tokenizer, [text])[0]
    if not any(token in text for token in batches(folder)._added if token):
        assert [number for ids in expected(tokenizer, pieces) for number in ids] == whole


def test_a_long_text_is_cut_where_it_can_be() -> None:
    text = "Some words, and 123456 numbers。" * 20_000
    pieces = list(bpe.short_pieces(text))
    assert max(map(len, pieces)) <= bpe.MAX_PIECE_CHARS and "".join(pieces) == text
    assert list(bpe.short_pieces("x" * 300_000)) == ["x" * 300_000]


@some
@given(piece=mixed)
def test_tiktoken_by_itself_is_right_about_plain_pieces(folder: Path, piece: str) -> None:
    tokenizer, description = load(folder)
    if is_plain(piece) and not any(token in piece for token in batches(folder)._added if token):
        assert converted(folder).encode_ordinary(piece) == expected(tokenizer, [piece])[0]


@cache
def converted(folder: Path) -> Any:
    return to_tiktoken(load(folder)[1])


def test_tiktoken_splits_at_every_kind_of_character_as_tokenizers_does(folder: Path) -> None:
    def is_many(
        name: str,
    ) -> bool:  # tens of thousands of one kind: every hundredth of them is enough
        return name.startswith(
            ("CJK UNIFIED", "HANGUL SYLLABLE", "TANGUT", "EGYPTIAN", "CUNEIFORM", "CJK COMPAT")
        )

    tokenizer, _ = load(folder)
    chosen = [
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) not in ("Cn", "Cs", "Co")
        and (ord(char) % 100 == 0 or not is_many(unicodedata.name(char, "")))
    ]
    texts = [text for c in chosen if is_plain(text := f"{c}a{c}1{c}  {c}{c}!{c}\n{c} {c}'{c}s")]
    assert len(texts) > 30_000
    encode = converted(folder).encode_ordinary
    assert [
        text for text, ids in zip(texts, fast(tokenizer, texts), strict=True) if encode(text) != ids
    ] == []


def fast(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [
        encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " " * 200_000 + "a",
        "\n" * 150_000,
        "ab" * 60_000,
        "\u0301",
        "a\u0301",
        "\U00011f02\U00011f41",
        "<",
    ],
)
def test_odd_texts_have_the_same_ids(folder: Path, text: str) -> None:
    assert ids_of(batches(folder).encode([text, f"<|im_end|>{text}<think>"])) == expected(
        load(folder)[0], [text, f"<|im_end|>{text}<think>"]
    )


def test_text_that_another_unicode_version_could_compose_is_not_plain() -> None:
    assert is_plain("") and is_plain("a\nb") and is_plain("caf\u00e9, 你好 \U0001f600 한국어 क्ष")
    unknown = next(
        char for char in map(chr, range(0x10000, 0x110000)) if unicodedata.category(char) == "Cn"
    )
    assert not any(map(is_plain, ("e\u0301", "\u212b", unknown, "\ud800", " " * 100_001)))


def test_merges_in_the_older_form_are_understood(tiny_folder: Path) -> None:
    tokenizer, description = load(tiny_folder)
    older = copy.deepcopy(description)
    older["model"]["merges"] = [" ".join(pair) for pair in older["model"]["merges"]]
    assert BatchTokenizer(tokenizer, older).how == "tiktoken"


def set_model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda description: description["model"].update(changes)


def swap_merges(description: dict[str, Any]) -> None:
    merges = description["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def drop_merge(description: dict[str, Any]) -> None:
    description["model"]["merges"].pop()


def never_make_a_token(description: dict[str, Any]) -> None:
    """Let "abc" be made of "a" and "bc", where "ab" has come together before."""
    vocab = description["model"]["vocab"]
    start = max(vocab.values()) + 1_000
    for number, pair in enumerate([["Q", "q"], ["q", "Z"], ["Q", "qZ"]]):
        vocab["".join(pair)] = start + number
        description["model"]["merges"].append(pair)


def make_a_part_later(description: dict[str, Any]) -> None:
    """Let "QqZ" be made of "Qq", which comes to be after it."""
    vocab = description["model"]["vocab"]
    start = max(vocab.values()) + 1_000
    for number, pair in enumerate([["Qq", "Z"], ["Q", "q"]]):
        vocab["".join(pair)] = start + number
        description["model"]["merges"].append(pair)


def share_an_id(description: dict[str, Any]) -> None:
    vocab = description["model"]["vocab"]
    vocab["!"] = vocab["a"]


def change_split(description: dict[str, Any]) -> None:
    description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,3}|\s+|\S+"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_model(ignore_merges=True), "not a plain BPE"),
        (
            lambda description: description.update(normalizer={"type": "NFKC"}),
            "normalizer is not NFC",
        ),
        (
            lambda description: description.update(pre_tokenizer={"type": "Whitespace"}),
            "splits texts in another way",
        ),
        (change_split, "splits texts in another way"),
        (swap_merges, "not in the order of ids"),
        (drop_merge, "not all made of bytes"),
        (never_make_a_token, "never makes"),
        (make_a_part_later, "never makes"),
        (share_an_id, "share an id"),
    ],
)
def test_a_tokenizer_that_tiktoken_cannot_be_is_left_to_tokenizers(
    tiny_folder: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    description = copy.deepcopy(load(tiny_folder)[1])
    change(description)
    tokenizer = Tokenizer.from_str(json.dumps(description))
    both = BatchTokenizer(tokenizer, description)
    texts = ["The <think> ﬁrst 12345 e\u0301 QqZ<|im_end|>", "", "你好 QqZ"]
    assert both.how.startswith("tokenizers, whole texts (") and reason in both.how
    assert ids_of(both.encode(texts)) == expected(tokenizer, texts)


@st.composite
def merges(draw: st.DrawFn) -> list[list[str]]:
    """Pairs of letters and of what was made before, each of which makes something new."""
    pairs: list[list[str]] = []
    parts = ["a", "b", "c"]
    for _ in range(draw(st.integers(1, 12))):
        pair = [draw(st.sampled_from(parts)), draw(st.sampled_from(parts))]
        if "".join(pair) not in parts:
            pairs.append(pair)
            parts.append("".join(pair))
    return pairs


@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=merges())
def test_it_is_converted_exactly_if_each_token_is_what_becomes_of_its_own_text(
    tiny_folder: Path, pairs: list[list[str]]
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate([*letters, *map("".join, pairs)])}
    own = Tokenizer(models.BPE(vocab, [(first, second) for first, second in pairs])).model
    makes_each = all(
        [token.id for token in own.tokenize(text)] == [number] for text, number in vocab.items()
    )
    description = load(tiny_folder)[1]
    model = {**description["model"], "vocab": vocab, "merges": pairs}
    try:
        to_tiktoken({**description, "model": model, "added_tokens": []})
    except NotConvertible as error:
        assert "never makes" in str(error) and not makes_each
    else:
        assert makes_each


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_with_rules_of_their_own_are_left_to_tokenizers(
    tiny_folder: Path, flag: str
) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(load(tiny_folder)[1]))
    tokenizer.add_tokens([AddedToken("<odd>", **{"normalized": False, flag: True})])
    both = BatchTokenizer(tokenizer, json.loads(tokenizer.to_str()))
    texts = ["a <odd> b", "a<odd>b", "<odd><think>"]
    assert "whole texts (it has added tokens that depend on the text around them)" in both.how
    assert ids_of(both.encode(texts)) == expected(tokenizer, texts)


def test_texts_whose_beginning_is_special_are_not_cut() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "▁a": 1, "?": 2}, unk_token="?"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<x>"])
    both = BatchTokenizer(tokenizer, json.loads(tokenizer.to_str()))
    assert both.how == "tokenizers, whole texts (not a plain BPE)"
    assert ids_of(both.encode(["a<x>a", "<x>a"])) == [[1, 3, 0], [3, 0]]


def test_of_overlapping_added_tokens_the_longest_wins(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(load(tiny_folder)[1]))
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<a", "<a><b", "a><b>", "><b>c")]
    )
    both = BatchTokenizer(tokenizer, json.loads(tokenizer.to_str()))
    texts = ["x<a><b>c", "a><b>c", "<<a><a><b><a>"]
    assert both.how == "tiktoken" and ids_of(both.encode(texts)) == expected(tokenizer, texts)


def damaged(folder: Path) -> BatchTokenizer:
    """A tokenizer whose fast way gives wrong ids for texts with an "x"."""
    both = BatchTokenizer(*load(folder))
    right = both._tiktoken
    assert right is not None
    both._tiktoken = lambda piece: [0] if "x" in piece else right(piece)
    return both


def test_a_difference_at_the_beginning_is_found_before_it_does_harm(folder: Path) -> None:
    with pytest.raises(WrongIds, match="tiktoken and tokenizers differ on 'x'"):
        damaged(folder).encode(["a", "b", "x"])


def test_a_difference_later_on_is_found_by_samples(folder: Path) -> None:
    both = damaged(folder)
    both.encode(["a"] * FIRST_CHECKED)
    with pytest.raises(WrongIds):
        for _ in range(CHECK_EVERY):
            both.encode(["", "x", ""])


def test_the_slow_way_is_that_of_tokenizers(folder: Path) -> None:
    tokenizer, description = load(folder)
    slow = BatchTokenizer(tokenizer, description, fast=False)
    texts = ["<|im_start|>user\nx<|im_end|>", ""]
    assert slow.how == "tokenizers, whole texts"
    assert ids_of(slow.encode(texts)) == expected(tokenizer, texts)
