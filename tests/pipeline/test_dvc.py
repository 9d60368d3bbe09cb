"""DVC records real runs of the pipeline, all in one store, and gives them back."""

import copy
import csv
import io
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

LR = "config/config.yaml:train.lr={}"


@pytest.fixture(scope="module")
def repository(small: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project as a git repository, as a clone is, with two experiments.

    `first` is what had run in the working tree, `aside` runs with another learning rate in a copy
    of it.
    """
    project = small.copy_to(tmp_path_factory.mktemp("repository") / "project")
    project.environment = project.environment | {
        "VIRTUAL_ENV": str(Path(project.environment["PATH"].split(":")[0]).parent),
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "user.name",
        "GIT_CONFIG_VALUE_0": "test",
        "GIT_CONFIG_KEY_1": "user.email",
        "GIT_CONFIG_VALUE_1": "test@localhost",
    }
    (project.root / ".gitignore").write_text(
        "/store/\n/runs/\n/logs/\n/.snakemake/\n/results/?*\n!/results/current/\n__pycache__/\n/dvc_plots/\n"
    )
    (project.root / "results/current").mkdir(parents=True)
    (
        project.root / "results/current/config.yaml"
    ).touch()  # `dvc exp apply` removes a folder that git does not know
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        project.git(*command)
    project.run("dvc", "exp", "run", "--name", "first")
    output = project.run(
        "dvc", "exp", "run", "--temp", "--name", "aside", "-S", LR.format("5e-4")
    ).stdout
    assert executed(output) == ["evaluate", "merge", "plan", "report", "train"]
    return project


def losses(project: Project) -> dict[str, float]:
    """The tuned loss of each recorded experiment by its name."""
    rows = csv.DictReader(io.StringIO(project.run("dvc", "exp", "show", "--csv").stdout))
    return {
        row["Experiment"]: float(row["eval.tuned.loss"])
        for row in rows
        if row["typ"].startswith("branch")
    }


def published(project: Project) -> str:
    return (project.root / "results/current/metrics.json").read_text()


def test_experiments_are_compared(repository: Project) -> None:
    recorded = losses(repository)
    assert recorded["first"] < recorded["aside"]
    difference = json.loads(
        repository.run("dvc", "metrics", "diff", "first", "aside", "--json").stdout
    )
    changed = difference["results/current/metrics.json"]["eval.tuned.loss"]
    assert changed["new"] - changed["old"] == pytest.approx(changed["diff"])
    assert changed["diff"] == pytest.approx(recorded["aside"] - recorded["first"], rel=1e-3)
    repository.run("dvc", "plots", "diff", "first", "aside")
    page = (repository.root / "dvc_plots/index.html").read_text()
    assert '"rev": "first"' in page
    assert '"rev": "aside"' in page
    assert page.count('"peak_memory_mb"') >= 2


def test_going_back_reruns_nothing_and_gives_the_first_result_again(repository: Project) -> None:
    """In the working tree to what ran in a copy, and back to what ran in the tree."""
    first = published(repository)
    repository.run("dvc", "exp", "apply", "aside")
    assert published(repository) != first
    output = repository.run("dvc", "exp", "run", "--name", "again").stdout
    assert "Nothing to be done" in output
    assert losses(repository)["again"] == losses(repository)["aside"]
    output = repository.run("dvc", "exp", "run", "--name", "back", "-S", LR.format("4e-3")).stdout
    assert "Nothing to be done" in output
    assert published(repository) == first


def test_a_run_of_snakemake_with_another_config_is_recorded_with_that_config(
    repository: Project,
) -> None:
    other = repository.root / "other.yaml"
    other.write_text(repository.config.read_text().replace("generations: 2", "generations: 1"))
    command = ("python", "-m", "pipeline_lib", "record", "other", "other.yaml")
    refused = repository.run(*command, check=False)
    assert refused.returncode == 66
    assert "has no finished report; run `snakemake` with the same config first" in refused.stdout
    repository.snakemake("--configfile", "other.yaml")
    assert "recorded experiment 'small' as other" in repository.run(*command).stdout
    refused = repository.run(*command, check=False)
    assert refused.returncode == 1
    assert "cannot record 'other': an experiment of this name is recorded" in refused.stdout
    other.unlink()
    repository.run("dvc", "exp", "apply", "first")
    repository.run("dvc", "exp", "apply", "other")
    output = repository.snakemake("-n", "--configfile", "results/current/config.yaml").stdout
    assert "Nothing to be done" in output
    rows = csv.DictReader(io.StringIO(repository.run("dvc", "exp", "show", "--csv").stdout))
    assert next(row["evaluate.generations"] for row in rows if row["Experiment"] == "other") == "1"


def test_a_second_clone_pulls_a_recorded_model_loads_it_and_chats(
    repository: Project, tmp_path: Path
) -> None:
    """In the order of the page; without a remote, `record` says that nothing would be sent."""
    remote, bare = tmp_path / "models", tmp_path / "bare.git"
    repository.git("init", "-q", "--bare", str(bare))
    repository.git("remote", "add", "origin", str(bare))
    repository.git("push", "-q", "origin", "HEAD")
    record = ("python", "-m", "pipeline_lib", "record", "best", "--model", "--force")
    assert "warning: DVC has no remote" in repository.run(*record).stdout
    repository.run("dvc", "remote", "add", "--default", "there", str(remote))
    assert "warning" not in repository.run(*record).stdout
    repository.run("dvc", "exp", "push", "origin", "best")
    assert sum(path.is_file() for path in remote.rglob("*")) > 5

    other = copy.copy(repository)
    other.root = tmp_path / "other"
    repository.git("clone", "-q", str(bare), str(other.root))
    other.run("dvc", "remote", "add", "--default", "there", str(remote))
    other.run("dvc", "exp", "pull", "origin", "best")
    other.run("dvc", "exp", "apply", "best")
    folder = other.root / "results/current/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        model.config.vocab_size
        == AutoModelForCausalLM.from_pretrained(repository.sealed("merge")).config.vocab_size
    )
    chat = "qwen3 chat results/current/model --max-new-tokens 4"
    told = other.run("bash", "-c", f"echo What is os.getcwd? | {chat}")
    assert "cut after 4 tokens" in told.stdout or told.stdout.strip()
