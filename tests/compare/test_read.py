"""What is known of unfinished and of damaged experiments: named, and never a wrong number."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.compare.page import render
from pipeline_lib.compare.read import read_known
from pipeline_lib.compare.show import render as render_text
from pipeline_lib.compare.subjects import Subject
from pipeline_lib.compare.verdict import verdict
from pipeline_lib.config.compile import compile_config, run_digest
from pipeline_lib.config.content import Content
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.schema import Config
from pipeline_lib.core.files import write_json
from pipeline_lib.core.store import Store, describe_file, read_manifest, write_manifest
from pipeline_lib.status.watch import console_on
from tests.compare.fakes import compared, experiment, made, seal
from tests.report.fake_plans import plan
from tests.report.fakes import World, realistic_files

BEFORE_TRAINING = ("model", "data.0", "tokenize", "shard", "plan")


def unfinished(store: Store, lines: list[str]) -> World:
    """One whose training has written `lines` so far."""
    files = realistic_files()
    files["plan"] = {"plan.json": plan(118)}
    world = seal(store, experiment("running", train={"lr": 2e-3}), files, BEFORE_TRAINING)
    folder = store.run_dir(run_digest(world.experiment.specs["train"]))
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return world


def rows(count: int) -> list[str]:
    return [json.dumps(row) + "\n" for row in realistic_files()["train"]["metrics.jsonl"][:count]]


def text_of(store: Store, *names: str, tmp_path: Path) -> str:
    found = compared(store, *names)
    path = tmp_path / "shown"
    with path.open("w") as file:
        console_on(file).print(render_text(found, verdict(found), 100))
    return path.read_text()


def test_an_unfinished_training_is_shown_as_far_as_it_came(store: Store, tmp_path: Path) -> None:
    made(store, "done", 0.0, 0)
    unfinished(store, rows(70))
    found = compared(store, "done", "running")

    numbers = found.measured[1]
    assert (numbers.state, numbers.loss, numbers.steps) == (
        "not finished: step 70 of 118",
        None,
        70,
    )
    assert numbers.supervised_tokens == 70 * 5130
    assert numbers.final_loss == json.loads(rows(70)[-1])["loss"]
    assert numbers.device_hours is not None and numbers.held_s is not None
    assert "No held-out loss: running (not finished: step 70 of 118)." in verdict(found)
    assert "not finished: step 70 of 118" in text_of(store, "done", "running", tmp_path=tmp_path)
    assert "not finished: step 70 of 118" in render(found)


def test_the_generation_config_of_a_local_model_is_a_download(store: Store) -> None:
    sections = {
        **experiment("local").config.model_dump(mode="json"),
        "model": {"source": "local", "path": "base"},
    }
    content = Content(model={}, data=({},), generation={"generation_config.json": "0"})
    world = seal(
        store,
        compile_config(Config.model_validate_json(json.dumps(sections)), content),
        realistic_files(),
    )

    known = read_known(Subject.of(world.experiment, Dag((world.experiment,), store)))

    assert known.manifests["generation"].stage == "download"


def test_broken_lines_are_named_and_the_one_being_written_is_not(store: Store) -> None:
    made(store, "done", 0.0, 0)
    broken = [
        '{"step": 31, "lo\n',
        '["no", "row"]\n',
        '{"loss": 1.0}\n',
        '{"step": 32, "loss": "much"}\n',
    ]
    unfinished(store, [*rows(30), *broken, *rows(40)[30:], '{"step": 41, "loss"'])
    known = compared(store, "done", "running").found[1]

    assert [row.step for row in known.steps] == list(range(1, 41))
    assert len(known.notes) == 1
    assert "metrics.jsonl: 4 lines, the first 31, are damaged and left out" in known.notes[0]


def test_what_an_attempt_did_again_replaces_what_was_lost(store: Store) -> None:
    made(store, "done", 0.0, 0)
    again = [
        json.dumps({**json.loads(line), "attempt": 2, "loss": 1.5}) + "\n" for line in rows(45)[40:]
    ]
    unfinished(store, rows(60) + again)
    known = compared(store, "done", "running").found[1]

    assert [row.step for row in known.steps] == list(range(1, 46))
    assert [row.loss for row in known.steps[40:]] == [1.5] * 5
    assert known.notes == []


def test_one_that_is_not_begun_is_said_to_be_so(store: Store) -> None:
    made(store, "done", 0.0, 0)
    seal(store, experiment("later", train={"lr": 1e-3}), {}, ("model",))
    found = compared(store, "done", "later")

    assert verdict(found).startswith("Only done has a held-out loss")
    assert "later (not begun)" in verdict(found)
    assert render(found)


def change(path: Path) -> None:
    path.write_text(path.read_text().replace("e", "E", 1))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("part", "name", "damage"),
    [
        ("evaluate", "metrics.json", change),
        ("evaluate", "metrics.json", delete),
        ("evaluate", "scores.jsonl", change),
        ("evaluate", "scores.jsonl", delete),
        ("evaluate", "generations.jsonl", change),
        ("train", "metrics.jsonl", truncate),
        ("train", "summary.json", change),
        ("train", "events.jsonl", truncate),
        ("tokenize", "ledger.json", change),
        ("shard", "train/index.json", change),
    ],
)
def test_a_file_that_is_not_what_was_sealed_is_named_and_not_shown(
    store: Store, part: str, name: str, damage: Any
) -> None:
    made(store, "good", 0.0, 0)
    world = made(store, "bad", 0.2, 1, train={"lr": 1e-3}, tokenize={"system": "Be brief."})
    path = world.folder(part) / name
    damage(path)
    found = compared(store, "good", "bad")

    assert found.found[0].notes == []
    assert any(str(path) in note for note in found.found[1].notes)
    assert "worse" not in verdict(found) or part != "evaluate"
    if name == "metrics.json":
        assert found.measured[1].loss is None
        assert "bad (damaged)" in verdict(found)
    if name == "scores.jsonl":
        assert "is unknown" in verdict(found)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"schema_version": 99}', '{"digest": "x", "files": {}}']
)
def test_a_damaged_manifest_is_named_and_nothing_of_its_directory_is_shown(
    store: Store, content: str
) -> None:
    made(store, "good", 0.0, 0)
    world = made(store, "bad", 0.2, 1, train={"lr": 1e-3})
    (world.folder("evaluate") / "manifest.json").write_text(content)
    found = compared(store, "good", "bad")

    assert found.measured[1].loss is None
    assert str(world.folder("evaluate")) in found.notes[0]
    assert found.notes[0].startswith("bad: ")


@pytest.mark.parametrize(
    ("part", "name", "content"),
    [
        ("evaluate", "metrics.json", {"eval": {"tuned": {"loss": "low"}}}),
        ("evaluate", "scores.jsonl", [1, 2]),
        ("evaluate", "scores.jsonl", {"document": "x", "tokens": 3, "base": 1.0}),
        ("evaluate", "scores.jsonl", {"document": "x", "tokens": -3, "base": 1.0, "tuned": 1.0}),
        ("train", "metrics.jsonl", {"loss": 1.0}),
        ("train", "plan.json", {"batch": 4}),
    ],
)
def test_a_manifest_made_anew_around_nonsense_still_shows_no_nonsense(
    store: Store, part: str, name: str, content: Any
) -> None:
    made(store, "good", 0.0, 0)
    world = made(store, "bad", 0.2, 1, train={"lr": 1e-3})
    path = world.folder(part) / name
    if name.endswith(".jsonl"):
        path.write_text(json.dumps(content) + "\n")
    else:
        write_json(path, content)
    manifest = read_manifest(world.folder(part))
    files = {**manifest.files, name: describe_file(path)}
    write_manifest(world.folder(part), manifest.model_copy(update={"files": files}))
    found = compared(store, "good", "bad")

    assert any(str(path) in note for note in found.notes)
    assert render(found) and verdict(found)


def test_a_directory_of_another_digest_is_not_taken_for_this_one(store: Store) -> None:
    made(store, "good", 0.0, 0)
    world = made(store, "bad", 0.2, 1, train={"lr": 1e-3})
    folder = world.folder("evaluate")
    write_manifest(folder, read_manifest(folder).model_copy(update={"digest": "0" * 16}))

    found = compared(store, "good", "bad")

    assert found.measured[1].loss is None
    assert "sealed as evaluate 0000000000000000" in found.notes[0]
