"""The sentence that comes first, and the card beside it: they speak only of what is comparable."""

import numpy as np
import pytest

from pipeline_lib.compare.page import cards
from pipeline_lib.compare.verdict import verdict
from pipeline_lib.core.store import Store
from tests.compare.fakes import Samples, compared, made

NAMES = ("one", "two", "three")


def with_tokenizers(store: Store, *tokenizers: str) -> None:
    """Experiments whose losses are each lower than that of the one before."""
    for place, (name, tokenizer) in enumerate(zip(NAMES, tokenizers, strict=False)):
        made(store, name, -0.3 * place, place, None, tokenizer, model={"seed": place})


def test_one_with_other_tokens_is_not_counted_among_those_that_were_beaten(store: Store) -> None:
    with_tokenizers(store, "a", "a", "b")
    found = compared(store, *NAMES)

    assert verdict(found).startswith(
        "two is the best of the 2 that can be compared by more than chance, at 2.0"
    )
    assert (
        "Whether it is better than three is unknown: their tokenizers differ, so a loss"
        in verdict(found)
    )
    assert (cards(found)[0].name, cards(found)[0].beside) == (
        *("Lowest held-out loss", "two, of the 2 that can be compared"),
    )


def test_within_noise_too_only_what_can_be_compared_is_counted(store: Store) -> None:
    made(store, "one", 0.0, 0, None, "a", model={"seed": 0})
    made(store, "two", 0.0, 1, None, "a", model={"seed": 1})
    made(store, "three", -1.0, 2, None, "b", model={"seed": 2})

    assert "has the lowest held-out loss of the 2 that can be compared, 2.3" in verdict(
        compared(store, *NAMES)
    )


@pytest.mark.parametrize("count", [2, 3])
def test_where_no_two_can_be_compared_none_is_the_best(store: Store, count: int) -> None:
    with_tokenizers(store, *"abc"[:count])
    found = compared(store, *NAMES[:count])

    assert verdict(found).startswith("No two of them can be compared: their tokenizers differ")
    assert "nats/token: one 2.3" in verdict(found)
    assert "two 2.0" in verdict(found)
    assert cards(found)[0].name == "Keys that differ"
    assert (found.ranking.best, found.to_json("")["best"]) == (None, None)


def test_the_lowest_on_shared_documents_is_not_called_the_lowest_of_all(store: Store) -> None:
    """The first saw hard documents too: its own loss is highest, on shared ones it is lowest."""
    samples = Samples.drawn(0, 100)
    hard = Samples(
        samples.tokens, samples.hardness + 2.0, [f"{name[:-1]}x" for name in samples.names]
    )
    both = Samples(
        np.concatenate([samples.tokens, hard.tokens]),
        np.concatenate([samples.hardness, hard.hardness]),
        samples.names + hard.names,
    )
    made(store, "one", 0.0, 0, both, train={"lr": 1e-3})
    made(store, "two", 0.3, 1, samples, train={"lr": 2e-3})
    made(store, "three", 0.3, 2, samples, train={"lr": 4e-3})
    found = compared(store, *NAMES)
    own = [known.loss for known in found.found]

    assert own[0] == max(loss for loss in own if loss is not None)
    assert verdict(found).startswith("one is the best of 3 by more than chance, at 2.")
    assert (
        cards(found)[0].name == "Lowest loss on the 100 held-out documents that all were scored on"
    )
    assert cards(found)[0].value == f"{found.ranking.loss:.4f}"
