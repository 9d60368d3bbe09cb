"""The table of machines to rent: what fits, what it takes and costs, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.answer import Answer, answer, question_of
from pipeline_lib.plan.rent import config_on, read_offers, rows_of, table_of


def config_of(**train: Any) -> Config:
    whole = {
        "experiment": "rented",
        "model": {"source": "huggingface", "name": "Qwen/Qwen3-8B"},
        "data": {"train": [{"source": "pydoc"}]},
        "tokenize": {"max_tokens": 2048},
        "shard": {"block_tokens": 2048},
        "cluster": {"gpus_per_node": 1, "gpu": "h100", "internode_gbit_s": 100},
        "train": {
            "strategy": "auto",
            "method": "lora",
            "global_batch_tokens": 131_072,
            "max_steps": 1000,
            **train,
        },
    }
    return Config.model_validate_json(json.dumps(whole))


def planned(config: Config) -> Answer:
    return answer(question_of(config, Store(Path("/nowhere"))), is_explained=False)


def test_the_cheapest_that_fits_stands_first_and_what_does_not_fit_last() -> None:
    offers = read_offers(["h100:8x2@2.5", "4090:8@0.45", "h100:1@2.5", "4090:1@0.1"])
    rows = rows_of(config_of(method="full"), offers, planned)
    fitting = [row for row in rows if row.fits]
    assert [row.cost for row in fitting] == sorted(row.cost or 0 for row in fitting)
    assert 0 < len(fitting) < len(rows)
    assert not rows[-1].fits and "would" in rows[-1].text
    for row in fitting:
        assert row.cost is not None and row.hours is not None
        gpus = row.offer.gpus * row.offer.nodes
        assert row.cost == pytest.approx(row.hours * gpus * (row.offer.price or 0), rel=1e-6)
    text = table_of(rows)
    assert "2 nodes of 8 x H100 SXM" in text and "1M tokens" in text


def test_a_row_is_what_the_plan_of_that_machine_says() -> None:
    config = config_of()
    [offer] = read_offers(["4090:4@0.5"])
    [row] = rows_of(config, [offer], planned)
    there, rounded = config_on(config, offer)
    found = planned(there).content
    assert rounded == "" and found.prediction is not None and found.summary.cost is not None
    assert row.step_s == found.prediction.step_s.value
    assert row.cost == found.summary.cost.value
    assert row.token_cost == pytest.approx(
        0.5 / 3600 * 1e6 / found.prediction.tokens_per_s_per_rank.value
    )


def test_a_batch_that_does_not_divide_is_rounded_and_that_is_said() -> None:
    [row] = rows_of(config_of(), read_offers(["4090:7"]), planned)
    assert row.fits and row.text.endswith("; batch of 129,024 tokens")
    assert (row.offer.price, row.cost, row.token_cost) == (None, None, None)
    assert "money" not in table_of([row])


def test_offers_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "prices.txt").write_text("a10:4@0.6  # by the hour\n\n# none\nh100:1\n")
    found = read_offers([str(tmp_path / "prices.txt"), "l40s:2x3@1"])
    assert [str(offer) for offer in found] == ["4 x A10", "1 x H100 SXM", "3 nodes of 2 x L40S"]
    assert [offer.price for offer in found] == [0.6, None, 1.0]


def test_everything_that_is_no_offer_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        read_offers(["a6000 ada:1@1", "h100", "h100:0@1", "h100:8@free", "h100:8@2"])
    said = str(raised.value)
    assert "did you mean one of RTX A6000, RTX 6000 Ada" in said
    assert len(re.findall(r"not of the form GPU:GPUS", said)) == 3
