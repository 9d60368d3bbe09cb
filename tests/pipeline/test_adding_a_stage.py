"""A stage that is added as docs/code.md says it: a module, a row and a rule, and nothing else."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.pipeline.conftest import ROOT, Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

LIBRARY = ("python", "-m", "pipeline_lib")


def blocks_of_the_page() -> list[str]:
    """The module, the row and the rule of the worked example."""
    page = (ROOT / "docs" / "code.md").read_text()
    section = page.partition("## Adding a stage\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def insert(path: Path, text: str, before: str) -> None:
    """Put `text` into the file at `path`, in front of the only `before`."""
    content = path.read_text()
    assert content.count(before) == 1
    path.write_text(content.replace(before, text + before))


@pytest.fixture
def extended(small: Project, tmp_path: Path) -> Project:
    """A finished project, whose library then gets the stage `lengths`; the report reads it."""
    project = small.copy_to(tmp_path / "project")
    module, row, rule = blocks_of_the_page()
    (project.root / "pipeline_lib/data/lengths.py").write_text(module)
    table = project.root / "pipeline_lib/config/stages.py"
    insert(table, row, before='    Stage(\n        name="shard",')
    end = '            )\n        },\n        title=lambda *_: "one page'
    insert(table, '                "lengths",\n', before=end)
    rules = project.root / "workflow/rules/data.smk"
    rules.write_text(f"{rules.read_text()}\n\n{rule}")
    return project


def state_of(project: Project) -> tuple[str | None, str]:
    """The stage that the only experiment is at, and its state."""
    (found,) = json.loads(project.run(*LIBRARY, "status", "--json").stdout)
    return found["stage"], found["state"]


def test_an_added_stage_is_made_and_shown_as_all_others(extended: Project) -> None:
    extended.run(*LIBRARY, "summary", "small")  # of the experiment that lacks the stage
    for options in ((), ("--profile", "slurm")):
        output = extended.snakemake("-n", *options).stdout
        assert executed(output) == ["lengths", "report"]
        assert "small: lengths (how many tokens the samples have)" in output
    extended.snakemake("download")
    assert state_of(extended) == ("lengths", "not begun")

    assert executed(extended.snakemake("lengths").stdout) == ["lengths"]
    (sealed,) = extended.store.root.glob("lengths/*/lengths.json")
    assert 0 < json.loads(sealed.read_text())["largest"] <= 128
    manifest = json.loads((sealed.parent / "manifest.json").read_text())
    assert (manifest["stage"], list(manifest["inputs"])) == ("lengths", ["tokenize"])

    assert executed(extended.snakemake().stdout) == ["report"]
    assert state_of(extended) == (None, "done")
    assert "Nothing to be done" in extended.snakemake("-n").stdout
    results = extended.root / "results" / "small"
    assert (results / "lengths.json").resolve() == sealed
    lineage = re.findall(r'class="part"><b>([\w.]+)', (results / "report.html").read_text())
    assert lineage[lineage.index("shard") :] == ["shard", "lengths", "tokenize", "data.0", "model"]
    extended.run(*LIBRARY, "store", "verify")


def test_an_added_stage_goes_with_its_experiment_and_before_what_it_reads(
    extended: Project,
) -> None:
    extended.snakemake()
    extended.edit("experiment: small", "experiment: other")
    extended.edit("max_tokens: 128", "max_tokens: 64")
    extended.snakemake("download")
    for folder in (extended.store.root, extended.root / "runs"):
        for path in folder.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
    command = (*LIBRARY, "store", "gc", "--keep-experiments", "other", "--ignore-queue")
    removed = re.findall(r"^(\w+) +[0-9a-f]{16} ", extended.run(*command).stdout, re.MULTILINE)
    assert removed.index("lengths") < removed.index("tokenize")
    assert not list(extended.store.root.glob("lengths/*"))
    assert "lengths" in executed(extended.snakemake("-n").stdout)
