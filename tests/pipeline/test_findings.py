"""`check`, `plan` and `snakemake -n` of a config say the same before anything runs."""

import re
from collections.abc import Callable

import pytest

from tests.pipeline.conftest import Project

pytestmark = pytest.mark.usefixtures("forked_processes")

LIBRARY = ("python", "-m", "pipeline_lib")
LINE = re.compile(r"(?:config/config\.yaml: )?((?:warning|note): .*)")
FREE = re.compile(r"[\d.]+ [A-Z]+ are free")  # changes with what others do to the disk
REFUSAL = re.compile(r"(?:the training would be refused: |  - (?:line \d+: )?)(.*)")


def unusual_keys(project: Project) -> None:
    project.edit("lr: 4.0e-3", "lr: 4.0, weight_decay: 5")
    project.edit("epochs: 2", "max_steps: 12")


def little_memory_on_cpus(project: Project) -> None:
    project.set_cluster("{cpu_ranks: 1, memory_gb: 1}")


def large(project: Project, cluster: str) -> None:
    """A model of 12 billion parameters, of which nothing is built."""
    project.edit("hidden_size: 32, layers: 2", "hidden_size: 8192, layers: 16, heads: 64")
    project.edit("train: {precision: fp32", "train: {precision: bf16")
    project.set_cluster(cluster)


def little_memory_on_gpus(project: Project) -> None:
    large(project, "{gpus_per_node: 1, gpu: a10}")


def little_disk(project: Project) -> None:
    large(project, "{gpus_per_node: 8, gpu: h200, memory_gb: 2000}")
    project.edit("save_every_steps: 3", "save_every_steps: 3, keep_last: 9999, strategy: fsdp")


def long_evaluation(project: Project) -> None:
    project.edit("hidden_size: 32, layers: 2", "hidden_size: 1024, layers: 16, heads: 16")
    project.edit("generations: 2, max_new_tokens: 8", "generations: 500, max_new_tokens: 1024")


def idle_gpus(project: Project) -> None:
    project.edit("cluster: {cpu_ranks: 1}", "cluster: {}")
    folder = project.root / "driver"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\n")
    program.chmod(0o755)
    project.environment["PATH"] = f"{folder}:{project.environment['PATH']}"


def a_sweep(project: Project) -> None:
    project.config.write_text(project.config.read_text() + "sweep: {train.lr: [4.0, 5.0e-3]}\n")


def a_row_that_is_no_sample(project: Project) -> None:
    project.edit("{source: pydoc, max_rows: 400}", "{source: file, path: rows.jsonl}")
    (project.root / "rows.jsonl").write_text('{"chosen": "yes", "rejected": "no"}\n' * 9)


def found_in(output: str) -> set[str]:
    """The findings of a command, without the lines that follow a refusal."""
    lines = FREE.sub("", output).splitlines()
    matches = [LINE.fullmatch(line) or REFUSAL.fullmatch(line) for line in lines]
    return {match[1] for match in matches if match}


@pytest.mark.parametrize(
    ("change", "said", "is_refused"),
    [
        (unusual_keys, "warning: train.lr: 4 ", False),
        (little_memory_on_gpus, "train.strategy: auto finds no way that fits: ", True),
        (little_memory_on_cpus, r"warning: train.strategy: \w+ needs [\d.]+ GB of host", False),
        (little_disk, "train.keep_last: the checkpoints kept and ", True),
        (long_evaluation, "warning: evaluate: gives 4 answers of up to 1024 ", False),
        (idle_gpus, "warning: cluster.gpus_per_node: this machine has 1 GPU ", False),
        (a_sweep, r"warning: train.lr: 4 .* \(with small-lr=4.0\)", False),
        (a_row_that_is_no_sample, r"data.train\[0\].path: ", True),
    ],
)
def test_every_command_says_the_same(
    project: Project, change: Callable[[Project], None], said: str, is_refused: bool
) -> None:
    change(project)

    checked = project.run(*LIBRARY, "check", check=False)
    dry = project.snakemake("-n", check=False)
    planned = project.run(*LIBRARY, "plan", check=False)

    found = found_in(checked.stdout)
    assert any(re.match(said, text) for text in found), checked.stdout
    assert found_in(dry.stdout) == found, dry.stdout
    assert found_in(planned.stdout) <= found
    shown = " ".join(FREE.sub("", planned.stdout).split())
    for text in found:  # some stand on the page of the plan, after a word of its own
        assert " ".join(text.removeprefix("warning: ").split()) in shown, planned.stdout
    assert (checked.returncode, dry.returncode) == ((2, 2) if is_refused else (0, 0))
    assert not (project.root / "store" / "download").exists()


def test_a_run_says_it_too_and_once(project: Project) -> None:
    unusual_keys(project)
    found = found_in(project.run(*LIBRARY, "check").stdout)

    output = project.snakemake("plan").stdout

    for text in found:
        assert output.count(f"{text}\n") == 1, output
