"""The hint at files that a command leaves for git, asked of real repositories and followed.

A shell follows it.
"""

import subprocess
from pathlib import Path

import pytest

from pipeline_lib.core.git import how_to_commit

WRITTEN = [
    Path("results/made anew"),
    Path("results/changed"),
    Path("results/removed"),
    Path("results/same"),
]


def git(*arguments: str) -> str:
    """Run git in the current folder; its output."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, the current folder, with a commit; git ignores what is in `ignored`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    Path("results").mkdir()
    for name in ("changed", "removed", "same"):
        Path("results", name).write_text("before")
    Path(".gitignore").write_text("ignored\n")
    for command in (
        ["init", "-q"],
        ["config", "user.name", "test"],
        ["config", "user.email", "test@localhost"],
    ):
        git(*command)
    git("add", "--all")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_files_that_were_made_changed_and_removed_are_named_and_the_command_commits_them(
    repository: Path,
) -> None:
    WRITTEN[0].write_text("new")
    WRITTEN[1].write_text("after")
    WRITTEN[2].unlink()
    WRITTEN[3].write_text("before")
    Path("mine").write_text("staged by the user")
    git("add", "mine")

    said = how_to_commit(WRITTEN, "Results of demo's")

    assert said is not None
    named, command = said.splitlines()
    assert named == (
        "git has not committed results/made anew, results/changed, results/removed; to commit what "
        "changed:"
    )
    subprocess.run(command, shell=True, check=True, capture_output=True)  # noqa: S602
    assert git("status", "--porcelain") == "A  mine\n"
    assert git("log", "-1", "--format=%s") == "Results of demo's\n"
    assert how_to_commit(WRITTEN, "again") is None


def test_nothing_is_said_of_ignored_files_of_files_elsewhere_and_outside_a_repository(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    files = [Path("ignored"), elsewhere / "cluster.json"]
    for path in files:
        path.write_text("{}")
    assert how_to_commit(files, "none") is None
    monkeypatch.chdir(elsewhere)
    assert how_to_commit([Path("cluster.json")], "none") is None
    monkeypatch.setenv("PATH", "")
    assert how_to_commit([Path("cluster.json")], "none") is None
