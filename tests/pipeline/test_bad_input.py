"""What a new user gets wrong: one clear message with the file and key or line, nothing lost.

There is no traceback.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.pipeline.conftest import Project

pytestmark = pytest.mark.usefixtures("forked_processes")

ALPACA = {"instruction": "Say hello.", "input": "", "output": "Hello, world."}


def rows(count: int) -> list[str]:
    return [
        json.dumps({**ALPACA, "instruction": f"Say hello {number} times."})
        for number in range(count)
    ]


def use_file(project: Project, lines: list[str]) -> Path:
    """Make the project train on a jsonl file of `lines`."""
    path = project.root / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    text = project.config.read_text()
    project.config.write_text(
        text.replace("{source: pydoc, max_rows: 400}", "{source: file, path: rows.jsonl}")
    )
    return path


def fails_with(project: Project, *expected: str, target: str = "all", code: int = 1) -> str:
    done = project.snakemake(target, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stdout
    assert 'File "' not in done.stdout
    for text in expected:
        assert text in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            {
                "lr: 4.0e-3": "lrr: 4.0e-3",
                "source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2": "source: modelscop",
                "epochs: 2": "epochs: fast",
            },
            [
                "line 7",
                "train.lrr: unknown key",
                "did you mean 'lr'?",
                'model.source: "modelscop" is not one of tiny, local, huggingface, modelscope',
                "train.epochs",
                "fast",
            ],
        ),
        (
            {"{source: pydoc, max_rows: 400}": "{source: file, path: nowhere.jsonl}"},
            ["data.train[0].path", "nowhere.jsonl"],
        ),
    ],
    ids=["typo, source and type", "file"],
)
def test_a_bad_config_is_told_before_anything_runs(
    project: Project, edits: dict[str, str], expected: list[str]
) -> None:
    for old, new in edits.items():
        project.edit(old, new)
    fails_with(project, *expected, code=2)
    checked = project.run("python", "-m", "pipeline_lib", "check", check=False)
    assert checked.returncode == 2
    assert "Traceback" not in checked.stdout
    assert all(text in checked.stdout for text in expected)
    assert not (project.root / "store").exists() or not list(
        (project.root / "store").glob("*/*/manifest.json")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("{gpus_per_node: 1, gpu: a10}", "train.strategy: auto finds no way that fits"),
        ("{gpus_per_node: 1, gpu: h1000}", "cluster.gpu: 'h1000' is not known"),
        ("{gpus_per_node: 1, gpu: v100}", "train.precision: bf16"),
    ],
)
def test_what_cannot_be_trained_is_told_before_anything_is_submitted(
    project: Project, cluster: str, said: str
) -> None:
    """Also by a dry run: here of a model of 12 billion parameters, of which nothing is built."""
    project.edit("hidden_size: 32, layers: 2", "hidden_size: 8192, layers: 16, heads: 64")
    project.set_cluster(cluster)
    project.edit("train: {precision: fp32", "train: {precision: bf16")
    fails_with(project, said, target="-n", code=2)
    checked = project.run("python", "-m", "pipeline_lib", "check", check=False)
    assert checked.returncode == 2
    assert said in checked.stdout
    assert "Traceback" not in checked.stdout
    assert not (project.root / "store" / "download").exists()


@pytest.mark.slow
def test_what_is_too_large_to_train_can_have_its_data_made_and_its_plan_asked_for(
    project: Project,
) -> None:
    project.edit("hidden_size: 32, layers: 2", "hidden_size: 8192, layers: 16, heads: 64")
    project.set_cluster("{gpus_per_node: 1, gpu: a10}")
    project.edit("train: {precision: fp32", "train: {precision: bf16")
    output = fails_with(project, "train.strategy: auto finds no way that fits", target="-n", code=2)
    assert "Error in" not in output
    assert ": plan (1 cuda rank)" in project.snakemake("-n", "plan").stdout


@pytest.mark.slow
def test_several_nodes_can_be_planned_here_and_trained_on_only_as_a_slurm_job(
    project: Project,
) -> None:
    """The refusal comes as Snakemake plans: before a job, without its frames around it."""
    project.set_cluster("{nodes: 2, cpu_ranks: 1, internode_gbit_s: 1}")
    assert ": no problems; " in project.run("python", "-m", "pipeline_lib", "check").stdout
    assert "train_stage" in project.snakemake("-n").stdout
    output = fails_with(project, "cluster.nodes: 2 nodes train as a SLURM job", code=2)
    assert "Error in" not in output
    for _ in ("the stage shows it", "the stage is sealed"):
        assert project.snakemake("plan").stdout.count("plan of small: ") == 1
    experiment = project.experiment()
    spec = project.store.spec_path(experiment.ref("train").digest)
    plan = project.store.pointer(experiment.ref("plan"))
    done = project.run(
        "python",
        "-m",
        "pipeline_lib",
        "train",
        "--spec",
        str(spec),
        "--plan",
        str(plan),
        check=False,
    )
    assert done.returncode == 2
    assert "cluster.nodes: 2 nodes train as a SLURM job" in done.stdout


@pytest.mark.slow
def test_a_dry_run_says_how_many_steps_a_training_has_and_warns_of_few_and_of_little_memory(
    project: Project,
) -> None:
    project.edit("epochs: 2", "max_steps: 12")
    project.set_cluster("{cpu_ranks: 1, memory_gb: 1}")
    output = project.snakemake("-n").stdout
    assert re.search(
        r"warning: train.strategy: \w+ needs [\d.]+ GB of host memory on each node", output
    ), output
    assert ": 12 optimizer steps" in output
    assert "warning: train.max_steps: 12 optimizer steps in all, fewer than 50" in output


@pytest.mark.slow
def test_all_that_is_wrong_is_told_at_once(project: Project) -> None:
    """Keys that do not go together, a file that is not there, and a GPU that nobody knows."""
    project.edit("{source: pydoc, max_rows: 400}", "{source: file, path: nowhere.jsonl}")
    project.set_cluster("{gpus_per_node: 1, gpu: h1000}")
    project.edit("train: {", "train: {shard_ranks: 2, ")
    expected = [
        "3 problems",
        "train.shard_ranks: hsdp needs several replicas",
        "data.train[0].path: no file",
        "cluster.gpu: 'h1000'",
    ]
    output = fails_with(project, *expected, "line ", target="-n", code=2)
    checked = project.run("python", "-m", "pipeline_lib", "check", check=False)
    assert checked.stdout in output


@pytest.mark.slow
def test_what_several_find_wrong_with_a_key_is_told_once(project: Project) -> None:
    project.edit("source: tiny, vocab_tokens: 512, ", "source: tiny, tokenizer: nowhere, ")
    project.set_cluster("{nodes: 2, gpus_per_node: 1, gpu: h100}")
    expected = [
        "line 2: model.tokenizer: 'nowhere' holds no",
        "line 6: cluster.internode_gbit_s: missing",
    ]
    fails_with(project, "2 problems", *expected, target="-n", code=2)


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_told_of_with_all_else(project: Project) -> None:
    # longer than names of files may be: unlike permissions, that holds for root too
    name = "a" * 300
    project.edit("{source: pydoc, max_rows: 400}", f"{{source: file, path: {name}.jsonl}}")
    project.edit("train: {", "train: {shard_ranks: 2, ")
    expected = [
        "train.shard_ranks: works only with",
        f"line 3: data.train[0].path: '{name}.jsonl' cannot be read (File name",
    ]
    fails_with(project, "2 problems", *expected, target="-n", code=2)


@pytest.mark.slow
def test_a_config_is_looked_at_before_its_store(project: Project) -> None:
    project.environment["PIPELINE_STORE"] = str(project.config / "store")
    fails_with(project, "config.yaml is no folder; set PIPELINE_STORE", target="-n", code=2)
    project.edit("train: {", "train: {shard_ranks: 2, ")
    fails_with(project, "train.shard_ranks: works only with", target="-n", code=2)


@pytest.mark.slow
def test_a_store_that_cannot_be_made(project: Project) -> None:
    project.environment["PIPELINE_STORE"] = "/proc/nowhere"
    fails_with(
        project,
        "the store /proc/nowhere: 1 problem",
        "set PIPELINE_STORE to",
        target="plan",
        code=2,
    )


@pytest.mark.slow
def test_a_store_whose_path_snakemake_would_misread(project: Project) -> None:
    project.environment["PIPELINE_STORE"] = str(project.root / "{x}" / "store")
    fails_with(
        project, "its path holds a brace", "set PIPELINE_STORE to one without", target="-n", code=2
    )
    checked = project.run("python", "-m", "pipeline_lib", "check", check=False)
    assert checked.returncode == 2
    assert "its path holds a brace" in checked.stdout


@pytest.mark.slow
def test_any_other_path_may_be_that_of_the_store(project: Project) -> None:
    project.environment["PIPELINE_STORE"] = str(project.root / "a b é%q'x\"$HOME*[x]\n" / "store")
    project.snakemake("plan")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["logs", ".snakemake"])
def test_a_folder_that_snakemake_cannot_write(project: Project, folder: str) -> None:
    """A file in its place: unlike permissions, that holds for root too."""
    (project.root / folder).touch()
    fails_with(
        project,
        f"this folder: 1 problem\n  - {project.root / folder} is no folder",
        target="-n",
        code=2,
    )


@pytest.mark.slow
def test_a_folder_of_results_that_cannot_be_written(project: Project) -> None:
    folder = project.root / "results" / "small"
    folder.parent.mkdir()
    folder.touch()
    fails_with(project, f"this folder: 1 problem\n  - {folder} is no folder", target="-n", code=2)


@pytest.mark.slow
def test_values_beyond_what_anybody_trains_with_are_warned_of(project: Project) -> None:
    project.edit("lr: 4.0e-3", "lr: 4.0")
    library = ("python", "-m", "pipeline_lib")
    for command in (("snakemake", "-n"), (*library, "check"), (*library, "plan")):
        assert "warning: train.lr: 4 is unusual; 5e-6 to" in project.run(*command).stdout


@pytest.mark.slow
def test_an_adapter_of_a_higher_rank_than_its_matrix(project: Project) -> None:
    project.edit("train: {", "train: {method: lora, lora: {rank: 17}, ")
    said = (
        "train.lora.rank: 17 is more than the rank of k_proj, which is 16 x 32; lower it to 16 "
        "or less"
    )
    fails_with(project, said, target="-n", code=2)
    for command in ("check", "plan"):
        done = project.run("python", "-m", "pipeline_lib", command, check=False)
        assert done.returncode == 2
        assert said in done.stdout


@pytest.mark.slow
def test_an_empty_data_set(project: Project) -> None:
    use_file(project, [])
    fails_with(project, "rows.jsonl: holds no rows", code=2)


@pytest.mark.slow
def test_a_corrupt_line_is_named_and_can_be_allowed(project: Project) -> None:
    path = use_file(project, [*rows(60), '{"instruction": "half a row', *rows(60)])
    output = fails_with(
        project, "rows.jsonl:61", "bad_json", "max_quarantined_fraction", target="plan"
    )
    last = output[output.rindex("error: 1 job failed\n") :]  # after all that Snakemake says
    assert "WorkflowError" not in last
    assert "rows.jsonl:61: bad_json" in last
    assert f"    log: logs/tokenize/{project.experiment().ref('tokenize').digest}.log\n" in last
    assert last.endswith("the same command continues: snakemake plan\n")
    project.edit("tokenize: {", "tokenize: {max_quarantined_fraction: 0.05, ")
    project.snakemake("plan")
    ledger = json.loads((project.sealed("tokenize") / "ledger.json").read_text())
    assert ledger["total"]["rows"] == 121
    assert ledger["total"]["quarantined"] == {"bad_json": 1}
    assert path.exists()


@pytest.mark.slow
def test_conversations_without_an_answer(project: Project) -> None:
    """The first row is looked at before anything runs, the others by the stage."""
    asked = {"role": "user", "content": "Anybody there?"}
    unanswered = [json.dumps({"messages": [asked]})] * 5
    answered = json.dumps({"messages": [asked, {"role": "assistant", "content": "I am."}]})
    use_file(project, unanswered)
    fails_with(project, "data.train[0].path: rows.jsonl:1: no assistant turn: only user", code=2)
    use_file(project, [answered, *unanswered])
    fails_with(project, "rows.jsonl", "no_assistant_turn")


@pytest.mark.slow
def test_damage_in_the_store_is_named_and_not_trained_on(small: Project, tmp_path: Path) -> None:
    project = small.copy_to(tmp_path / "project")
    project.forget_training()
    shard = next(project.sealed("shard").glob("train/*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    fails_with(
        project, str(shard.relative_to(project.root)), "content differs from what was sealed"
    )


@pytest.mark.slow
def test_gpus_that_are_not_there_are_told_of_before_anything_is_made(project: Project) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    project.set_cluster("{gpus_per_node: 2}")
    for trains_nothing in ("-n", "--summary", "--dag"):
        assert "train_stage" in project.snakemake(trains_nothing).stdout
    output = fails_with(
        project, "cluster.gpus_per_node: 2 GPUs configured, and this machine has 0", code=2
    )
    assert "Error in" not in output
    assert not (project.root / "store" / "tokenize").exists()


@pytest.mark.slow
def test_an_adapter_target_that_does_not_exist_is_named(project: Project) -> None:
    project.edit("train: {", "train: {method: lora, lora: {targets: [q_proj, v_pro]}, ")
    fails_with(project, "train.lora.targets[1]", "did you mean 'v_proj'?", code=2)


@pytest.mark.slow
def test_config_on_the_command_line_is_refused_rather_than_ignored(project: Project) -> None:
    done = project.snakemake("-n", "--config", "train=x", check=False)
    assert done.returncode != 0
    assert "--configfile" in done.stdout
