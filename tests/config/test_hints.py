"""Words of other tools lead to keys that exist."""

from typing import Any

from pipeline_lib.config.load import OTHERS_WORDS, belongs_to
from pipeline_lib.config.schema import Config, HubModel, Lora, Train


def test_every_word_of_another_tool_leads_to_a_key_that_exists() -> None:
    sections = {"train": Train, "train.lora": Lora, "model": HubModel}
    for word, hint in OTHERS_WORDS.items():
        section, _, name = hint.partition(",")[0].rpartition(".")
        model: Any = sections.get(section) or Config.model_fields[section].annotation
        names = {field.validation_alias or key for key, field in model.model_fields.items()}
        assert name in names, word
        assert belongs_to(word) == [hint]


def test_capitals_and_hyphens_are_no_other_word() -> None:
    assert belongs_to("Learning-Rate") == ["train.lr"]


def test_a_word_that_nobody_knows_belongs_nowhere() -> None:
    assert belongs_to("strategie") == []
