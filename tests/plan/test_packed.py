"""Why the plan of packed data differs from the one before: what was assumed, and what is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.store import Store
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import Question, answer, question_of
from pipeline_lib.plan.known import Blocks
from pipeline_lib.plan.packed import before_packing
from pipeline_lib.plan.show import render
from pipeline_lib.records.data import BlockGroup, BlockIndex
from pipeline_lib.records.plan import Workload

CONFIG = Config.model_validate_json(
    json.dumps(
        {
            "experiment": "packed",
            "model": {"source": "huggingface", "name": "Qwen/Qwen3-4B"},
            "data": {"train": [{"source": "pydoc"}]},
            "cluster": {"gpus_per_node": 4, "gpu": "h200"},
            "train": {"strategy": "auto", "global_batch_tokens": 64 * 4096},
            "shard": {"block_tokens": 4096},
        }
    )
)
BLOCKS = 6400


def packed(workload: Workload) -> Question:
    """The question about these blocks, of which an epoch has a hundred steps."""
    question = question_of(CONFIG, Store(Path("/nowhere")))
    real = workload.real_fraction
    index = BlockIndex(
        blocks=BLOCKS,
        block_tokens=4096,
        tokens=round(BLOCKS * 4096 * real),
        supervised_tokens=round(BLOCKS * 4096 * workload.supervised_fraction),
        documents=BLOCKS,
        largest_token=1000,
        epoch_blocks=BLOCKS,
        groups=[BlockGroup(blocks=BLOCKS, weight=1.0)],
        shards=[BLOCKS],
    )
    return replace(question, blocks=Blocks(index, workload), workload=workload)


@pytest.fixture
def expected() -> Workload:
    return expected_workload(CONFIG, None)


def known(expected: Workload) -> Workload:
    """What was expected, as packing finds it."""
    return replace(
        expected, is_assumed=False, document_band=None, blocks=BLOCKS, epoch_blocks=BLOCKS
    )


def test_a_plan_that_differs_says_what_was_assumed_and_what_is_known(expected: Workload) -> None:
    question = packed(replace(known(expected), document_tokens=4096.0, real_fraction=0.6))
    found = answer(question)
    said = before_packing(question, found, expected)
    assert f"documents of {expected.document_tokens:,.0f} tokens" in said
    assert "blocks 98% full, as assumed" in said
    assert "documents of 4,096 tokens" in said
    assert "blocks 60% full, 100 steps" in said
    words = replace(found.content.words, before_packing=said)
    assert "\nBEFORE" in render(replace(found.content, words=words))


def test_a_plan_that_is_the_same_says_nothing(expected: Workload) -> None:
    question = packed(known(expected))
    assert before_packing(question, answer(question), expected) == ""


def test_before_anything_is_packed_there_is_nothing_to_say(expected: Workload) -> None:
    question = question_of(CONFIG, Store(Path("/nowhere")))
    assert before_packing(question, answer(question), expected) == ""
