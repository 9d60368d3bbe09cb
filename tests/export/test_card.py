"""The model card is what hubs read, and a name of a file or repository stays only a name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from pipeline_lib.config.train import Train
from pipeline_lib.core.store import Ref, Store
from pipeline_lib.evaluate.answers import modes_of
from pipeline_lib.export.card import MOST_ROWS, Licence, adapter_card, cell, licence_of, model_card
from pipeline_lib.lineage.record import Lineage
from pipeline_lib.records.data import Ledger
from tests.complete import ledger, parity, source, training
from tests.lineage.lineages import COMMIT, seal_model

ATTACKS = (
    "a|b.jsonl",
    "`code` <script>alert(1)</script>.jsonl",
    "[click](javascript:alert(1)).jsonl",
    "![x](http:evil).jsonl",
    "a\n\n# heading\n| x | y |.jsonl",
    "\\| \\` **bold** ~~gone~~.jsonl",
    "\x1b[31mred\u202egnp.jsonl",
)


def page(
    made: Ledger | None,
    method: str = "full",
    model_type: str = "qwen3",
    licence: Licence | None = None,
) -> str:
    train = Train.model_validate({"method": method})
    return model_card(
        Ref("merge", "0" * 16),
        model_type,
        train,
        training(),
        parity(),
        Lineage(),
        made,
        licence=licence,
    )


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Of a model made from a hub's and a file."""
    model = seal_model(Store(tmp_path_factory.mktemp("card") / "store"))
    return ModelCard((model / "README.md").read_text())


def front_matter(card: ModelCard) -> dict[str, Any]:
    """What a hub reads of it."""
    return dict(card.data.to_dict())  # type: ignore[no-untyped-call]


def test_a_hub_reads_what_it_wants_to_know(card: ModelCard) -> None:
    told = front_matter(card)
    assert told["base_model"] == "Qwen/Qwen3-8B"
    assert (told["library_name"], told["pipeline_tag"]) == ("transformers", "text-generation")
    assert told["tags"] == ["qwen3", "sft"]
    assert front_matter(ModelCard(page(None, "lora")))["tags"] == ["qwen3", "sft", "lora"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Apache License\n   Version 2.0, January 2004", {"license": "apache-2.0"}),
        (
            "Qwen RESEARCH LICENSE",
            {"license": "other", "license_name": "base-model", "license_link": "LICENSE"},
        ),
    ],
)
def test_a_hub_reads_the_licence_of_the_base(
    tmp_path: Path, text: str, told: dict[str, str]
) -> None:
    assert licence_of(tmp_path) is None
    (tmp_path / "LICENSE").write_text(text)
    read = ModelCard(page(None, licence=licence_of(tmp_path)))
    assert told.items() <= front_matter(read).items()
    assert "`LICENSE` is the base model's" in read.text


def test_the_card_of_adapters_names_their_base() -> None:
    told = front_matter(ModelCard(adapter_card("code", "Qwen/Qwen3-8B")))
    assert (told["library_name"], told["base_model"]) == ("peft", "Qwen/Qwen3-8B")


def test_a_reader_finds_the_chain(card: ModelCard) -> None:
    for text in (
        f"modelscope Qwen/Qwen3-8B@{COMMIT}",
        "chats.jsonl",
        "| lr | 0.003 |",
        "ddp on 2 ranks",
        "held-out",
    ):
        assert text in card.text
    assert "2 ranks by srun on n1, n2 in SLURM job 7, from the start" in card.text
    assert card.text.count("| download |") == 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_name_is_words_in_one_cell(attack: str) -> None:
    made = ledger(source(attack))
    tokens = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .parse(ModelCard(page(made)).text)
    )
    rows = [
        tokens[index + 1].children for index, token in enumerate(tokens) if token.type == "td_open"
    ]
    (named,) = [
        row
        for row in rows
        if row and row[0].content and ".jsonl" in "".join(each.content for each in row)
    ]
    assert {each.type for each in named} <= {"text", "text_special"}
    assert (
        "".join(each.content for each in named).split()[0]
        == "".join(char if char.isprintable() else " " for char in attack).split()[0]
    )
    # data, training, lineage
    assert len([token for token in tokens if token.type == "table_open"]) == 3
    assert not [token for token in tokens if token.type in ("html_block", "fence", "hr")]


def test_a_hostile_model_type_stays_a_text_of_the_front_matter() -> None:
    card = ModelCard(page(None, model_type='x"\nlicense: mit\n---\n# <b>'))
    assert "license" not in front_matter(card)
    assert "<b>" not in card.text


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    text = page(ledger(*(source(f"source {number}") for number in range(MOST_ROWS + 5))))
    assert "And 5 more, in `lineage.json`." in text


def test_credentials_are_masked() -> None:
    assert "abcdefgh" not in cell("data?token=abcdefghijkl")


COUNTED = {"prompts": {"thinking_off": 1000}, "thinking_default": "on"}
CALL_OFF = (
    "tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)"
)
CALL_ON = CALL_OFF.replace("False", "True")


@pytest.mark.parametrize(
    ("counts", "modes", "said", "unsaid"),
    [
        (
            COUNTED,
            [False],
            (
                "1,000 answers were trained with "
                f"enable_thinking=False:\n\n```python\n{CALL_OFF}\n```",
                '`"chat_template_kwargs": {"enable_thinking": false}`',
                "No answer was trained under the chat template's default",
            ),
            (CALL_ON,),
        ),
        (
            {**COUNTED, "prompts": {"thinking_off": 1, "thinking_on": 20}},
            [True, False],
            (
                CALL_ON,
                CALL_OFF,
                "1 answer was trained",
                "20 answers were trained with enable_thinking=True, the chat temp",
            ),
            ("No answer was trained",),
        ),
        ({}, [], (), ("How to call it", "enable_thinking")),
    ],
    ids=["off", "mixed", "not known"],
)
def test_the_card_says_how_to_call_the_model(
    tmp_path: Path,
    counts: dict[str, Any],
    modes: list[bool],
    said: tuple[str, ...],
    unsaid: tuple[str, ...],
) -> None:
    folder = seal_model(Store(tmp_path / "store"), prompts=counts)
    text = (folder / "README.md").read_text()
    assert all(each in text for each in said), text
    assert not any(each in text for each in unsaid), text
    assert [mode.enable_thinking for mode in modes_of(folder)] == modes


@pytest.mark.parametrize(
    ("counts", "switch", "trained", "warning"),
    [
        (
            {"prompts": {"thinking_on": 20}, "thinking_default": "on"},
            True,
            "20 answers were trained with enable_thinking=True, reasoning_effort='low':",
            "where enable_thinking and reasoning_effort are not given",
        ),
        (
            {"prompts": {"thinking_on": 19, "thinking_off": 1}, "thinking_default": None},
            None,
            "20 answers were trained with reasoning_effort='low':",
            "where reasoning_effort is not given",
        ),
    ],
    ids=["with a switch", "without a switch"],
)
def test_the_card_names_the_variables_of_the_chat_template(
    tmp_path: Path, counts: dict[str, Any], switch: bool | None, trained: str, warning: str
) -> None:
    kwargs = {"reasoning_effort": "low"}
    folder = seal_model(
        Store(tmp_path / "store"), prompts=counts, tokenize={"chat_template_kwargs": kwargs}
    )
    text = (folder / "README.md").read_text()
    (mode,) = modes_of(folder)
    assert (mode.enable_thinking, mode.kwargs) == (switch, kwargs)
    for said in (trained, mode.code, f"A server: `{mode.request}`", warning):
        assert said in text, text
    called: dict[str, Any] = {}
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, **options: called.update(options)
    )
    eval(mode.code, {"tokenizer": tokenizer, "messages": []})  # noqa: S307 - our own code, as a user runs it
    del called["add_generation_prompt"]
    assert json.loads(f"{{{mode.request}}}") == {"chat_template_kwargs": called}
    assert called == ({} if switch is None else {"enable_thinking": switch}) | kwargs
