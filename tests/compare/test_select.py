"""Which experiments are meant by what was typed."""

import json
import os
from pathlib import Path

import pytest

from pipeline_lib.compare.subjects import Subject, select
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.store import Store
from tests.compare.fakes import experiment
from tests.status.stubs import CONFIG


def frozen(store: Store, name: str, frozen_at: float = 1e9, **changes: object) -> str:
    """Freeze one; the digest of its report."""
    what = experiment(name, **changes)  # type: ignore[arg-type]
    path = Dag((what,), store).freeze()
    os.utime(path, (frozen_at, frozen_at))
    return what.ref("report").digest


def reports(*texts: str, store: Store) -> list[str]:
    return [subject.parts["report"] for subject in select(texts, store)]


def problem(*texts: str, store: Store) -> str:
    with pytest.raises(ConfigError) as caught:
        select(texts, store)
    return str(caught.value)


def test_a_name_is_the_newest_of_that_name_and_a_digest_tells_the_older_from_it(
    store: Store,
) -> None:
    old, new = frozen(store, "demo", 1e9), frozen(store, "demo", 2e9, train={"lr": 1e-3})
    other = frozen(store, "other", 1e9)

    assert reports("demo", "other", store=store) == [new, other]
    assert reports(new[:6], old[:6], store=store) == [new, old]
    assert reports("demo", old, "demo", store=store) == [new, old]  # each once
    stem = next(
        path.stem for path in (store.root / "experiments").iterdir() if old in path.read_text()
    )
    assert reports("demo", stem[:5], store=store) == [new, old]


def test_a_pattern_names_a_sweep_and_a_config_file_all_that_is_in_it(
    store: Store, tmp_path: Path
) -> None:
    swept = [frozen(store, f"demo-lr={lr}", train={"lr": lr}) for lr in (0.001, 0.002)]
    frozen(store, "other")
    config = tmp_path / "swept.yaml"
    config.write_text(
        CONFIG.format(name="swept", lr="1.0e-3") + "sweep: {train.lr: [1.0e-3, 2.0e-3, 4.0e-3]}\n"
    )

    assert reports("demo-*", store=store) == swept
    names = [subject.name for subject in select([str(config)], store)]
    assert names == ["swept-lr=0.001", "swept-lr=0.002", "swept-lr=0.004"]


def test_another_store_is_named_before_a_colon(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "elsewhere")
    digest = frozen(store, "demo")
    assert frozen(other, "demo") == digest

    found = select(["demo", f"{other.root}:demo"], store)

    assert [subject.store.root for subject in found] == [store.root, other.root]
    assert "is not a folder" in problem("demo", "nowhere:demo", store=store)


def test_what_cannot_be_compared_is_refused(store: Store) -> None:
    first = frozen(store, "demo")
    for number in range(21):
        frozen(store, f"run-{number}", train={"seed": number})

    assert "did you mean 'demo'" in problem("demmo", "run-1", store=store)
    assert "known: demo, run-0" in problem("zzz", "run-1", store=store)
    assert "name at least two different ones" in problem("demo", first, store=store)
    assert "21 experiments were named; at most 20" in problem("run-*", store=store)
    assert "\x1b" not in problem("\x1b[2Jevil", "demo", store=store)


def test_a_digest_that_begins_several_is_refused_with_their_names(store: Store) -> None:
    for number in range(2):
        path = store.root / "experiments" / f"abcd{number}.json"
        write_json(
            path, {"config": {"experiment": f"e{number}"}, "parts": {"report": f"abcdef{number}"}}
        )

    assert "e0 (abcdef0), e1 (abcdef1)" in problem("abcd", "e1", store=store)
    assert reports("abcdef0", "e1", store=store) == ["abcdef0", "abcdef1"]


def test_a_damaged_frozen_experiment_is_refused_by_name_and_hides_no_other(store: Store) -> None:
    first, second = frozen(store, "one"), frozen(store, "two")
    damaged = store.root / "experiments" / "feedfeed.json"
    damaged.write_text('{"config": {"experi')

    assert reports("one", "two", store=store) == [first, second]
    with pytest.raises(IntegrityError, match="feedfeed.json: not a valid experiment file"):
        select(["one", "feedfeed.json"], store)


def test_a_config_of_an_older_version_is_compared_as_far_as_it_goes(store: Store) -> None:
    path = store.root / "experiments" / "old.json"
    write_json(
        path,
        {
            "config": {"experiment": "old", "train": 3},
            "parts": {"report": "0123456789abcdef", "x": 7},
        },
    )

    subject = select(["old", frozen(store, "new")[:8]], store)[0]

    assert subject == Subject(
        store, "old", json.loads(path.read_text())["config"], {"report": "0123456789abcdef"}
    )
