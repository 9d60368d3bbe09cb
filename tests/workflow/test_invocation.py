"""A call of snakemake, as its rules ask it: what is told, what is refused, what is written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline_lib.config.dag import FROZEN_VARIABLE
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from pipeline_lib.workflow.invocation import Invocation, Workflow, open_dag

CONFIG = """\
experiment: small
model: {source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}
data: {train: [{source: pydoc, max_rows: 400}]}
tokenize: {max_tokens: 128}
shard: {block_tokens: 128}
cluster: {cpu_ranks: 1}
train: {precision: fp32, global_batch_tokens: 2048, max_steps: 12}
"""


@dataclass
class FakeWorkflow:
    """Snakemake's own object, as far as it is asked: here of `snakemake -n`."""

    dryrun: bool = True
    is_main_process: bool = True
    local_exec: bool = True
    remote_exec: bool = False
    executor_plugin: object | None = "any"
    touch: bool = False
    cores: int = 4
    overwrite_configfiles: Iterable[Path] = (Path("my.yaml"),)
    config_settings: Any = field(default_factory=lambda: SimpleNamespace(config={}))
    iocache: Any = field(default_factory=lambda: SimpleNamespace(exists_local={}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoked(folder: Path, text: str, workflow: Workflow, told: list[str]) -> Invocation:
    """A call for a config of `text`, in a process with no variables."""
    (folder / "my.yaml").write_text(text)
    environ: dict[str, str] = {}
    dag = open_dag(workflow, Store(folder / "store"), environ, told.append)
    assert environ[FROZEN_VARIABLE] == str(dag.frozen_path)
    return Invocation(workflow, dag, Site(), environ, told.append)


def no_request(digest: str) -> JobRequest:
    raise AssertionError("SLURM is not asked")


def refuse_all(invocation: Invocation) -> None:
    for one in invocation.dag.experiments:
        invocation.refuse_training(one.ref("train").digest, "train_stage", no_request, ())


def test_findings_are_told_once_and_a_dry_run_writes_nothing(folder: Path) -> None:
    told: list[str] = []
    text = CONFIG.replace("max_steps: 12", "max_steps: 12, lr: 4.0")
    invocation = invoked(folder, text, FakeWorkflow(), told)
    for _ in range(2):
        invocation.begin()
        refuse_all(invocation)
    assert [line.partition(": ")[0] for line in told] == ["warning", "warning", "note"]
    assert told[-1] == "note: 12 optimizer steps"
    assert not (folder / "store").exists()


def test_a_run_is_frozen_before_its_jobs(folder: Path) -> None:
    invocation = invoked(folder, CONFIG, FakeWorkflow(dryrun=False), [])
    assert not invocation.dag.frozen_path.exists()
    invocation.begin()
    assert invocation.dag.frozen_path.exists()


def test_all_trainings_of_a_sweep_are_refused_at_once_and_their_plans_are_not(folder: Path) -> None:
    text = CONFIG.replace("hidden_size: 32, layers: 2", "hidden_size: 8192, layers: 16, heads: 64")
    text = text.replace("{cpu_ranks: 1}", "{gpus_per_node: 1, gpu: a10, memory_gb: 9000}")
    text = text.replace("precision: fp32", "precision: bf16, keep_last: 1")
    sweep = "sweep: {train.strategy: [ddp, fsdp]}\n"
    told: list[str] = []
    invocation = invoked(folder, text + sweep, FakeWorkflow(), told)
    first = invocation.dag.experiments[0]
    plan = first.ref("plan").digest
    assert invocation.stage_inputs(plan)
    with pytest.raises(ConfigError) as raised:
        invocation.refuse_training(first.ref("train").digest, "train_stage", no_request, ())
    assert raised.value.source == "experiment 'small'"
    said = [text for text in raised.value.problems if text.startswith("train.strategy: ")]
    assert [text.split()[1] for text in said] == ["ddp", "fsdp"]


SWEEP = "sweep: {evaluate.generations: [1, 2]}\n"  # one training, and two evaluations of its model


def test_a_job_of_a_cluster_goes_on_with_what_snakemake_wants_of_its_training(folder: Path) -> None:
    main = invoked(folder, CONFIG + SWEEP, FakeWorkflow(local_exec=False), [])
    training = main.dag.experiment.ref("train").digest
    main.note_wanted(["train_stage", "merge_stage", "evaluate_stage", "all"])
    environ = main._environ
    in_job = FakeWorkflow(is_main_process=False, local_exec=False, remote_exec=True)

    def following(site: Site) -> list[str]:
        invocation = Invocation(in_job, main.dag, site, environ, print)
        return [spec.stage for spec in invocation.following(training)]

    assert following(Site()) == ["merge", *["evaluate"] * 4]  # two of them of the base model
    assert following(Site(one_job_per_training=False)) == []
    assert main.following(training) == []  # of a training on the machine of snakemake
    main.note_wanted(["train_stage", "merge_stage"])
    assert following(Site()) == ["merge"]


def test_what_a_job_reads_again_tells_and_refuses_nothing(folder: Path) -> None:
    told: list[str] = []
    text = CONFIG.replace("max_steps: 12", "max_steps: 12, lr: 4.0")
    main = invoked(folder, text, FakeWorkflow(dryrun=False), told)
    main.begin()
    told.clear()
    environ = {FROZEN_VARIABLE: str(main.dag.frozen_path)}
    in_job = FakeWorkflow(is_main_process=False)
    dag = open_dag(in_job, main.dag.store, environ, told.append)
    invocation = Invocation(in_job, dag, Site(), environ, told.append)
    invocation.begin()
    refuse_all(invocation)
    assert told == []
    assert [one.name for one in dag.experiments] == ["small"]
