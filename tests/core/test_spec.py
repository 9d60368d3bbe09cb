import hashlib

import pytest

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.store import Ref, Spec

EXAMPLE = Spec(
    stage="train",
    version=1,
    settings={"lr": 0.0001, "epochs": 2, "lora": {"rank": 8}, "name": "\u4f60\u597d"},
    inputs={
        "shard": Ref("shard", "fedcba9876543210"),
        "model": Ref("download", "0123456789abcdef"),
    },
    where={"path": "/data/model"},
)


def test_the_digest_of_a_spec_never_changes() -> None:
    """Everything in users' stores is named by it: another digest makes all of it anew."""
    hashed = (
        '{"inputs":{"model":{"digest":"0123456789abcdef","stage":"download"},'
        '"shard":{"digest":"fedcba9876543210","stage":"shard"}},'
        '"settings":{"epochs":2,"lora":{"rank":8},"lr":0.0001,"name":"\u4f60\u597d"},"stage":"train","version":1}'
    )

    assert EXAMPLE.digest == hashlib.sha256(hashed.encode()).hexdigest()[:16]
    assert EXAMPLE.digest == "ffa23c7664b295fd"


@pytest.mark.parametrize(
    "other",
    [
        Spec("merge", 1, EXAMPLE.settings, EXAMPLE.inputs),
        Spec("train", 2, EXAMPLE.settings, EXAMPLE.inputs),
        Spec("train", 1, {**EXAMPLE.settings, "epochs": 3}, EXAMPLE.inputs),
        Spec("train", 1, {**EXAMPLE.settings, "lora": {"rank": 9}}, EXAMPLE.inputs),
        Spec("train", 1, {**EXAMPLE.settings, "new": None}, EXAMPLE.inputs),
        Spec("train", 1, EXAMPLE.settings, {**EXAMPLE.inputs, "shard": Ref("shard", "0" * 16)}),
        Spec(
            "train",
            1,
            EXAMPLE.settings,
            {"data": EXAMPLE.inputs["shard"], "model": EXAMPLE.inputs["model"]},
        ),
    ],
    ids=[
        "stage",
        "version",
        "setting",
        "inner setting",
        "new setting",
        "input digest",
        "input name",
    ],
)
def test_what_is_computed_decides_the_digest(other: Spec) -> None:
    assert other.digest != EXAMPLE.digest


def test_where_and_the_order_of_keys_do_not() -> None:
    moved = Spec(
        stage="train",
        version=1,
        settings={key: EXAMPLE.settings[key] for key in reversed(list(EXAMPLE.settings))},
        inputs={key: EXAMPLE.inputs[key] for key in reversed(list(EXAMPLE.inputs))},
        where={"path": "/elsewhere"},
    )

    assert moved.digest == EXAMPLE.digest


def test_a_spec_reads_back_as_it_was_written() -> None:
    assert Spec.from_json(EXAMPLE.to_json(), "here") == EXAMPLE


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        "text",
        EXAMPLE.to_json() | {"inputs": {"model": "0123"}},
        EXAMPLE.to_json() | {"inputs": [1]},
        EXAMPLE.to_json() | {"settings": "lr"},
        EXAMPLE.to_json() | {"settings": None},
        EXAMPLE.to_json() | {"where": 3},
        EXAMPLE.to_json() | {"version": "one"},
    ],
)
def test_what_is_no_spec_is_refused_by_name(value: object) -> None:
    with pytest.raises(IntegrityError, match="here: not a stage spec"):
        Spec.from_json(value, "here")


def test_a_setting_that_has_no_one_text_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(Spec("train", 1, {"lr": float("nan")}).to_json())
