"""The wheel in an environment that has no clone: it brings the rules, and runs in any folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """\
experiment: small
model: {source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}
data: {train: [{source: pydoc, max_rows: 100}], validation_fraction: 0.3}
tokenize: {max_tokens: 256}
shard: {block_tokens: 256}
cluster: {gpus_per_node: 0, cpu_ranks: 1}
train: {precision: fp32, global_batch_tokens: 2048, max_steps: 4}
evaluate: {generations: 1, max_new_tokens: 4}
"""


def run(*command: str | Path, cwd: Path) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of the programs of an environment with the wheel, beside the libraries of this."""
    sources = tmp_path / "sources"
    run("git", "checkout-index", "--all", f"--prefix={sources}/", cwd=ROOT)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sources, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    place = tmp_path / "env"
    venv.create(place)
    [site] = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--python", place / "bin" / "python", "install", "--no-deps", wheel, cwd=tmp_path)
    return place / "bin"


@pytest.mark.slow
def test_it_makes_a_project_and_runs_it(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    run(installed / "qwen3", "init", "mine", cwd=tmp_path)
    config = Path("config", "config.yaml")
    checked = run(installed / "qwen3", "check", config, cwd=folder)
    assert "no problems" in checked
    (folder / config).write_text(CONFIG)
    where = run(
        installed / "python", "-c", "import pipeline_lib; print(pipeline_lib.__file__)", cwd=folder
    )
    assert str(installed.parent) in where
    said = run(installed / "qwen3", "run", config, cwd=folder)
    assert "small: shard (" in said
    assert (folder / "results" / "small" / "report.html").is_file()
