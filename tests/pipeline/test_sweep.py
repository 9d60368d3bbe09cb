"""Many experiments in one DAG: shared work is done once, a failure stops no other, halving too.

Halving spares the worst.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.store import Store
from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

# the evaluation is that of the base model
SHARED = ["download", "download", "evaluate", "shard", "tokenize"]
OWN = ["evaluate", "merge", "plan", "report", "train"]
TOO_HIGH = "1.0e+30"  # no step of it is finite
CAREFUL = ("train: {", "train: {validate_every_steps: 3, guards: {max_skips: 1}, ")
SWEEP = f"sweep: {{train.lr: [1.0e-3, 4.0e-3, {TOO_HIGH}]}}\n"
HALVED = SWEEP.replace("]}", "], halving: {first_step: 6, keep: 0.5}}")
BEST = "small-lr=0.004"


@pytest.fixture(scope="module")
def halved(small: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A sweep of three learning rates of which the last fails, with halving, and what was said."""
    project = Project(tmp_path_factory.mktemp("swept"))
    project.take_data(small)
    project.edit(*CAREFUL)
    project.config.write_text(project.config.read_text() + HALVED)
    return project, project.snakemake().stdout


def compiled(project: Project, monkeypatch: pytest.MonkeyPatch) -> Dag:
    """The sweep as it is now."""
    monkeypatch.chdir(project.root)
    return Dag.compile([], {}, Store(Path("store")))


def tensors(folder: Path) -> dict[str, bytes]:
    """The bits of each; headers of such files are not written in one order."""
    parts = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor.tobytes() for part in parts for name, tensor in part.items()}


def test_halving_trains_all_to_the_first_rung_and_only_the_best_to_the_end(
    halved: tuple[Project, str],
) -> None:
    project, output = halved
    assert Counter(executed(output)) == Counter(
        {
            "plan": 3,
            "train": 3 + 2 + 1,
            "merge": 1,
            "evaluate": 2,  # the base model by itself
            "report": 1,
        }
    )
    assert output.count("which trainings of the sweep go on") == 2
    head, best, stopped, failed = lines_of(output)
    assert head == ["experiment", "state", "at a rung", "final loss", "held-out loss", "log"]
    assert best[:2] == [BEST, "done"]
    assert stopped[:2] == ["small-lr=0.001", "stopped"]
    assert best[2].endswith(" at step 12")
    assert stopped[2].endswith(" at step 12")
    assert float(best[2].split()[0]) < float(stopped[2].split()[0])
    assert failed[:2] == ["small-lr=1e30", "failed: train"]
    assert (
        "this training diverged and is out of the sweep, which goes on"
        in (project.root / failed[-1]).read_text()
    )
    assert output.rstrip().count("3 experiments: 1 done, 1 stopped, 1 failed") == 1
    assert not (project.root / "results" / "small-lr=0.001").exists()
    assert "compared: results/small/compare.html\n" in output
    assert (
        "<h1>small: 3 experiments"
        in (project.root / "results" / "small" / "compare.html").read_text()
    )


def test_each_survivor_continued_from_its_checkpoint_and_nothing_was_computed_twice(
    halved: tuple[Project, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dag = compiled(halved[0], monkeypatch)
    [best] = [one for one in dag.experiments if one.name == BEST]
    trained = dag.store.sealed(best.ref("train"))
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["attempt"] for row in rows] == [1] * 6 + [2] * 6 + [3] * 18
    assert [path.name for path in (dag.store.root / "train").iterdir() if path.is_dir()] == [
        trained.name
    ]


def test_a_survivor_has_the_weights_of_the_experiment_run_alone(
    halved: tuple[Project, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, alone = halved[0], Project(tmp_path)
    alone.edit(*CAREFUL)
    alone.edit("experiment: small", f"experiment: {BEST}")
    alone.take_data(swept)
    ref = alone.experiment().ref("train")
    alone.snakemake(alone.target("train"))
    first, second = (tensors(one.store.sealed(ref) / "weights") for one in (swept, alone))
    assert first
    assert first == second


def test_the_same_command_again_makes_what_is_missing_and_nothing_else(
    halved: tuple[Project, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = halved
    assert "Nothing to be done" in project.snakemake("-n").stdout
    first, second = compiled(project, monkeypatch).rungs
    for rung in (first, second):
        (project.store.root / "halving" / f"{rung.digest}.json").unlink()
    dry = project.snakemake("-n").stdout
    assert (executed(dry), dry.count("which trainings of the sweep go on")) == ([], 1)
    again = project.snakemake().stdout
    assert (executed(again), again.count("which trainings of the sweep go on")) == ([], 2)
    assert lines_of(again)[1][:2] == [BEST, "done"]


@pytest.fixture(scope="module")
def swept(halved: tuple[Project, str]) -> tuple[Project, str]:
    """The same sweep, now without halving."""
    project, _ = halved
    project.edit(HALVED, SWEEP)
    done = project.snakemake("--keep-going", check=False)
    assert done.returncode != 0
    return project, done.stdout


def lines_of(output: str) -> list[list[str]]:
    """The cells of the table of outcomes, which comes last."""
    table = output[output.rindex("\nexperiment ") :] if "\nexperiment " in output else output
    lines = re.findall(r"^(?:experiment|small-lr=\S+)  +.+$", table, re.MULTILINE)
    return [re.split(r"  +", line) for line in lines]


def test_without_halving_what_was_stopped_goes_on_and_a_failure_stops_no_other(
    swept: tuple[Project, str],
) -> None:
    project, output = swept
    assert Counter(executed(output)) == Counter(
        {"train": 2, "merge": 1, "evaluate": 1, "report": 1}
    )
    assert "12/30" not in output  # continued after step 12
    assert "continuing from step-00000012" in output
    for name in ("small-lr=0.001", BEST):
        assert (project.root / "results" / name / "report.html").exists()
        assert (project.root / "results" / name / "model" / "config.json").exists()


def test_the_table_at_the_end_has_the_best_first_and_names_the_log_of_what_failed(
    swept: tuple[Project, str],
) -> None:
    project, output = swept
    head, best, second, failed = lines_of(output)
    assert head == ["experiment", "state", "final loss", "held-out loss", "log"]
    assert [best[0], second[0]] == ["small-lr=0.004", "small-lr=0.001"]
    assert best[1] == second[1] == "done"
    assert float(best[3]) < float(second[3])
    assert failed[:2] == ["small-lr=1e30", "failed: train"]
    assert "error:" in (project.root / failed[-1]).read_text()
    assert "3 experiments: 2 done, 1 failed" in output
    assert (
        f"error: 1 job failed\n- {failed[0]}: train (" in output[output.index("3 experiments: ") :]
    )


THREADS = """
from snakemake.api import SnakemakeApi
from snakemake.settings.types import DAGSettings, OutputSettings, ResourceSettings
with SnakemakeApi(OutputSettings()) as api:
    from pathlib import Path
    workflow = api.workflow(resource_settings=ResourceSettings(cores=16), snakefile=Path("workflow/Snakefile"))
    workflow.dag(DAGSettings()).summary()
    print({job.rule.name: job.threads for job in workflow._workflow.dag.jobs})
"""


def test_stages_on_the_gpus_of_one_machine_run_one_at_a_time(project: Project) -> None:
    """Each takes the first GPUs, so that a sweep's would share them."""
    project.config.write_text(f"{project.config.read_text()}sweep: {{train.seed: [1, 2]}}\n")
    project.set_cluster("{cpu_ranks: 2}")
    side_by_side = project.run("python", "-c", THREADS).stdout
    project.edit("cluster: {cpu_ranks: 2}", "cluster: {gpus_per_node: 1, gpu: h100}")
    alone = project.run("python", "-c", THREADS).stdout
    for stage, threads in (("train", 2), ("evaluate", 2)):
        assert f"'{stage}_stage': {threads}" in side_by_side
        assert f"'{stage}_stage': 16" in alone


def test_without_the_one_that_failed_nothing_is_left_to_do(swept: tuple[Project, str]) -> None:
    project, _ = swept
    before = project.config.read_text()
    project.config.write_text(before.replace(f", {TOO_HIGH}", ""))
    output = project.snakemake().stdout
    table = project.run("python", "-m", "pipeline_lib", "summary").stdout
    project.config.write_text(before)
    assert "Nothing to be done" in output
    assert [line[:2] for line in lines_of(table)[1:]] == [
        ["small-lr=0.004", "done"],
        ["small-lr=0.001", "done"],
    ]


def test_commands_know_the_experiments_of_a_sweep(swept: tuple[Project, str]) -> None:
    project, _ = swept

    def command(*words: str, check: bool = True) -> str:
        return project.run("python", "-m", "pipeline_lib", *words, check=check).stdout

    assert f"no problems; 3 experiments have {len(SHARED) + 3 * len(OWN)} stages" in command(
        "check"
    )
    assert "3 experiments: 2 done, 1 not done" in command("summary")
    assert "Experiment small-lr=0.004" in command("summary", "--experiment", "small-lr=0.004")
    assert "of the sweep, 'small-lr=" in command("publish")
    command("publish", "--experiment", "small-lr=0.004")
    resolved = project.root / "results" / "current" / "config.yaml"
    assert "experiment: small-lr=0.004\n" in resolved.read_text()
    assert (
        f"{resolved.relative_to(project.root)}: no problems; experiment 'small-lr=0.004'"
        in command("check", "results/current/config.yaml")
    )
    assert "plan of small-lr=0.001" in (shown := command("plan"))
    assert "the first of 3 experiments" in shown


def test_a_dry_run_of_twenty_shows_all_and_its_run_would_freeze_each(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = (
        "sweep: {train.lr: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3], train.seed: [1, 2, 3, 4]}\n"
    )
    project.config.write_text(project.config.read_text() + sweep)
    output = project.snakemake("-n").stdout
    assert executed(output) == sorted(SHARED + 20 * OWN)
    assert (
        "small-lr=0.001-seed=1: tokenize (1 source, up to 128 tokens a sample, shared with 19 more)"
        in output
    )
    compiled(project, monkeypatch).freeze()
    frozen = [
        json.loads(path.read_text()) for path in (project.store.root / "experiments").glob("*.json")
    ]
    assert sorted(one["config"]["experiment"] for one in frozen) == sorted(
        f"small-lr=0.00{lr}-seed={seed}" for lr in range(1, 6) for seed in range(1, 5)
    )
    assert all(len(one["parts"]) == len(SHARED) + len(OWN) for one in frozen)
    [listed] = (project.store.root / "sweeps").glob("*.json")
    names = json.loads(listed.read_text())["experiments"]
    assert {Path(name).name for name in names} == {
        path.name for path in (project.store.root / "experiments").iterdir()
    }
    assert "error" not in project.snakemake("--profile", "slurm", "-n").stdout.lower().replace(
        "errors/", ""
    )
