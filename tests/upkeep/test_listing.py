"""What `store ls` and `store du` show, and that it does not grow beyond what lies there."""

import io
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Spec
from pipeline_lib.status.survey import Survey
from tests.upkeep.commands import store
from tests.upkeep.stores import LONG_AGO_S, Shop, large_store

Captured = pytest.CaptureFixture[str]


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()
    ]


def test_a_line_for_each_experiment_with_what_is_its_own_and_shared(
    shop: Shop, capsys: Captured
) -> None:
    a, b = shop.variants(["a", "b"])
    shop.add(a)
    shop.train(a)
    shop.add(b, "model", "data.0", age_s=5 * LONG_AGO_S)
    orphan = shop.seal(Spec("merge", 1, {"of": "nothing"}))

    lines = cells(store(capsys, "ls"))

    assert lines[0] == ["experiment", "configs", "stages", "own", "shared", "checkpoints", "used"]
    assert [line[:3] for line in lines[1:3]] == [["a", "1", "11/11"], ["b", "1", "6/11"]]
    assert lines[2][3] == "0 B"  # all that is there of it is a's too
    assert lines[2][-1] == "5 d ago"
    assert lines[3][0].startswith("used by no experiment: 1 directory and 0 leftovers")
    shown = store(capsys, "ls", "--all")
    assert f"{orphan.name}" in shown
    assert "unused: no experiment uses it" in shown
    assert "unused" not in store(capsys, "ls", "a")


def test_names_choose_and_a_wrong_one_is_refused(shop: Shop, capsys: Captured) -> None:
    for experiment in shop.variants(["lr-low", "lr-high", "other"]):
        shop.add(experiment)

    chosen = cells(store(capsys, "ls", "lr-*"))

    assert [line[0] for line in chosen[1:3]] == ["lr-high", "lr-low"]
    with pytest.raises(ConfigError, match="did you mean 'other'"):
        store(capsys, "ls", "otter")
    assert "other" not in store(capsys, "du", "lr-*")


def test_du_adds_up(shop: Shop, capsys: Captured) -> None:
    [a] = shop.variants(["a"])
    shop.add(a)
    run = shop.train(a)
    shop.write(shop.folder / "logs" / "train" / "x.log", "x" * 5000, LONG_AGO_S)
    (run / "quarantine.jsonl").write_text("y" * 70_000)

    lines = {line[0]: line[1:] for line in cells(store(capsys, "du")) if line}

    assert lines["train"][0] == "1"
    assert lines["download"][0] == "3"
    assert lines["logs in logs"] == ["1", "5 kB"]
    assert lines["other files in runs/"][1].startswith("70.")
    counted = [
        line[1].split()
        for name, line in lines.items()
        if len(line) == 2 and name not in ("what", "a")
    ]
    sizes = [float(size) * {"B": 1, "kB": 1e3}[unit] for size, unit in counted]
    whole, unit = lines["together"][0].split()
    assert float(whole) * {"kB": 1e3}[unit] == pytest.approx(sum(sizes), rel=0.01)


@pytest.mark.parametrize("kind", ["nothing", "number", "list", "cut", "folder", "deep"])
def test_a_manifest_that_does_not_read_is_named_and_hides_nothing(
    shop: Shop, capsys: Captured, kind: str
) -> None:
    a, b = shop.variants(["a", "b"])
    shop.add(a)
    shop.add(b)
    path = shop.store.sealed(a.specs["merge"].ref) / "manifest.json"
    text = {
        "nothing": "",
        "number": "7",
        "list": "[]",
        "cut": path.read_text()[:99],
        "deep": "[" * 100_000,
    }.get(kind)
    path.unlink()
    if text is None:
        path.mkdir()
    else:
        path.write_text(text)

    short, shown = store(capsys, "ls"), store(capsys, "ls", "--all")

    assert "1 directory damaged" in short
    assert "b           1        11/11" in short
    assert f"damaged: {path}" in shown
    assert "together" in store(capsys, "du")


def test_what_shows_moves_no_cursor(shop: Shop, capsys: Captured) -> None:
    """Names in a frozen file are whatever somebody wrote there."""
    [a] = shop.variants(["a"])
    path = shop.add(a)
    path.write_text(
        path.read_text().replace('"experiment": "a"', '"experiment": "\\u001b[2Ja\\nb"')
    )
    shop.age(path, LONG_AGO_S)

    for arguments in (("ls",), ("ls", "--all"), ("du",), ("gc", "--dry-run")):
        said = store(capsys, *arguments)
        assert "\x1b" not in said
        assert len(said.splitlines()) == len([line for line in said.splitlines() if line != "b"])


def test_what_is_read_grows_with_the_store_and_no_faster(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files opened, slow on a file server: a few for each directory, whatever the command."""
    monkeypatch.setenv("PATH", str(tmp_path))
    opened = 0
    real = io.open

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal opened
        opened += 1
        return real(*arguments, **options)

    found: dict[int, list[int]] = {}
    for size in (10, 40):
        shop = large_store(tmp_path / str(size), size)
        monkeypatch.setenv("PIPELINE_STORE", str(shop.store.root))
        monkeypatch.chdir(shop.folder)
        monkeypatch.setattr(io, "open", count)
        for command in (["ls"], ["du"], ["gc", "--dry-run", "--keep-experiments", "run-0"], []):
            opened = 0
            if command:
                store(capsys, *command)
            else:
                Survey(shop.store, shop.folder).statuses()
            found.setdefault(size, []).append(opened)
        monkeypatch.setattr(io, "open", real)

    for few, many in zip(found[10], found[40], strict=True):
        assert 0 < many <= 4 * few + 10
    assert max(found[40]) < 40 * 12  # of each experiment six files are its own
