"""Ranks start while their input is verified, and open none of it before they are told."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline_lib.launch.environment import private_rendezvous
from pipeline_lib.launch.spawn import HeldRanks
from tests.processes import wait_for
from tests.train.conftest import Arena
from tests.train.launching import Stage, make_stage

# Notes what a process opens, and that it has imported all it needs.
NOTING = """
import os, sys
folder, root = os.environ["NOTED_IN"], os.environ["NOTED_BELOW"]
notes = os.open(f"{folder}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def note(event, arguments):
    if event == "open" and str(arguments[0]).startswith(root):
        os.write(notes, f"{sys.argv[1:2]} opens {arguments[0]}\\n".encode())
    elif event == "import" and arguments[0] == "pipeline_lib.train.strategies":
        os.write(notes, b"imports\\n")

sys.addaudithook(note)
"""


@pytest.fixture
def stage(arena: Arena) -> Stage:
    return make_stage(arena, ranks=1)


@pytest.fixture
def noting(stage: Stage, tmp_path: Path) -> dict[str, str]:
    """The environment of processes that note what they open below the store's root."""
    (tmp_path / "site").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTING)
    root = str(stage.arena.store.root.absolute())
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "NOTED_IN": str(tmp_path / "notes"), "NOTED_BELOW": root}


def notes(noting: Mapping[str, str]) -> list[str]:
    return [
        line
        for path in Path(noting["NOTED_IN"]).iterdir()
        for line in path.read_text().splitlines()
    ]


def test_a_rank_opens_nothing_before_the_word(stage: Stage, noting: dict[str, str]) -> None:
    store, spec = stage.arena.store, stage.spec
    program = [
        "rank",
        "--spec",
        str(store.spec_path(spec.digest)),
        "--plan",
        str(stage.plan_dir),
        "--out",
        "out",
    ]
    program += ["--attempt", "1", "--lock-token", "none"]
    with private_rendezvous() as rendezvous:
        environ = {**os.environ, **noting, **rendezvous}
        with HeldRanks(program, environ, ranks=2) as held:
            wait_for(lambda: notes(noting).count("imports") == 2, "the imports of both ranks")
            time.sleep(2)
            assert not [line for line in notes(noting) if "opens" in line]
            assert all(process.poll() is None for process in held._started.values())
        assert all(process.poll() is not None for process in held._started.values())
    assert not [line for line in notes(noting) if "opens" in line]


def test_told_they_read_and_train(stage: Stage, noting: dict[str, str]) -> None:
    assert stage.run(**noting) == 0, stage.output
    assert [line for line in notes(noting) if "'rank'" in line and "opens" in line]
    assert stage.processes() == []


def test_what_is_not_whole_ends_the_stage_as_if_no_rank_had_been_started(
    stage: Stage, noting: dict[str, str]
) -> None:
    folder = stage.arena.store.sealed(stage.arena.model)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert stage.run(**noting) == 66, stage.output
    assert (
        f"error: {path}: content differs from what was sealed; delete {folder} and run snakemake "
        "again" in stage.output
    )
    assert not [line for line in notes(noting) if "'rank'" in line and "opens" in line]
    assert not (stage.run_dir / "events.jsonl").exists()
    assert stage.processes() == []
