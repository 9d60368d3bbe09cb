"""The plan's arithmetic, against counts made another way."""

import math
import re
from dataclasses import asdict, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch.families import geometry_in, read_geometry
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.compile import run_digest, training_of
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import PLACEMENT_KEYS, Lora, Train
from pipeline_lib.core.errors import ConfigError, DataError, DiskFull
from pipeline_lib.core.files import read_json, write_json, write_text
from pipeline_lib.core.stage import Job, Sealed
from pipeline_lib.core.store import Manifest, Ref, Spec, Store
from pipeline_lib.data.order import epoch_blocks
from pipeline_lib.plan import stage
from pipeline_lib.plan.show import render
from pipeline_lib.plan.steps import batch_without_data, plan_batches
from pipeline_lib.plan.trained import checkpoint_bytes
from pipeline_lib.plan.workload import workload_from
from pipeline_lib.records.data import BlockGroup, BlockIndex
from pipeline_lib.records.plan import Summary, Workload, read_plan
from tests.locks import hold

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Published sizes: config.json of the Qwen3 checkpoints, and the parameters that their model cards
# give.
PUBLISHED = {
    "Qwen3-0.6B": ((151936, 1024, 3072, 28, 16, 8, 128, True), 0.596e9),
    "Qwen3-8B": ((151936, 4096, 12288, 36, 32, 8, 128, False), 8.191e9),
    "Qwen3-32B": ((151936, 5120, 25600, 64, 64, 8, 128, False), 32.762e9),
}


def geometry_of(name: str) -> Geometry:
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied = PUBLISHED[name][0]
    return Geometry(vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, tied, 40960)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_real_model(tied: bool) -> None:
    config = Qwen3Config(**SMALL, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(config)
    assert geometry_in(config.to_dict()).parameters == model.num_parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    assert geometry_of(name).parameters == pytest.approx(PUBLISHED[name][1], rel=1e-3)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_adapter_parameters_are_those_that_peft_makes(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = Qwen3Config(**SMALL)
    names = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(
        Qwen3ForCausalLM(config), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")
    )
    made = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lora = Lora(rank=4, targets=targets)
    assert geometry_in(config.to_dict()).adapter_parameters(lora) == made


def test_another_kind_of_model_is_refused_by_name(tmp_path: Any) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    with pytest.raises(DataError, match="model_type 'llama' is not one of qwen2, qwen3"):
        read_geometry(tmp_path)


def test_a_checkpoint_is_12_bytes_for_each_trained_parameter() -> None:
    geometry = geometry_of("Qwen3-8B")
    adapters = Train(method="lora")
    assert checkpoint_bytes(geometry, Train()) == 12 * geometry.parameters
    assert geometry.trained_parameters(adapters) == 43_646_976
    assert checkpoint_bytes(geometry, adapters) == 12 * 43_646_976


def index_of(*groups: BlockGroup, **changes: Any) -> BlockIndex:
    """The index of those groups of full blocks, of 64 tokens each."""
    blocks = sum(group.blocks for group in groups)
    index = BlockIndex(
        blocks=blocks,
        block_tokens=64,
        tokens=blocks * 64,
        supervised_tokens=blocks * 32,
        documents=blocks,
        largest_token=95,
        epoch_blocks=epoch_blocks(groups),
        groups=list(groups),
        shards=[blocks],
    )
    return replace(index, **changes)


WORKLOAD = Workload(64, 1.0, 0.5, 20.0, 100, 100, 1, samples_per_block=2.0)
HUNDRED, HELD_OUT = index_of(BlockGroup(1.0, 100)), index_of(BlockGroup(1.0, 3))


def steps_counted(groups: list[BlockGroup], batch_blocks: int, epochs: int) -> list[int]:
    """Steps of each epoch, counted by decimal arithmetic on the weights."""
    steps = []
    for epoch in range(epochs):
        used = sum(
            math.floor((epoch + 1) * Decimal(str(group.weight)) * group.blocks)
            - math.floor(epoch * Decimal(str(group.weight)) * group.blocks)
            for group in groups
        )
        steps.append(len(range(0, used, batch_blocks)))
    return steps


@given(
    groups=st.lists(
        st.builds(BlockGroup, st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 2.5]), st.integers(1, 900)),
        min_size=1,
        max_size=3,
    ),
    ranks=st.integers(1, 16),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epochs=st.integers(10, 13),
)
def test_steps_use_every_block_as_often_as_weighted(
    groups: list[BlockGroup], ranks: int, micro: int, accumulation: int, epochs: int
) -> None:
    batch_blocks = ranks * micro * accumulation
    train = Train(global_batch_tokens=batch_blocks * 64, micro_batch_blocks=micro, epochs=epochs)
    plan = plan_batches(train, ranks, index_of(*groups), WORKLOAD)
    counted = steps_counted(groups, batch_blocks, epochs)
    assert (plan.blocks, plan.accumulation) == (sum(group.blocks for group in groups), accumulation)
    assert (plan.steps, plan.steps_per_epoch) == (sum(counted), counted[0])
    assert plan.epoch_blocks == sum(
        math.floor(Decimal(str(group.weight)) * group.blocks) for group in groups
    )
    if plan.epoch_blocks:
        steps, last = plan.steps_per_epoch or 0, plan.last_step_blocks or 0
        assert (steps - 1) * batch_blocks + last == plan.epoch_blocks
        assert 1 <= last <= batch_blocks
    else:
        assert plan.last_step_blocks == 0


def test_until_step_shortens_the_run_and_never_lengthens_it() -> None:
    train = Train(global_batch_tokens=640, until_step=3)
    assert plan_batches(train, 1, index_of(BlockGroup(1.0, 100)), WORKLOAD).steps == 3
    assert plan_batches(train, 1, index_of(BlockGroup(1.0, 11)), WORKLOAD).steps == 2


def test_a_run_without_a_step_is_refused_and_the_epochs_it_says_make_one() -> None:
    index = index_of(BlockGroup(0.01, 3), BlockGroup(0.02, 2))
    refused = r"\(3 of weight 0.01, 2 of weight 0.02\), train.epochs: 24 uses none.* set train.epochs to 25 or more"
    with pytest.raises(DataError, match=refused):
        plan_batches(Train(global_batch_tokens=640, epochs=24), 1, index, WORKLOAD)
    assert plan_batches(Train(global_batch_tokens=640, epochs=25), 1, index, WORKLOAD).steps == 1


def test_what_is_known_without_blocks_is_what_the_blocks_say_later() -> None:
    train = Train(global_batch_tokens=640, micro_batch_blocks=5, epochs=2)
    planned = asdict(plan_batches(train, 1, index_of(BlockGroup(1.0, 100)), WORKLOAD))
    before = asdict(batch_without_data(train, 1, WORKLOAD))
    known = {key: value for key, value in before.items() if value is not None}
    assert known == {key: planned[key] for key in known}
    assert set(before) - set(known) == {
        *("blocks", "epoch_blocks", "validation_blocks", "padding_fraction"),
        *(
            "steps",
            "steps_per_epoch",
            "last_step_blocks",
            "samples_per_step",
            "supervised_tokens_per_step",
        ),
    }


def test_the_workload_is_that_of_the_documents() -> None:
    """Two blocks of 64: a document of 60 with 30 supervised tokens; two of 10 and 20 with 12."""
    index = index_of(BlockGroup(2.0, 2), tokens=90, supervised_tokens=42, documents=3)
    found = workload_from(index, np.array([60**2, 10**2 + 20**2]), 1.5, validation_blocks=7)
    lengths = [60, 10, 20]
    assert found.document_tokens == pytest.approx(sum(n * n for n in lengths) / sum(lengths))
    assert (found.real_fraction, found.supervised_fraction) == (90 / 128, 42 / 128)
    assert found.samples_per_block == 1.5
    assert (found.block_tokens, found.blocks, found.epoch_blocks, found.validation_blocks) == (
        64,
        2,
        4,
        7,
    )
    assert not found.is_assumed


def plan_job(
    folder: Path,
    training: BlockIndex = HUNDRED,
    validation: BlockIndex = HELD_OUT,
    cluster: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    tokenized: dict[str, Any] | None = None,
) -> Job:
    """A stage job for a model of 96 tokens and 128 positions and blocks with those indexes."""
    config = Qwen3Config(**{**SMALL, "max_position_embeddings": 128, **(model or {})})
    write_json(folder / "model" / "config.json", config.to_dict())
    for name, index in (("train", training), ("validation", validation)):
        write_json(folder / "shard" / name / "index.json", asdict(index))
        np.save(
            folder / "shard" / name / "costs.npy", np.full(index.blocks, 2 * 32**2, dtype=np.int64)
        )
    manifest = Manifest(stage="any", digest="0", spec={}, files={})
    inputs = {name: Sealed(folder / name, manifest) for name in ("model", "shard")}
    inputs["tokenize"] = Sealed(
        folder / "tokenize", manifest.model_copy(update={"counts": tokenized or {}})
    )
    sections = {
        "train": {"global_batch_tokens": 640, **(train or {})},
        "cluster": cluster or {},
        "tracking": {},
    }
    out = folder / "plan"
    out.mkdir()
    refs = {name: Ref(name, "0") for name in ("model", "tokenize", "shard")}
    spec = Spec("plan", 4, {"experiment": "test", **sections, **(settings or {})}, refs)
    return Job(spec, Store(folder / "store"), inputs, out, lambda text: None, hold(folder / "lock"))


def planned(folder: Path, **job: Any) -> dict[str, Any]:
    """The plan.json of the stage for a hundred blocks."""
    stage.run(made := plan_job(folder, **job))
    return dict(read_json(made.out / "plan.json"))


def shown(job: Job) -> str:
    """The page, without its line breaks."""
    return " ".join((job.out / "plan.txt").read_text().split())


def detailed(job: Job) -> str:
    """The same with all details."""
    return " ".join(render(read_plan(job.out / "plan.json"), is_detailed=True).split())


def test_the_stage_counts_the_steps_of_weighted_blocks_and_says_so(tmp_path: Path) -> None:
    job = plan_job(tmp_path, index_of(BlockGroup(2.5, 100)))
    assert stage.run(job)["steps"] == 25
    assert re.search(
        r"STEPS 25 optimizer steps in 1 epoch, 640 tokens \(\d+ samples\) each WAY", shown(job)
    )
    assert "the first epoch uses 250, by the weights of the sources" in detailed(job)
    assert "25 in the first epoch, whose last step has 10 blocks" in detailed(job)
    assert read_json(job.out / "plan.json")["batch"]["epoch_blocks"] == 250


def test_the_stage_keeps_the_settings_and_asks_for_room_for_the_best(tmp_path: Path) -> None:
    train = {"global_batch_tokens": 640, "method": "lora", "validate_every_steps": 5}
    plans: list[dict[str, Any]] = []
    for settings in (train, train | {"keep_best": True}):
        folder = tmp_path / str(len(plans))
        stage.run(job := plan_job(folder, train=settings))
        plans.append(read_json(job.out / "plan.json"))
        settled: dict[str, Any] = {
            "recompute": "none",
            "reshard": True,
            "compile": False,
            "save_async": True,
        }
        settled |= {"offload_activations": False, "context_ranks": 1}
        assert plans[-1]["train"] == settings | settled
    one = plans[0]["disk"]["checkpoint_bytes"]
    assert [plan["disk"]["needed_bytes"] for plan in plans] == [3 * one, 4 * one]
    assert "for 2 kept, the best and one being written" in detailed(job)


@pytest.mark.parametrize(
    ("save_every", "guards_every", "keep_last", "said", "kept"),
    [
        (100, 100, 2, "every 100 steps, while", "2 kept and one being written"),
        (100, 100, 1, "every 100 steps, while", "1 kept and one being written"),
        (50, 100, 2, "every 50 steps, while", "2 kept and one being written"),
        (
            50,
            100,
            1,
            "every 50 steps, while",
            "1 kept, one that the guards may need and one being written",
        ),
        (
            1000,
            100,
            2,
            "every 1,000 steps and, for the guards, every 100 steps, while",
            "2 kept and one being written",
        ),
    ],
)
def test_the_plan_says_how_often_a_run_is_saved_and_what_is_kept(
    tmp_path: Path, save_every: int, guards_every: int, keep_last: int, said: str, kept: str
) -> None:
    guards = {"rollback_every_steps": guards_every}
    train: dict[str, Any] = {
        "save_every_steps": save_every,
        "guards": guards,
        "keep_last": keep_last,
    }
    stage.run(job := plan_job(tmp_path, train={"global_batch_tokens": 640, **train}))
    disk = read_json(job.out / "plan.json")["disk"]
    assert disk["needed_bytes"] == (keep_last + kept.count("one")) * disk["checkpoint_bytes"]
    shown_lines = detailed(job)
    assert said in shown_lines
    assert f" for {kept}" in shown_lines
    saved = {*range(save_every, 10_000, save_every), *range(guards_every, 10_000, guards_every)}
    assert Train(**train).saves(10_000, epoch_steps=900) == len(saved) + 1


@pytest.mark.parametrize(("save_every", "is_warned"), [(2, True), (5000, False)])
def test_saves_that_the_disk_does_not_take_as_often_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int, is_warned: bool
) -> None:
    """98 GB of an 8B model on one node, every two steps."""

    class Usage:
        free = 10**13

    monkeypatch.setattr("pipeline_lib.plan.preflight.disk_usage", lambda path: Usage)
    train = {
        "save_every_steps": save_every,
        "epochs": 1000,
        "guards": {"rollback_every_steps": 5000},
    }
    cluster = {"gpus_per_node": 8, "gpu": "h200", "memory_gb": 2000}
    stage.run(
        job := plan_job(
            tmp_path, train={"global_batch_tokens": 640, **train}, cluster=cluster, model=WIDE
        )
    )
    assert ("train.save_every_steps: " in shown(job)) == is_warned


def test_a_plan_holds_what_the_report_and_the_ranks_read(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan["schema"] == 3
    assert set(plan["chosen"]) == PLACEMENT_KEYS
    assert plan["workload"]["document_tokens"] == pytest.approx(100 * 2 * 32**2 / (100 * 64))
    found = plan["prediction"]
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"]["value"])
    assert found["run_s"]["value"] >= plan["batch"]["steps"] * found["step_s"]["value"]
    assert (
        set(plan["memory"])
        == {plan["chosen"]["strategy"], *plan["others"]}
        >= {"ddp", "fsdp", "zero3"}
    )
    assert found["segments"]
    assert all("segments" not in other for other in plan["others"].values())
    assert set(plan["words"]) == {"chosen", "verdicts", "others", "advice", "warnings"}
    assert set(plan["summary"]) == {field.name for field in fields(Summary)}


def test_the_plan_says_what_samples_that_repeat_each_other_cost(tmp_path: Path) -> None:
    counts = {"conversations": 100, "kept": 300, "tokens": 23_000, "repeated_tokens": 13_000}
    for folder, tokenized in (("counted", counts), ("older", {**counts, "repeated_tokens": None})):
        (tmp_path / folder).mkdir()
        stage.run(job := plan_job(tmp_path / folder, tokenized=tokenized))
        is_said = "SAMPLES 300 samples of 100 conversations have 2.3 times the tokens" in shown(job)
        assert is_said == (folder == "counted")


def test_auto_is_settled_in_the_plan_and_keeps_what_is_held(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        cluster={"gpus_per_node": 2, "gpu": "h200"},
        settings={"held": ["micro_batch_blocks", "recompute"]},
        train={"strategy": "auto", "recompute": "full", "micro_batch_blocks": 1},
    )
    chosen = plan["chosen"]
    assert chosen["strategy"] in STRATEGIES
    assert (chosen["recompute"], chosen["micro_batch_blocks"]) == ("full", 1)
    train = read_settings(Train, plan["train"])
    assert {key: getattr(train, key) for key in PLACEMENT_KEYS} == chosen
    assert plan["batch"]["micro_batch_blocks"] * plan["batch"]["accumulation"] * 2 == 10
    fitting = [each["step_s"]["value"] for each in plan["others"].values() if each["fits"]]
    assert plan["prediction"]["step_s"]["value"] <= 1.02 * min(fitting)


def test_the_batch_is_that_of_the_micro_batch_that_auto_takes(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, cluster={"gpus_per_node": 1, "gpu": "h200"}, train={"strategy": "auto"}
    )
    assert plan["chosen"]["micro_batch_blocks"] == plan["batch"]["micro_batch_blocks"] > 1
    assert plan["batch"]["micro_batch_blocks"] * plan["batch"]["accumulation"] == 10


def test_without_the_name_of_the_gpu_memory_is_planned_and_time_is_not(tmp_path: Path) -> None:
    job = plan_job(tmp_path, cluster={"gpus_per_node": 2})
    stage.run(job)
    plan = read_json(job.out / "plan.json")
    assert (plan["prediction"], plan["others"], plan["machine"]) == (None, {}, None)
    assert plan["memory"]["ddp"]["weights_bytes"] == 4 * plan["model"]["parameters"]
    assert "TIME not known: set cluster.gpu" in shown(job)


def test_what_was_measured_is_taken_instead_of_the_catalogue(tmp_path: Path) -> None:
    measured: dict[str, Any] = {
        "schema": 1,
        **{
            "gpu": "NVIDIA H200",
            "gpu_memory_bytes": 140 * 2**30,
            "ranks": 2,
            "nodes": 1,
            "precision": "bf16",
        },
        **{
            "rates": {"in_node_bytes_s": {"value": 3e11, "low": 2.9e11, "high": 3.1e11}},
            "parts": [],
        },
    }
    plan = planned(tmp_path, cluster={"gpus_per_node": 2}, settings={"measured": measured})
    assert plan["machine"]["rates"]["in_node_bytes_s"] == {
        **measured["rates"]["in_node_bytes_s"],
        "source": "measured",
    }
    assert plan["machine"]["gpu_memory_bytes"] == 140 * 2**30


WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("strategy", "said", "remedies"),
    [
        (
            "auto",
            r"train.strategy: auto finds no way that fits: even ",
            [
                "train.method: lora  (",
                "cluster.memory_gb: 128, if the nodes have as much",
            ],
        ),
        (
            "ddp",
            r"train.strategy: ddp needs 1\d\d.\d GiB, \d+.\d GiB more than the 22.0 GiB of each A10",
            ["train.strategy: fsdp, train.offload: optimizer+params"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, strategy: str, said: str, remedies: list[str]
) -> None:
    job = plan_job(
        tmp_path,
        cluster={"gpus_per_node": 2, "gpu": "a10", "memory_gb": 120},
        model=WIDE,
        train={"strategy": strategy},
    )
    with pytest.raises(ConfigError, match=said) as raised:
        stage.run(job)
    assert all(f"this would fit: {remedy}" in str(raised.value) for remedy in remedies), str(
        raised.value
    )
    assert "the smallest cluster that would do: " in str(raised.value)
    assert not list(job.out.iterdir())


def test_more_host_memory_than_the_nodes_are_asked_for_is_refused(tmp_path: Path) -> None:
    train = {"strategy": "fsdp", "offload": "optimizer+params"}
    job = plan_job(
        tmp_path,
        cluster={"gpus_per_node": 2, "gpu": "h200", "memory_gb": 64},
        model=WIDE,
        train=train,
    )
    wanted = r"needs 1\d\d.\d\d GB of host memory .* cluster.memory_gb gives 64.00 GB; set cluster.memory_gb: 1\d\d,"
    with pytest.raises(ConfigError, match=wanted):
        stage.run(job)


def test_checkpoints_for_which_there_is_no_room_are_refused(tmp_path: Path) -> None:
    """Three checkpoints of 2 * 10^12 parameters."""
    with pytest.raises(DiskFull, match="the checkpoints kept and the one being written need"):
        planned(
            tmp_path,
            model={
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 64,
                "vocab_size": 2 * 10**9,
            },
        )


def test_a_run_that_goes_on_needs_no_room_for_what_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plan_job(tmp_path)
    stage.run(job)
    plan = read_json(job.out / "plan.json")
    merged = next(need["disk_bytes"] for need in plan["stages"] if need["stage"] == "merge")
    trained = next(need["disk_bytes"] for need in plan["stages"] if need["stage"] == "train")

    class Usage:
        free = trained + merged - 1000

    monkeypatch.setattr("pipeline_lib.plan.preflight.disk_usage", lambda path: Usage)
    with pytest.raises(
        DiskFull, match=r"the run writes .* \(checkpoints 1.7 MB, trained weights .*, merged model "
    ):
        stage.run(job)
    run = job.store.run_dir(run_digest(training_of(job.spec)))
    write_text(run / "checkpoints" / "step-1" / "model.safetensors", "x" * 1000)
    stage.run(job)


@pytest.mark.parametrize("side", ["training", "validation"])
def test_a_token_outside_the_vocabulary_is_refused_before_training(
    tmp_path: Path, side: str
) -> None:
    indexes = {"training": HUNDRED, "validation": HELD_OUT}
    indexes[side] = replace(indexes[side], largest_token=96)
    with pytest.raises(
        DataError, match="the blocks hold token 96, but the model's vocabulary ends at 95"
    ):
        stage.run(plan_job(tmp_path, indexes["training"], indexes["validation"]))


def test_blocks_longer_than_the_model_reaches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="shard.block_tokens: 129 tokens are more than the model's 128 positions"
    ):
        stage.run(plan_job(tmp_path, index_of(BlockGroup(1.0, 100), block_tokens=129)))
