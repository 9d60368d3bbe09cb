"""gc beside jobs that run, begin and end, beside another gc, and killed: with real processes.

The locks are real, too.
"""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.files import canonical_json, remove_dir, write_json
from pipeline_lib.core.lock import locked
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import MANIFEST_NAME, Spec, verify
from pipeline_lib.upkeep.garbage import CleanupRequest, Garbage, find_garbage
from pipeline_lib.upkeep.inventory import Inventory
from pipeline_lib.upkeep.removal import Removal
from tests.processes import finish, running, wait_for
from tests.upkeep.commands import begin, finished, store
from tests.upkeep.stores import LONG_AGO_S, Shop, large_store

Captured = pytest.CaptureFixture[str]


def garbage_but(shop: Shop, kept: str) -> Garbage:
    return find_garbage(Inventory.read(shop.store), CleanupRequest(keep=(kept,)), [], time.time())


def make(shop: Shop, spec: Spec, begun: Path, go_on: Path) -> None:
    """Run a stage until `go_on` is there."""

    def work(job: Job) -> dict[str, Any]:
        begun.touch()
        wait_for(go_on.exists, "the word to go on")
        write_json(job.out / "made.json", {})
        return {}

    lock = run_digest(spec) if spec.stage == "train" else None
    run_stage(work, spec, shop.store, lambda _: None, lock_digest=lock)


def hold(path: Path, held: Path) -> None:
    with locked(path, print):
        held.touch()
        time.sleep(60)


def remove(store_root: Path, kept: str, results: Path) -> None:
    """What the command does, in a process that need not import anything anew."""
    shop = Shop(store_root.parent, store_root.name)
    Removal(garbage_but(shop, kept), results).run()


def sealed(shop: Shop) -> list[Path]:
    return [path.parent for path in shop.store.root.glob(f"*/[0-9a-f]*/{MANIFEST_NAME}")]


@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_what_a_running_stage_and_its_experiment_need_stays(
    shop: Shop, capsys: Captured, part: str
) -> None:
    _, b = shop.finished("a", "b")
    shutil.rmtree(shop.store.sealed(b.specs[part].ref))
    begun, go_on = shop.folder / "begun", shop.folder / "go-on"
    with running(make, shop, b.specs[part], begun, go_on) as process:
        wait_for(begun.exists, "the stage")

        said = store(capsys, "gc", "--keep-experiments", "a")

        assert "also kept: b" in said
        assert f"process {process.pid} on " in said
        go_on.touch()
        finish([process])
    for spec in b.specs.values():
        verify(shop.store.sealed(spec.ref))
    assert shop.store.run_dir(run_digest(b.specs["train"])).is_dir()


def test_what_is_locked_stays_and_can_be_removed_later(shop: Shop) -> None:
    """A stage that begins after the look keeps its directory, a training its run folder."""
    a, b = shop.finished("a", "b")
    shutil.rmtree(shop.store.sealed(b.specs["train"].ref))
    garbage = garbage_but(shop, "a")
    merge, run = b.specs["merge"], shop.store.run_dir(run_digest(b.specs["train"]))
    with ExitStack() as started:
        for name in (merge.digest, run.name):
            held = shop.folder / f"held-{name}"
            started.enter_context(running(hold, shop.store.lock_path(name), held))
            wait_for(held.exists, "the lock")
        removal = Removal(garbage, Path("results"))
        removal.run()

    verify(shop.store.sealed(merge.ref))
    assert run.is_dir()
    left_merge, left_run = removal.left
    assert merge.digest in left_merge
    assert run.name in left_run
    assert not shop.store.sealed(b.specs["report"].ref).exists()
    assert shop.store.sealed(a.specs["merge"].ref).is_dir()

    Removal(garbage_but(shop, "a"), Path("results")).run()
    assert not shop.store.sealed(merge.ref).exists()
    assert not run.exists()
    assert not shop.store.spec_path(b.specs["train"].digest).exists()


def test_an_experiment_that_is_asked_for_again_after_the_look_stays(shop: Shop) -> None:
    """Whether its frozen file is still there then or not."""
    _, b = shop.finished("a", "b")
    garbage = garbage_but(shop, "a")
    shop.add(b, age_s=0.0)
    Removal(garbage, Path("results")).run()
    assert len(sealed(shop)) == 16

    garbage = find_garbage(
        Inventory.read(shop.store), CleanupRequest(keep=("a",)), [], time.time() + 3600
    )
    removal = Removal(garbage, Path("results"))
    removal.forget()
    frozen = shop.add(b, age_s=0.0)
    removal.remove()

    assert frozen.exists()
    assert len(sealed(shop)) == 16
    assert "an experiment that was started meanwhile needs it" in removal.left[0]
    assert all(shop.store.spec_path(spec.digest).exists() for spec in b.specs.values())


def test_an_experiment_that_is_first_asked_for_after_the_look_stays(shop: Shop) -> None:
    """It shares a training with one that goes; no experiment names a sweep's rung training."""
    _, b = shop.finished("a", "b")
    whole = b.specs["train"]
    rung = Spec("train", whole.version, {**whole.settings, "until_step": 3}, whole.inputs)
    rung_path = shop.write(
        shop.store.spec_path(rung.digest), canonical_json(rung.to_json()), LONG_AGO_S
    )
    evaluate = b.specs["evaluate"].digest
    waiting = shop.write(shop.folder / "runs" / ("0" * 16) / "jobs" / evaluate, "", LONG_AGO_S)
    for path in waiting.parents[:2]:
        shop.age(path, LONG_AGO_S)
    garbage = garbage_but(shop, "a")
    assert rung_path in garbage.specs
    assert waiting.parents[1] in [run.path for run in garbage.runs]
    _, new = shop.variants(["a", "new"])
    shop.add(new, age_s=0.0)

    removal = Removal(garbage, Path("results"))
    removal.run()

    for spec in new.specs.values():
        verify(shop.store.sealed(spec.ref))
        assert shop.store.spec_path(spec.digest).exists()
    assert shop.store.run_dir(run_digest(whole)).is_dir()
    assert rung_path.exists()
    assert waiting.exists()
    assert "an experiment that was started meanwhile needs it" in removal.left[0]
    assert not shop.store.sealed(b.specs["report"].ref).exists()


def test_a_stage_that_begins_in_the_midst_waits_and_makes_it_anew(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = shop.finished("a", "b")
    spec, begun, go_on = b.specs["plan"], shop.folder / "begun", shop.folder / "go-on"
    go_on.touch()
    garbage = garbage_but(shop, "a")
    with ExitStack() as started:
        stages = []

        def remove_slowly(path: Path) -> None:
            if path == shop.store.sealed(spec.ref):
                stages.append(started.enter_context(running(make, shop, spec, begun, go_on)))
                time.sleep(0.3)
                assert not begun.exists()
            remove_dir(path)

        monkeypatch.setattr("pipeline_lib.upkeep.removal.remove_dir", remove_slowly)
        Removal(garbage, Path("results")).run()
        finish(stages)

    assert [path.name for path in shop.store.sealed(spec.ref).glob("made*")] == ["made.json"]
    verify(shop.store.sealed(spec.ref))


def test_killed_anywhere_it_leaves_nothing_half_deleted_and_goes_on(shop: Shop) -> None:
    """Each time a little later, until one is through; `run-0` is kept."""
    large_store(shop.folder, 8)
    kept = set(sealed(shop)) - {one.path for one in garbage_but(shop, "run-0").made}
    delay_s, counts = 0.0, [len(sealed(shop))]
    while counts[-1] > len(kept) and delay_s < 10.0:
        with running(remove, shop.store.root, "run-0", Path("results")) as process:
            time.sleep(delay_s)
            process.kill()
            process.join()
        delay_s += 0.01
        for path in sealed(shop):
            verify(path)
        assert all(path.exists() for path in kept)
        counts.append(len(sealed(shop)))
    assert set(counts) > {counts[0], counts[-1]}  # some were killed in the midst

    remove(shop.store.root, "run-0", Path("results"))

    assert len(sealed(shop)) == 11
    assert len(list((shop.store.root / "experiments").iterdir())) == 1
    # What the last kills left is young; later it goes too.
    later = find_garbage(Inventory.read(shop.store), CleanupRequest(), [], time.time() + 3600)
    Removal(later, Path("results")).run()
    hidden = [
        path for path in shop.folder.rglob(".*") if path.name.startswith((".stage-", ".trash-"))
    ]
    assert hidden == []
    assert len([path for path in (shop.folder / "runs").iterdir() if path.name != "locks"]) == 1
    assert len(list((shop.store.root / "specs").iterdir())) == 11


def test_two_at_once_remove_everything_once(shop: Shop) -> None:
    large_store(shop.folder, 8)

    both = [begin("gc", "--keep-experiments", "run-0") for _ in range(2)]
    ends = [finished(process) for process in both]

    assert [code for code, _ in ends] == [0, 0], ends
    removed = sorted(said.rstrip().splitlines()[-1].split(",")[0] for _, said in ends)
    assert removed == ["removed 0 directories", "removed 42 directories"]
    assert len(sealed(shop)) == 11
    code, said = finished(begin("verify"))
    assert (code, said.splitlines()[-1].endswith("12 sealed directories are whole")) == (0, True), (
        said
    )
