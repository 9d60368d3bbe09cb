"""What would help does, by as much as is said, if it alone is changed in the config."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.store import Store
from pipeline_lib.plan.answer import Answer, answer, question_of
from pipeline_lib.plan.counterfactuals import Change, advice

Sections = dict[str, dict[str, Any]]


def config_of(
    name: str, block_tokens: int, cluster: dict[str, Any], train: dict[str, Any]
) -> Sections:
    return {
        "model": {"source": "huggingface", "name": name},
        "tokenize": {"max_tokens": block_tokens},
        "shard": {"block_tokens": block_tokens},
        "cluster": cluster,
        "train": train,
    }


def planned(sections: Sections) -> Answer:
    whole = {"experiment": "advised", "data": {"train": [{"source": "pydoc"}]}, **sections}
    return answer(
        question_of(Config.model_validate_json(json.dumps(whole)), Store(Path("/nowhere")))
    )


def step_s(found: Answer) -> float:
    assert found.choice is not None
    return found.choice.chosen.step_s.value


def changes_of(found: Answer) -> list[Change]:
    assert found.choice is not None
    assert found.case is not None
    return advice(found.choice, found.case)


def applied(sections: Sections, what: str) -> Sections:
    """The config with that change, as a reader makes it."""
    cluster, train = dict(sections["cluster"]), dict(sections["train"])
    if match := re.fullmatch(r"([\d.]+) Gbit/s between nodes", what):
        cluster["internode_gbit_s"] = float(match[1])
    elif what == "cluster.nodes: 1":
        cluster["nodes"] = 1
    elif what == "train.strategy: auto, with no other placement key set":
        train = {
            key: train[key] for key in ("global_batch_tokens", "method", "lora") if key in train
        } | {"strategy": "auto"}
    elif what.endswith(" left out"):
        for key in what.removesuffix(" left out").split(" and "):
            del train[key.removeprefix("train.")]
    elif what == "train.lora.dropout: 0":
        train["lora"] = {**train["lora"], "dropout": 0}
    else:
        for setting in what.split(" with "):
            key, value = setting.split(": ")
            number = value.replace(",", "")
            train[key.removeprefix("train.")] = int(number) if number.isdecimal() else value
    return {**sections, "cluster": cluster, "train": train}


A10 = {"gpus_per_node": 2, "gpu": "a10"}
CASES: dict[str, Sections] = {
    "zero3 on two nodes": config_of(
        *("Qwen/Qwen2-1.5B", 512, {**A10, "nodes": 2, "internode_gbit_s": 9}),
        {"strategy": "zero3", "micro_batch_blocks": 2, "global_batch_tokens": 8192},
    ),
    "hsdp within half a node": config_of(
        *(
            "Qwen/Qwen3-14B",
            4096,
            {"nodes": 4, "gpus_per_node": 8, "gpu": "a100 80gb", "internode_gbit_s": 25},
        ),
        {"strategy": "hsdp", "shard_ranks": 4, "global_batch_tokens": 262144},
    ),
    "ddp on a slow network": config_of(
        *(
            "Qwen/Qwen3-1.7B",
            2048,
            {"nodes": 3, "gpus_per_node": 1, "gpu": "a10", "internode_gbit_s": 1},
        ),
        {"strategy": "ddp", "method": "lora", "global_batch_tokens": 24576},
    ),
    "auto beside other keys": config_of(
        *(
            "Qwen/Qwen3-1.7B",
            2048,
            {"nodes": 3, "gpus_per_node": 1, "gpu": "a10", "internode_gbit_s": 1},
        ),
        {
            "strategy": "auto",
            "method": "lora",
            "micro_batch_blocks": 1,
            "global_batch_tokens": 24576,
        },
    ),
    "full weights over a slow network": config_of(
        *(
            "Qwen/Qwen3-1.7B",
            2048,
            {"nodes": 2, "gpus_per_node": 1, "gpu": "h100", "internode_gbit_s": 4},
        ),
        {"strategy": "ddp", "global_batch_tokens": 32768},
    ),
    "dropout": config_of(
        *("Qwen/Qwen3-8B", 4096, {"gpus_per_node": 2, "gpu": "h200"}),
        {
            "strategy": "ddp",
            "method": "lora",
            "lora": {"dropout": 0.05},
            "global_batch_tokens": 65536,
        }
        | {"micro_batch_blocks": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_change_alone_gives_the_gain_that_is_said(case: str) -> None:
    sections = CASES[case]
    now = planned(sections)
    changes = changes_of(now)
    assert changes
    for change in changes:
        changed = applied(sections, change.what)
        tokens = [each["train"]["global_batch_tokens"] for each in (changed, sections)]
        gain = step_s(now) / step_s(planned(changed)) * tokens[0] / tokens[1]
        assert change.gain == pytest.approx(gain, rel=0.01), change.what


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("zero3 on two nodes", "train.gradient_compression: bf16"),
        ("full weights over a slow network", "train.gradient_compression: powersgd"),
    ],
)
def test_the_mildest_approximation_that_helps_is_offered_with_what_it_changes(
    case: str, key: str
) -> None:
    [found] = [change for change in changes_of(planned(CASES[case])) if change.what == key]
    assert "another training: ranks exchange" in found.sentence


def test_where_the_strategy_is_auto_already_the_keys_to_leave_out_are_named() -> None:
    """And where no key is given, nothing is to be left out."""
    sections = CASES["auto beside other keys"]
    [first] = [change for change in changes_of(planned(sections)) if "left out" in change.what]
    assert first.what == "train.micro_batch_blocks left out"
    assert first.sentence.startswith("train.micro_batch_blocks left out (ddp, micro-batch 4 x ")
    free = applied(sections, first.what)
    assert not any("left out" in change.what for change in changes_of(planned(free)))
