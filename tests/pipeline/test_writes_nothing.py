"""What only looks leaves no trace, and a name still means the model that was finished under it."""

import hashlib
from pathlib import Path

import pytest

from pipeline_lib.config.dag import Dag
from tests.pipeline.conftest import Project, executed

pytestmark = pytest.mark.usefixtures("forked_processes")

LIBRARY = ("python", "-m", "pipeline_lib")
LOOKING = (
    ("snakemake", "-n"),
    ("snakemake", "-n", "rehearse"),
    ("snakemake", "-n", "--profile", "slurm"),
    ("snakemake", "--summary"),
    ("snakemake", "--dag"),
    ("snakemake", "--list-rules"),
    ("snakemake", "--lint"),
    (*LIBRARY, "check"),
    (*LIBRARY, "plan"),
    (*LIBRARY, "status"),
    (*LIBRARY, "status", "config/config.yaml"),
    (*LIBRARY, "store", "gc", "--dry-run"),
)
SWEEP = "sweep: {train.lr: [1.0e-3, 2.0e-3], halving: {first_step: 4}}\n"


def listing(root: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, time and content of all in the folder, without what Snakemake keeps there."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if name.parts[0] == ".snakemake" or "__pycache__" in name.parts:
            continue
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        if path.is_symlink():
            content = str(path.readlink()).encode()
        found[str(name)] = (status.st_mode, status.st_mtime_ns, hashlib.sha256(content).hexdigest())
    return found


def traces(project: Project, *command: str) -> set[str]:
    """What a command changed, made or removed."""
    before = listing(project.root)
    project.run(*command, check=False)
    after = listing(project.root)
    return {name for name in before | after if before.get(name) != after.get(name)}


def test_what_only_looks_writes_nothing_into_an_empty_clone(project: Project) -> None:
    for command in LOOKING:
        assert traces(project, *command) == set(), command
    project.edit("save_every_steps: 3", "save_every_steps: 3, validate_every_steps: 2")
    project.config.write_text(project.config.read_text() + SWEEP)
    for command in LOOKING[:2]:
        assert traces(project, *command) == set(), command


@pytest.mark.slow
def test_what_only_looks_changes_nothing_of_a_finished_run_and_hides_no_model(
    small: Project, tmp_path: Path
) -> None:
    project = small.copy_to(tmp_path / "project")
    finished = project.experiment()
    project.edit("lr: 4.0e-3", "lr: 2.0e-3")
    for command in LOOKING:
        assert traces(project, *command) == set(), command
    assert executed(project.snakemake("-n").stdout) == [
        "evaluate",
        "merge",
        "plan",
        "report",
        "train",
    ]
    question = "What is os.getcwd?"
    (project.root / "question.txt").write_text(question)
    for is_newer_begun in (False, True):
        if is_newer_begun:
            freeze(project)
        summary = project.run(*LIBRARY, "summary", "small")
        assert "held-out loss, tuned" in summary.stdout
        assert ("its newest config" in summary.stdout) == is_newer_begun
        status = project.run(*LIBRARY, "status", "small").stdout
        assert ("an earlier config is done" in status) == is_newer_begun
        told = project.run(
            "/bin/bash", "-c", f"{' '.join(LIBRARY)} chat small --max-new-tokens 2 < question.txt"
        )
        assert ("its newest config" in told.stdout) == is_newer_begun
    kept = project.run(
        *LIBRARY, "store", "gc", "--keep-experiments", "small", "--newest", "--ignore-queue"
    )
    assert "2 experiments kept" in kept.stdout
    assert project.store.is_sealed(finished.ref("merge"))


def freeze(project: Project) -> None:
    """As a run does that was stopped at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.root)
        Dag.compile([], {}, project.store).freeze()


def test_a_dry_run_knows_what_was_deleted_and_leaves_the_pointers(
    small: Project, tmp_path: Path
) -> None:
    """Also with the directory of a middle stage gone, and that of the plan, which none needs."""
    project = small.copy_to(tmp_path / "project")
    for part in ("merge", "plan"):
        for path in project.sealed(part).rglob("*"):
            path.unlink()
    assert traces(project, "snakemake", "-n") == set()
    assert executed(project.snakemake("-n").stdout) == ["evaluate", "merge", "report"]
    assert "missing" in project.snakemake("--summary").stdout
    assert executed(project.snakemake("-n", "plan").stdout) == ["plan"]
    project.snakemake(project.target("merge"))
    assert project.store.is_sealed(project.experiment().ref("merge"))
