"""A merge that is killed while it writes, proves or seals: the same command makes the same model."""

import os
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project

pytestmark = pytest.mark.slow

# Kills the process of the merge as it opens the file for writing: nothing of it is flushed.
KILLING = """
import os, signal, sys

KILLED_AT = os.environ["KILLED_AT"]

def watch(event, arguments):
    if event == "open" and "/merge/" in str(arguments[0]) and KILLED_AT in str(arguments[0]):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            os.kill(os.getpid(), signal.SIGKILL)

if "merge" in sys.orig_argv:
    sys.addaudithook(watch)
"""


@pytest.mark.parametrize(
    "killed_at",
    [
        "model.safetensors",  # while the weights are written
        "README.md",  # with the proof on disk, before the seal
    ],
)
def test_a_killed_merge_publishes_nothing_and_is_made_again(
    small: Project, tmp_path: Path, killed_at: str
) -> None:
    project = small.copy_to(tmp_path / "project")
    merge = project.store.pointer(project.experiment().ref("merge"))
    sealed = merge.with_suffix("")
    before = small.weights()
    project.run("rm", "-r", str(merge), str(sealed))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(KILLING)
    usual = dict(project.environment)
    project.environment |= {
        "PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}",
        "KILLED_AT": killed_at,
    }
    ended = project.run("snakemake", "--cores", "2", project.target("merge"), check=False)
    assert ended.returncode != 0
    assert "Killed" in ended.stdout
    assert not merge.exists()
    project.environment.clear()
    project.environment.update(usual)
    project.snakemake(project.target("merge"))
    assert project.weights() == before
    assert not list(project.store.root.glob("*/.stage-*"))
