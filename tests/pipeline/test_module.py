"""Another workflow takes this one as its module, with a config of its own."""

import subprocess
from pathlib import Path

import pytest

from tests.pipeline.conftest import ROOT, SMALL, Project

OUTER = """\
configfile: "outer.yaml"

module finetune:
    snakefile: "{snakefile}"
    config: config["finetune"]

use rule * from finetune as finetune_*

rule all:
    default_target: True
    input: rules.finetune_all.input
    output: touch("done")
"""


@pytest.fixture
def outer(small: Project, tmp_path: Path) -> Path:
    snakefile = ROOT / "workflow" / "Snakefile"
    (tmp_path / "Snakefile").write_text(OUTER.format(snakefile=snakefile))
    lines = "".join(f"  {line}" for line in SMALL.splitlines(keepends=True))
    (tmp_path / "outer.yaml").write_text(f"finetune:\n{lines}")
    return tmp_path


def planned(small: Project, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["snakemake", "-n", "--cores", "1"]
    return subprocess.run(
        command, cwd=folder, env=small.environment, capture_output=True, text=True, check=False
    )


def test_its_config_is_compiled(small: Project, outer: Path) -> None:
    done = planned(small, outer)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "finetune_train_stage" in said
    assert "small: train (" in said
    assert "not present" not in said


def test_its_problems_are_told_without_a_traceback(small: Project, outer: Path) -> None:
    config = outer / "outer.yaml"
    config.write_text(config.read_text().replace("lr: 4.0e-3", "lrr: 1"))
    done = planned(small, outer)
    assert done.returncode == 2
    assert "the config of the module: 1 problem\n  - train.lrr: unknown key" in done.stderr
