import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.stage import Job, Sealed
from pipeline_lib.core.store import Manifest, Ref, Spec, Store
from pipeline_lib.data import packing, shard
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.order import step_blocks, total_steps
from pipeline_lib.data.packing import Bins, choose_held_out, pack
from pipeline_lib.records.data import BlockGroup
from tests.locks import hold

from .conftest import Pipeline

Jsonl = Callable[..., Path]
Conversation = list[list[int]]  # the tokens of each of its samples


def write_samples(folder: Path, *sources: list[Conversation]) -> Samples:
    """The arrays that the tokenize stage leaves of `sources`; tokens above 5 are supervised.

    A conversation's first token is what its user says first.
    """
    folder.mkdir(parents=True)
    conversations = [conversation for source in sources for conversation in source]
    samples = [
        np.array(tokens, np.int32) for conversation in conversations for tokens in conversation
    ]
    tokens = np.concatenate(samples)
    arrays = {
        "tokens": tokens,
        "supervised": tokens > 5,
        "offsets": np.cumsum([0, *map(len, samples)]),
        "conversations": np.repeat(
            np.arange(len(conversations), dtype=np.int32), list(map(len, conversations))
        ),
        "content": np.array([hash_of(conversation) for conversation in conversations], np.uint64),
        "prompts": np.array(
            [hash_of(conversation[0][0]) for conversation in conversations], np.uint64
        ),
        "source_offsets": np.cumsum([0, *(sum(map(len, source)) for source in sources)]),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return Samples(folder)


def hash_of(value: Conversation | int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest())


@dataclass
class Made:
    """What a run of the stage left, counted and said."""

    train: BlockReader
    validation: BlockReader
    counts: dict[str, Any]
    said: list[str]

    def documents(self, side: str) -> list[bytes]:
        """The tokens of each document of a side."""
        reader = self.train if side == "train" else self.validation
        return [
            d.tokens.tobytes()
            for number in range(len(reader))
            for d in documents_of(reader[number])
        ]


def make(folder: Path, *sources: list[Conversation], **settings: Any) -> Made:
    """Run the stage on `sources`."""
    write_samples(folder / "tokens", *sources)
    spec = Spec("shard", 2, {"block_tokens": 64, **settings}, {"tokenize": Ref("tokenize", "0")})
    manifest = Manifest(stage="tokenize", digest="0", spec={}, files={})
    out, said = folder / "blocks", list[str]()
    inputs = {"tokenize": Sealed(folder / "tokens", manifest)}
    job = Job(spec, Store(folder / "store"), inputs, out, said.append, hold(folder / "lock"))
    out.mkdir()
    counts = shard.run(job)
    return Made(BlockReader(out / "train"), BlockReader(out / "validation"), counts, said)


def conversations(count: int, first: int = 0) -> list[Conversation]:
    """Each of one sample of 2 to 21 tokens, the first of which tells it from all others."""
    return [[[first + number + 6, *range(number % 20), 7]] for number in range(count)]


def sides(samples: Samples, seed: int = 0) -> dict[bytes, set[bool]]:
    """By the content of each sample, the sides that it is on."""
    held_out = choose_held_out(samples, 0.3, seed)
    found: dict[bytes, set[bool]] = {}
    for number in range(len(samples)):
        found.setdefault(samples[number].tokens.tobytes(), set()).add(bool(held_out[number]))
    return found


def test_equal_conversations_are_never_on_both_sides(tmp_path: Path) -> None:
    once = [[[number % 50, 7]] for number in range(300)]
    again = [[[number % 50, 7]] for number in range(200)]
    found = sides(write_samples(tmp_path / "a", once, again))
    assert len(found) == 50 and all(len(side) == 1 for side in found.values())
    assert 5 <= sum(True in side for side in found.values()) <= 25


@pytest.mark.parametrize(
    "alike",
    [
        [[[number], [number, 7], [number, 7, 8]] for number in range(200)],
        [[[number, *range(answer)]] for number in range(200) for answer in range(3)],
    ],
    ids=["samples of a conversation", "answers to a question"],
)
def test_what_belongs_together_stays_together(tmp_path: Path, alike: list[Conversation]) -> None:
    held_out = choose_held_out(write_samples(tmp_path / "a", alike), 0.3, 0).reshape(200, 3)
    assert (held_out.all(axis=1) == held_out.any(axis=1)).all()
    assert 0.2 < held_out.mean() < 0.4


def test_a_sample_that_is_lost_on_the_way_to_the_blocks_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(lengths: NDArray[np.int64], *arguments: Any) -> Bins:
        return pack(lengths[:-1], *arguments)

    monkeypatch.setattr(packing, "pack", lossy)
    with pytest.raises(
        IntegrityError, match=r"200 samples, and \d+ in training and \d+ in validation blocks"
    ):
        make(tmp_path, conversations(200), validation_fraction=0.2)


def test_added_data_moves_nothing(tmp_path: Path) -> None:
    before = sides(write_samples(tmp_path / "a", [[[number]] for number in range(100)]))
    after = sides(
        write_samples(tmp_path / "b", [[[7, 7]]], [[[number]] for number in range(150, -1, -1)])
    )
    assert all(after[content] == side for content, side in before.items())


def test_more_validation_keeps_what_was_held_out(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "a", conversations(300))
    less, more = choose_held_out(samples, 0.1, 0), choose_held_out(samples, 0.2, 0)
    assert 0 < less.sum() < more.sum() and (more[less]).all()


def test_the_seed_chooses_others(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "a", [[[number]] for number in range(100)])
    assert sides(samples, 0) == sides(samples, 0) != sides(samples, 1)


def test_the_seed_packs_otherwise(tmp_path: Path) -> None:
    packed = [
        make(tmp_path / str(seed), conversations(60), seed=seed, validation_fraction=0.0).documents(
            "train"
        )
        for seed in (0, 1)
    ]
    assert packed[0] != packed[1]
    assert sorted(packed[0]) == sorted(packed[1])


def test_every_sample_is_in_one_block_of_one_side(tmp_path: Path) -> None:
    made = make(tmp_path, [*conversations(200), *conversations(40)], validation_fraction=0.2)
    samples = Samples(tmp_path / "tokens")
    wanted = sorted(samples[number].tokens.tobytes() for number in range(len(samples)))
    assert sorted(made.documents("train") + made.documents("validation")) == wanted
    assert not set(made.documents("train")) & set(made.documents("validation"))
    assert len(made.train.index.shards) == 4 and len(made.validation.index.shards) == 1


def test_the_counts_are_those_of_the_blocks(tmp_path: Path) -> None:
    made = make(tmp_path, conversations(200), validation_fraction=0.2)
    for side, reader in (("train", made.train), ("validation", made.validation)):
        documents = [
            document for number in range(len(reader)) for document in documents_of(reader[number])
        ]
        tokens = sum(len(document.tokens) for document in documents)
        assert made.counts[side] == {
            "blocks": len(reader),
            "epoch_blocks": len(reader),
            "groups": [{"weight": 1.0, "blocks": len(reader)}],
            "documents": len(documents),
            "tokens": tokens,
            "supervised_tokens": sum(int(document.supervised.sum()) for document in documents),
            "packing_efficiency": pytest.approx(tokens / (len(reader) * 64), abs=1e-6),
        }


def test_sources_of_one_weight_share_blocks_and_others_do_not(tmp_path: Path) -> None:
    sources = [conversations(60), conversations(50, first=100), conversations(40, first=200)]
    made = make(tmp_path, *sources, weights=[2.0, 0.5, 2.0], validation_fraction=0.1)
    light, heavy = made.train.index.groups
    assert (light.weight, heavy.weight) == (0.5, 2.0) and light.blocks + heavy.blocks == len(
        made.train
    )
    source_of = {
        number: {
            int(document.tokens[0] - 6) // 100 for document in documents_of(made.train[number])
        }
        for number in range(len(made.train))
    }
    assert all(source_of[number] == {1} for number in range(light.blocks))
    assert all(1 not in source_of[number] for number in range(light.blocks, len(made.train)))
    assert any(source_of[number] == {0, 2} for number in range(light.blocks, len(made.train)))
    assert made.validation.index.groups == [BlockGroup(1.0, len(made.validation))]
    assert made.counts["train"]["epoch_blocks"] == light.blocks // 2 + 2 * heavy.blocks
    assert "the first epoch uses" in made.said[0] and "the first epoch uses" not in made.said[1]


def test_over_two_epochs_each_sample_is_used_as_its_weight_says(tmp_path: Path) -> None:
    made = make(
        tmp_path,
        conversations(50),
        conversations(50, first=100),
        weights=[0.5, 3],
        validation_fraction=0.1,
    )
    groups = made.train.index.groups
    used: Counter[bytes] = Counter()
    for step in range(total_steps(groups, 4, 2)):
        for block in step_blocks(0, step, groups, 4):
            used.update(
                document.tokens.tobytes() for document in documents_of(made.train[int(block)])
            )
    times: dict[int, set[int]] = {0: set(), 1: set()}
    for tokens, count in used.items():
        times[int(np.frombuffer(tokens, np.int32)[0] - 6) // 100].add(count)
    assert times[1] == {6}
    assert times[0] == {1}


def test_weights_of_one_are_no_weights(tmp_path: Path) -> None:
    sources = [conversations(60), conversations(50, first=100)]
    plain = make(tmp_path / "a", *sources)
    weighted = make(tmp_path / "b", *sources, weights=[1.0, 1.0])
    assert plain.train.index == weighted.train.index
    assert plain.documents("train") == weighted.documents("train")


def test_a_source_that_the_split_left_nothing_is_no_group(tmp_path: Path) -> None:
    lone = next(
        conversation
        for conversation in conversations(100, 500)
        if is_held_out(tmp_path, conversation)
    )
    made = make(
        tmp_path / "b",
        conversations(100),
        [lone],
        [],
        weights=[1.0, 2.0, 3.0],
        validation_fraction=0.3,
    )
    assert made.train.index.groups == [BlockGroup(1.0, len(made.train))]
    assert np.array(lone[0], np.int32).tobytes() in made.documents("validation")


def is_held_out(folder: Path, conversation: Conversation) -> bool:
    return bool(
        choose_held_out(write_samples(folder / str(conversation[0][0]), [conversation]), 0.3, 0)[0]
    )


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name, conversations(150), conversations(50, first=300), weights=[1.0, 0.3])
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "blocks").rglob("*.*")]
    assert len(files) == 4 + 1 + 2 * 2
    assert all(
        (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        for file in files
    )


def test_there_are_no_more_files_than_blocks(tmp_path: Path) -> None:
    made = make(tmp_path, conversations(40), shards=9, block_tokens=1024, validation_fraction=0.3)
    assert made.train.index.shards == [1]


@pytest.mark.parametrize(
    ("fraction", "side", "verb"), [(0.0001, "validation", "raise"), (0.9999, "training", "lower")]
)
def test_an_empty_side_is_refused(tmp_path: Path, fraction: float, side: str, verb: str) -> None:
    message = (
        f"of 20 samples none is in the {side} split with .*_fraction {fraction}; {verb} it.* 20 "
        "different ones"
    )
    with pytest.raises(DataError, match=message):
        make(tmp_path, conversations(20), validation_fraction=fraction)


def beginning(folder: Path, *, held_out: bool) -> int:
    """A first token whose conversations are on that side of the split."""
    return next(
        number for number in range(5000, 6000) if is_held_out(folder, [[number, 7]]) is held_out
    )


@pytest.mark.parametrize(("side", "alike"), [("validation", 100), ("training", 160)])
def test_a_frequent_beginning_that_spoils_the_split_is_told(
    tmp_path: Path, side: str, alike: int
) -> None:
    first = beginning(tmp_path / "drawn", held_out=side == "validation")
    hello: list[Conversation] = [[[first, number, 7]] for number in range(alike)]
    made = make(tmp_path, hello, conversations(200 - alike), validation_fraction=0.3)
    (warning,) = [line for line in made.said if "warning" in line]
    told = rf"{made.validation.index.documents} of 200 samples \(.*%\) are in validation, and .*_fraction is 0.3: "
    assert re.search(
        f"^shard: warning: {told}.* has {alike} \\({alike / 2}%\\), all in {side}; change shard",
        warning,
    )


def test_what_chance_alone_does_to_the_split_is_not_told(tmp_path: Path) -> None:
    first = beginning(tmp_path / "drawn", held_out=True)
    few = make(
        tmp_path / "few",
        [[[first, number, 7]] for number in range(10)],
        conversations(5),
        validation_fraction=0.3,
    )
    assert few.validation.index.documents >= 10
    many = make(tmp_path / "many", conversations(400), validation_fraction=0.3)
    assert not any("warning" in line for line in [*few.said, *many.said])


def test_weights_of_the_config_become_groups(pipeline: Pipeline, jsonl: Jsonl) -> None:
    def questions(first: int) -> list[dict[str, str]]:
        return [
            {"instruction": f"What is {first + n}?", "output": "It is " + "so " * (n % 9)}
            for n in range(80)
        ]

    often, seldom = jsonl(questions(0), "often.jsonl"), jsonl(questions(1000), "seldom.jsonl")
    data = [
        {"source": "file", "path": str(often), "weight": 2},
        {"source": "file", "path": str(seldom), "weight": 0.5},
    ]
    made = pipeline.run(pipeline.compile(data=data))
    seldom_used, often_used = BlockReader(made["shard"].path / "train").index.groups
    assert (seldom_used.weight, often_used.weight) == (0.5, 2.0)
    used = made["shard"].manifest.counts["train"]["epoch_blocks"]
    assert used == seldom_used.blocks // 2 + 2 * often_used.blocks
