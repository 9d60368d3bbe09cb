"""What differs: keys that change the result, those that do not, defaults filled in, the rest."""

from dataclasses import replace

import pytest

from pipeline_lib.compare.differences import Differences, DifferingRow, filled
from pipeline_lib.compare.read import Known
from pipeline_lib.compare.subjects import Subject
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.schema import Config
from pipeline_lib.core.store import Store, read_manifest, write_manifest
from tests.compare.fakes import compared, curve, experiment, made, seal
from tests.report.fakes import realistic_files


def between(*subjects: Subject) -> Differences:
    return Differences.between([Known(subject=subject) for subject in subjects])


def subject(store: Store, **changes: object) -> Subject:
    one = experiment("one", **changes)  # type: ignore[arg-type]
    return Subject.of(one, Dag((one,), store))


def test_only_what_differs_is_shown_and_where_it_runs_is_told_apart(store: Store) -> None:
    changed = {"train": {"lr": 1e-4, "strategy": "fsdp", "replica": "b"}, "cluster": {"nodes": 2}}
    found = between(subject(store), subject(store, **changed))

    assert found.changing == [DifferingRow("train.lr", ("0.003", "0.0001"))]
    assert found.placing == [
        DifferingRow("cluster.nodes", ("1", "2")),
        DifferingRow("train.strategy", ("ddp", "fsdp")),
        DifferingRow("train.replica", ("none", "b")),
    ]
    assert found.software == found.data == found.plan == []


def test_every_key_of_the_config_is_on_one_of_the_two_sides(store: Store) -> None:
    """A key that is neither would be a difference that nobody is told of."""
    default = filled(experiment("one").config.model_dump(mode="json"))
    assert default.keys() == Config.model_fields.keys()
    for section in ("tokenize", "shard", "cluster", "train", "tracking", "merge", "evaluate"):
        for key in default[section]:
            other = {**default, section: {**default[section], key: "another"}}
            found = between(
                replace(subject(store), config=default), replace(subject(store), config=other)
            )
            names = [row.name for row in found.changing + found.placing]
            assert any(name.startswith(f"{section}.{key}") for name in names), f"{section}.{key}"


def test_a_config_that_was_frozen_before_a_key_existed_has_its_default(store: Store) -> None:
    whole = subject(store)
    train = {
        key: value for key, value in whole.config["train"].items() if key not in ("beta2", "lora")
    }
    old = {key: value for key, value in whole.config.items() if key != "merge"} | {"train": train}

    assert between(whole, replace(whole, config=old)).changing == []


def test_sources_are_told_by_content_and_not_by_where_they_lie(store: Store) -> None:
    one = subject(store)
    moved = {
        **one.config,
        "data": {"train": [{"source": "file", "path": "b.jsonl"}], "validation_fraction": 0.05},
    }
    here = {
        **one.config,
        "data": {"train": [{"source": "file", "path": "a.jsonl"}], "validation_fraction": 0.05},
    }
    first = replace(one, config=here)

    same_content = between(first, replace(one, config=moved))
    assert [row.name for row in same_content.placing] == ["data.train[0].path"]
    assert same_content.changing == []

    edited = replace(first, parts={**one.parts, "data.0": "f" * 16})
    assert [row.name for row in between(first, edited).changing] == ["data.0 (content)"]


def test_more_sources_in_one_than_in_the_other_are_a_difference(store: Store) -> None:
    one = subject(store)
    more = {
        **one.config["data"],
        "train": [*one.config["data"]["train"], {"source": "pydoc", "weight": 2.0}],
    }
    found = between(one, replace(one, config={**one.config, "data": more}))

    assert DifferingRow("data.train[1].weight", ("-", "2")) in found.changing


def test_ledger_and_plan_are_compared_number_by_number(store: Store) -> None:
    made(store, "one", 0.0, 0)
    files = realistic_files()
    curve(files, 1)
    ledger = files["tokenize"]["ledger.json"]
    ledger["sources"].pop()
    ledger["total"] |= {"kept": 5000, "dropped": {"longer than 256 tokens": 329, "too odd": 3}}
    files["train"]["plan.json"]["batch"]["accumulation"] = 4
    seal(store, experiment("two", tokenize={"system": "Be brief."}), files)
    found = compared(store, "one", "two").differences

    assert found.data == [
        DifferingRow("samples dropped: nothing supervised", ("7", "-")),
        DifferingRow("samples kept", ("6,838", "5,000")),
        DifferingRow("samples dropped: too odd", ("-", "3")),
    ]
    assert found.plan == [DifferingRow("accumulation", ("2", "4"))]


def test_another_version_of_the_software_is_a_difference(store: Store) -> None:
    made(store, "one", 0.0, 0)
    world = made(store, "two", 0.0, 1, train={"lr": 1e-3})
    folder = world.folder("train")
    manifest = read_manifest(folder)
    write_manifest(
        folder, manifest.model_copy(update={"versions": {**manifest.versions, "torch": "9.9"}})
    )
    software = compared(store, "one", "two").differences.software

    assert [(row.name, row.values[1]) for row in software] == [("torch", "9.9")]


def test_hours_are_those_of_the_report_with_each_attempt_on_its_own_ranks(store: Store) -> None:
    files = realistic_files()
    started = [event for event in files["train"]["events.jsonl"] if event["event"] == "run.start"]
    for event in files["train"]["events.jsonl"]:
        event["attempt"] = 1 if event["at"] < started[1]["at"] else 2
    started[1]["world_size"] = 8
    seal(store, experiment("one"), files)
    made(store, "two", 0.0, 1, train={"lr": 1e-3})
    one = compared(store, "one", "two").measured[0]
    times = [
        [event["at"] for event in files["train"]["events.jsonl"] if event["attempt"] == each]
        for each in (1, 2)
    ]
    held_s = [max(each) - min(each) for each in times]

    assert (one.device, one.restarts) == ("CPU core", 1)
    assert one.device_hours == pytest.approx((2 * held_s[0] + 8 * held_s[1]) / 3600)
    assert one.held_s == pytest.approx(sum(held_s))
