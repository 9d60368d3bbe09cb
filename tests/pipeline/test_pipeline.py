"""The whole pipeline through real Snakemake: what it makes, what it reruns and what it does not."""

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.conftest import Project, executed, sealed_times

pytestmark = pytest.mark.usefixtures("forked_processes")

STAGES_AFTER_TRAINING = ["evaluate", "merge", "report"]
ALL = [
    "download",
    "download",
    "evaluate",
    "evaluate",
    "merge",
    "plan",
    "report",
    "shard",
    "tokenize",
    "train",
]


@pytest.fixture
def restored(finished: Project) -> Iterator[Project]:
    """The finished project, its config given back afterwards."""
    before = finished.config.read_text()
    yield finished
    finished.config.write_text(before)


def test_it_learned(finished: Project) -> None:
    metrics = json.loads((finished.sealed("evaluate") / "metrics.json").read_text())
    assert metrics["eval"]["tuned"]["loss"] < metrics["eval"]["base"]["loss"] - 1
    assert metrics["verdict"]["improved"] is True


def test_the_model_loads_as_a_user_loads_it(finished: Project) -> None:
    folder = finished.root / "results/small/model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is os.getcwd?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    with torch.no_grad():
        logits = model(**tokenizer(text, return_tensors="pt")).logits
    assert logits.shape[-1] == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"  # noqa: S105 - a token of text, no secret
    assert model.config.tie_word_embeddings is True


def test_the_report_is_one_page_beside_the_model(finished: Project) -> None:
    page = (finished.root / "results/small/report.html").read_text()
    assert "small" in page
    assert "n/a" not in page, "a figure is missing, or a stage has renamed it"
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)


def test_a_second_run_does_nothing(finished: Project) -> None:
    before = sealed_times(finished)
    assert "Nothing to be done" in finished.snakemake().stdout
    assert sealed_times(finished) == before


@pytest.mark.slow
def test_another_learning_rate_reuses_the_data_and_the_way_back_reruns_nothing(
    restored: Project,
) -> None:
    restored.edit("lr: 4.0e-3", "lr: 2.0e-3")
    assert executed(restored.snakemake().stdout) == sorted(
        ["plan", "train", *STAGES_AFTER_TRAINING]
    )
    link = restored.root / "results/small/model"
    assert link.resolve() == restored.sealed("merge").resolve()
    restored.edit("lr: 2.0e-3", "lr: 4.0e-3")
    assert "Nothing to be done" in restored.snakemake().stdout
    assert link.resolve() == restored.sealed("merge").resolve()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("experiment: small\n", "# a comment\nexperiment:    small\n"),
        ("cluster: {cpu_ranks: 1}", "cluster: {cpu_ranks: 2}"),
        ("train: {precision", "train: {strategy: fsdp, save_every_steps: 9, precision"),
        ("train: {precision", "train: {strategy: auto, precision"),
    ],
    ids=["comment", "cluster", "placement", "auto"],
)
def test_what_does_not_matter_reruns_no_finished_stage(
    restored: Project, old: str, new: str
) -> None:
    restored.config.write_text(restored.config.read_text().replace(", save_every_steps: 3", ""))
    restored.edit(old, new)
    assert "Nothing to be done" in restored.snakemake().stdout


def test_another_text_of_a_rule_reruns_nothing(restored: Project) -> None:
    rules = restored.root / "workflow/rules/train.smk"
    before = rules.read_text()
    rules.write_text(
        before.replace("python -m pipeline_lib train", "python -u -m pipeline_lib train")
    )
    assert "Nothing to be done" in restored.snakemake().stdout
    rules.write_text(before)


@pytest.mark.slow
def test_what_is_deleted_is_made_again_and_nothing_else(restored: Project) -> None:
    """A directory in the middle; that and its pointer, now unneeded; and all that comes after."""
    weights = restored.weights()
    shutil.rmtree(restored.sealed("merge"))
    assert executed(restored.snakemake("-n").stdout) == STAGES_AFTER_TRAINING
    restored.store.pointer(restored.experiment().ref("merge")).unlink(missing_ok=True)
    assert executed(restored.snakemake("-n").stdout) == STAGES_AFTER_TRAINING
    for part in ("evaluate", "report"):
        shutil.rmtree(restored.sealed(part))
    before = sealed_times(restored)
    assert executed(restored.snakemake().stdout) == STAGES_AFTER_TRAINING
    assert before.items() <= sealed_times(restored).items()
    assert (restored.root / "results" / "small" / "model" / "config.json").is_file()
    assert restored.weights() == weights


def test_a_touched_pointer_reruns_nothing(restored: Project) -> None:
    pointer = restored.store.pointer(restored.experiment().ref("shard"))
    before = pointer.stat()
    pointer.touch()
    assert "Nothing to be done" in restored.snakemake().stdout
    os.utime(pointer, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
def test_lost_pointers_make_stages_verify_and_keep_what_they_have(restored: Project) -> None:
    before = sealed_times(restored)
    for part in ("train", "merge", "evaluate", "report"):
        restored.store.pointer(restored.experiment().ref(part)).unlink()
    output = restored.snakemake().stdout
    assert executed(output) == sorted(["train", *STAGES_AFTER_TRAINING])
    assert output.count("already done, verified") == 4
    assert sealed_times(restored) == before


@pytest.mark.slow
def test_auto_trains_as_the_plan_has_chosen(restored: Project) -> None:
    restored.edit("train: {precision", "train: {strategy: auto, until_step: 2, precision")
    output = restored.snakemake("--until", "train_stage").stdout
    plan = json.loads((restored.sealed("train") / "plan.json").read_text())
    chosen = plan["chosen"]
    assert chosen["strategy"] in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    assert chosen["micro_batch_blocks"] == 2, "the config gives it"
    assert plan["prediction"]["changes"]["strategy"] == chosen["strategy"]
    assert f"train: {chosen['strategy']} on 1 cpu rank" in output
    assert json.loads((restored.sealed("train") / "summary.json").read_text())["steps"] == 2


def test_the_plan_is_a_target_and_shows_its_table(finished: Project) -> None:
    output = finished.snakemake("plan").stdout
    assert "plan of small" in output
    assert re.search(r"^WAY +ddp, micro-batch 2 x accumulation 8$", output, re.MULTILINE), output
    assert re.search(r"^   fsdp +\S+ [KMG]iB ", output, re.MULTILINE), "the other strategies"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("merge",), ("--until", "merge")], ids=["target", "until"])
def test_a_stage_is_a_target_with_what_it_needs(project: Project, words: tuple[str, ...]) -> None:
    wanted = [stage for stage in ALL if stage not in ("evaluate", "report")]
    assert executed(project.snakemake("-n", *words).stdout) == wanted


@pytest.mark.slow
def test_the_report_of_snakemake_has_our_page(finished: Project) -> None:
    finished.snakemake("--report", "snakemake-report.html")
    assert "report_stage" in (finished.root / "snakemake-report.html").read_text()


def test_a_dry_run_reads_well_and_needs_no_slurm(project: Project) -> None:
    output = project.snakemake("--profile", "slurm", "-n").stdout
    assert executed(output) == ALL
    assert "small: train (full fine-tuning by ddp on 1 cpu rank)" in output


def test_options_of_sbatch_are_taken_from_the_command_line_and_other_resources_left(
    project: Project,
) -> None:
    given = (
        "train_stage:slurm_extra=--exclude=n2",
        "train_stage:mem_mb=16000",
        "merge_stage:mem_mb=9000",
    )
    assert executed(project.snakemake("-n", "--set-resources", *given).stdout) == ALL
    refused = project.snakemake(
        "-n", "--set-resources", "train_stage:slurm_extra=--signal=USR1@5", check=False
    )
    assert refused.returncode == 2
    assert "slurm_extra of train_stage: 1 problem" in refused.stdout


LOCAL_RULES = """
from pathlib import Path
from snakemake.api import SnakemakeApi
from snakemake.settings.types import OutputSettings, ResourceSettings
with SnakemakeApi(OutputSettings()) as api:
    workflow = api.workflow(resource_settings=ResourceSettings(cores=1), snakefile=Path("workflow/Snakefile"))._workflow
    print({name for name in workflow._localrules if name.endswith("_stage")})
"""


def test_what_takes_seconds_becomes_a_job_only_where_the_site_says_so(project: Project) -> None:
    def local_stages() -> set[str]:
        return set(
            ast.literal_eval(project.run("python", "-c", LOCAL_RULES).stdout.splitlines()[-1])
        )

    assert local_stages() == {"download_stage", "push_stage", "plan_stage", "report_stage"}
    site = project.root / "site.yaml"
    site.write_text("short_stages_as_jobs: true\n")
    project.environment["PIPELINE_SITE"] = str(site)
    assert local_stages() == {"download_stage", "push_stage"}  # they need the network


@pytest.mark.slow
def test_lora_tunes_the_model_of_a_finished_experiment(finished: Project) -> None:
    """A second experiment whose base is the first's folder: adapters on a trained model."""
    config = finished.root / "lora.yaml"
    config.write_text(
        finished.config.read_text()
        .replace("experiment: small", "experiment: small-lora")
        .replace(
            "{source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}",
            "{source: local, path: results/small/model}",
        )
        .replace("train: {", "train: {method: lora, lora: {rank: 8, alpha: 16}, strategy: fsdp, ")
    )
    finished.snakemake("--configfile", "lora.yaml")
    experiment = finished.experiment(config)
    metrics = json.loads((finished.sealed("evaluate", experiment) / "metrics.json").read_text())
    first = json.loads((finished.sealed("evaluate") / "metrics.json").read_text())
    assert metrics["eval"]["base"]["loss"] == pytest.approx(
        first["eval"]["tuned"]["loss"], rel=1e-4
    )
    assert metrics["eval"]["tuned"]["loss"] < metrics["eval"]["base"]["loss"]
    parity = json.loads((finished.sealed("merge", experiment) / "parity.json").read_text())
    assert parity["relative_difference"] <= parity["tolerance"] == 1e-4
    summary = json.loads((finished.sealed("train", experiment) / "summary.json").read_text())
    assert summary["trainable_parameters"] < summary["parameters"] / 2
    traced = finished.run(
        "python", "-m", "pipeline_lib", "trace", "results/small-lora/model"
    ).stdout
    assert "13 links: 13 verified" in traced, "both models, back to what the first was made from"


def test_a_store_elsewhere_is_shared_by_two_clones(finished: Project, tmp_path: Path) -> None:
    other = Project(tmp_path)
    other.environment["PIPELINE_STORE"] = str(finished.store.root)
    assert "Nothing to be done" in other.snakemake().stdout


def test_an_export_is_made_of_a_finished_model_and_its_files_are_named(restored: Project) -> None:
    kinds = ["gguf-f16", "gguf-q8_0", "fp8"]
    if find_spec("llama_cpp") is not None:
        kinds.append("gguf-q4_k_m")
    restored.config.write_text(f"{restored.config.read_text()}export: [{', '.join(kinds)}]\n")
    done = restored.run("python", "-m", "pipeline_lib", "run", "config/config.yaml")
    experiment = restored.experiment()
    made = {path.name for path in restored.store.root.glob("export/*") if path.is_dir()}
    assert made == {experiment.ref(kind).digest for kind in kinds}
    hashes = {}
    for kind in kinds:
        folder = restored.root / "results" / "small" / kind
        names = {path.name for path in folder.iterdir()}
        name = f"model-{kind.removeprefix('gguf-')}.gguf"
        own = {name, "Modelfile"}
        if kind == "fp8":
            name = "model.safetensors"
            texts = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
            own = {name, "config.json", "generation_config.json", *texts}
        assert names == {*own, "README.md", "parity.json", "manifest.json"}
        assert re.search(rf"^{kind} +results/small/{kind}$", done.stdout, re.MULTILINE)
        manifest = restored.manifest(kind)
        assert set(manifest["inputs"]) == {"merge", "train"}
        hashes[kind] = manifest["files"][name]["sha256"]
    shutil.rmtree(restored.store.root / "export")
    assert executed(restored.snakemake().stdout) == ["export"] * len(kinds)
    for kind in kinds:
        files = restored.manifest(kind)["files"]
        assert hashes[kind] in {entry["sha256"] for entry in files.values()}
    assert "Nothing to be done" in restored.snakemake("-n").stdout
