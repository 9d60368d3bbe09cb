"""`qwen3 init`: a folder that runs as it is, and spoils nothing that is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.cli.init import IGNORED_BY_GIT, make_project
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store


def test_its_config_is_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "init", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "qwen3 run config/config.yaml" in done.stdout
    monkeypatch.chdir(folder)
    dag = Dag.open(Path("config", "config.yaml"), Store(tmp_path / "store"))
    assert dag.experiment.name == "demo"
    assert "&& qwen3 run config/config.yaml &&" in (folder / "dvc.yaml").read_text()


def test_git_sees_the_config_and_no_results(tmp_path: Path) -> None:
    make_project(tmp_path)
    for made in ("store/a", "runs/a", "logs/a", "results/demo/report.html", "results/current/a"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    seen = {".dvcignore", ".gitignore", "dvc.yaml", "results/current/a"}
    seen |= {"config/config.yaml", "config/demo.jsonl", "config/demo-questions.jsonl"}
    assert set(listed.stdout.split()) == seen


def test_a_gitignore_that_is_there_keeps_its_lines(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("secret\n/store/")
    make_project(tmp_path)
    lines = (tmp_path / ".gitignore").read_text().splitlines()
    assert lines[:2] == ["secret", "/store/"]
    assert set(IGNORED_BY_GIT.splitlines()) < set(lines)
    assert lines.count("/store/") == 1


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"dvc\.yaml is there already"):
        make_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dvc.yaml"]
