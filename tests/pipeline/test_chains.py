"""Three experiments that go on from one another: made in order, killed, changed, traced, kept."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from tests.pipeline.conftest import Project, kill_tree, no_process_left, sealed_times, wait_until
from tests.pipeline.test_interruptions import stage_runs

pytestmark = pytest.mark.slow

CHAIN = """\
model: {source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}
data: {validation_fraction: 0.2}
tokenize: {max_tokens: 128, max_dropped_fraction: 0.5}
shard: {block_tokens: 128, shards: 2}
cluster: {cpu_ranks: 1}
train: {precision: fp32, global_batch_tokens: 1024, micro_batch_blocks: 2, epochs: 1, lr: 4.0e-3, save_every_steps: 3}
evaluate: {generations: 2, max_new_tokens: 8}
experiments:
  text:
    data: {train: [{source: file, path: config/text.jsonl}]}
  sft:
    model: {source: experiment, name: text}
    data: {train: [{source: pydoc, max_rows: 200}]}
    train: {method: lora, epochs: 2}
  more:
    model: {source: experiment, name: sft}
    data: {train: [{source: pydoc, max_rows: 300}]}
  on:
    model: {source: experiment, name: sft, adapter: continue}
    data: {train: [{source: pydoc, max_rows: 200}]}
    train: {method: lora, lr: 1.0e-12, max_steps: 2}
"""  # noqa: E501


def prepared(project: Project) -> Project:
    """The project with the chain as its config, and the raw text of its first experiment."""
    project.config.write_text(CHAIN)
    rows = [
        {"text": f"The number {n} comes after {n - 1}, and {n + 1} follows."} for n in range(90)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (project.config.parent / "text.jsonl").write_text(text)
    return project


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The chain, run to its end."""
    project = prepared(Project(tmp_path_factory.mktemp("chain")))
    project.snakemake()
    return project


def experiments(project: Project, monkeypatch: pytest.MonkeyPatch) -> dict[str, Experiment]:
    """The experiments that the project's config compiles to now."""
    monkeypatch.chdir(project.root)
    dag = Dag.open(Path("config/config.yaml"), project.store)
    return {one.name: one for one in dag.experiments}


def weights(project: Project, experiment: Experiment) -> str:
    """The sha256 of an experiment's merged weights."""
    sha256 = project.manifest("merge", experiment)["files"]["model.safetensors"]["sha256"]
    return str(sha256)


def test_each_trains_the_model_that_the_one_before_has_merged(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiments(finished, monkeypatch)

    for child, parent in (("sft", "text"), ("more", "sft")):
        model = finished.manifest("model", made[child])
        assert model["files"]["model.safetensors"]["sha256"] == weights(finished, made[parent])
        assert model["counts"]["experiment"] == parent
        base = finished.sealed("model", made[child]) / "model.safetensors"
        merged = finished.sealed("merge", made[parent]) / "model.safetensors"
        assert base.samefile(merged), "the model of a parent is linked and not copied"
    assert made["more"].ref("root") == made["text"].ref("model")
    assert len({weights(finished, made[name]) for name in ("text", "sft", "more")}) == 3


def test_adapters_that_are_trained_on_begin_where_their_parent_ended(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiments(finished, monkeypatch)

    adapters = "adapter/adapter_model.safetensors"
    before = load_file(finished.sealed("merge", made["sft"]) / adapters)
    after = load_file(finished.sealed("merge", made["on"]) / adapters)
    assert after.keys() == before.keys()
    for name, values in before.items():  # at a rate at which nothing moves
        np.testing.assert_allclose(after[name], values, rtol=0, atol=1e-9)
    evaluation = json.loads((finished.sealed("evaluate", made["on"]) / "metrics.json").read_text())
    losses = [evaluation["eval"][model]["loss"] for model in ("base", "tuned")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6), "the base is what its parent merged"


def test_the_page_the_card_and_the_trace_show_the_chain(
    finished: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = experiments(finished, monkeypatch)

    merges = {name: one.ref("merge").digest for name, one in made.items()}
    card = (finished.root / "results" / "more" / "model" / "README.md").read_text()
    rows = [line for line in card.splitlines() if line.startswith(("| sft |", "| text |"))]
    assert [row.split(" | ")[1] for row in rows] == [merges["sft"], merges["text"]]
    page = (finished.root / "results" / "more" / "report.html").read_text()
    assert f"experiment sft, merge {merges['sft']}" in page

    told = finished.run("qwen3", "trace", "results/more/model", "--json").stdout
    trace = json.loads(told[told.index("{") :])
    chain = []
    link = trace
    while link is not None:
        chain.append(link["digest"])
        assert link["state"] == "verified"
        model = next(one for one in link["made_from"] if one["part"] == "model")
        link = next((one for one in model["made_from"] if one["part"] == "merge"), None)
    assert chain == [merges["more"], merges["sft"], merges["text"]]


def test_a_change_in_the_middle_reruns_the_middle_and_the_end(
    finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = finished.copy_to(tmp_path / "project")
    before = experiments(project, monkeypatch)
    there = sealed_times(project)
    project.edit("method: lora, epochs: 2", "method: lora, epochs: 3")

    output = project.snakemake("-n").stdout
    assert "text: " not in output
    assert "sft: tokenize" not in output
    project.snakemake()
    after = experiments(project, monkeypatch)
    assert there.items() <= sealed_times(project).items()
    assert after["text"].specs == before["text"].specs
    assert weights(project, after["sft"]) != weights(project, before["sft"])
    assert weights(project, after["more"]) != weights(project, before["more"])


def test_killed_in_the_merge_of_a_parent_and_in_the_training_of_its_child_it_goes_on(
    finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = prepared(Project(tmp_path / "project"))
    made = experiments(project, monkeypatch)
    process = project.start()
    wait_until(lambda: stage_runs(project, "merge"), process, "the merge of the first")
    kill_tree(process)
    assert not project.store.is_sealed(made["text"].ref("merge"))

    for name in ("sft", "more"):
        before = sealed_times(project)
        run = project.store.run_dir(made[name].ref("train").digest)
        process = project.start()
        saved = run / "checkpoints"
        wait_until(lambda: any(saved.glob("step-*")), process, f"a save of {name}")  # noqa: B023
        kill_tree(process)
        assert before.items() <= sealed_times(project).items()
        assert not project.store.is_sealed(made[name].ref("train"))

    project.snakemake()
    for one in made.values():
        assert weights(project, one) == weights(finished, one)
    assert no_process_left(project.root)


def test_a_deleted_parent_is_made_again_and_what_follows_it_stays(
    finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = finished.copy_to(tmp_path / "project")
    made = experiments(project, monkeypatch)
    merge = project.sealed("merge", made["sft"])
    shutil.rmtree(merge)
    there = sealed_times(project)

    assert "sft: merge" in project.snakemake("-n").stdout
    project.snakemake()
    assert there.items() <= sealed_times(project).items()
    assert merge.is_dir()
    told = project.run("qwen3", "trace", "results/more/model", "--json").stdout
    assert '"made again"' in told


def test_what_a_kept_child_was_made_from_is_in_use(
    finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = finished.copy_to(tmp_path / "project")
    made = experiments(project, monkeypatch)
    for path in [*project.store.root.rglob("*"), *(project.root / "runs").rglob("*")]:
        os.utime(path, (1e9, 1e9))
    project.run("qwen3", "store", "gc", "--keep-experiments", "more", "--ignore-queue")

    for name in ("text", "sft"):
        for part in ("merge", "train", "shard", "model"):
            assert project.store.is_sealed(made[name].ref(part)), f"{part} of {name}"
        assert not project.store.is_sealed(made[name].ref("report"))
    pointers = [project.store.pointer(made["more"].ref(part)) for part in ("report", "merge")]
    wanted = [str(pointer.relative_to(project.root)) for pointer in pointers]
    assert "Nothing to be done" in project.snakemake("-n", *wanted).stdout
