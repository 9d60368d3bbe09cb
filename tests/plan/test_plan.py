"""The plan's arithmetic, against counts made another way."""

import math
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.manifest import Manifest
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.stage import Job, Sealed
from pipeline_lib.base.store import Store
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.data.shard.blocks import BlockIndex
from pipeline_lib.data.shard.order import Group, epoch_blocks
from pipeline_lib.plan import stage
from pipeline_lib.plan.arithmetic import checkpoint_bytes, plan_batches
from pipeline_lib.plan.geometry import Geometry

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
# Published sizes: config.json of the Qwen3 checkpoints, and the parameters that their model cards give.
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
    assert Geometry.from_config(config.to_dict()).parameters == model.num_parameters()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    assert geometry_of(name).parameters == pytest.approx(PUBLISHED[name][1], rel=1e-3)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj")])
def test_adapter_parameters_are_those_that_peft_makes(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = Qwen3Config(**SMALL)
    names = targets if isinstance(targets, str) else list(targets)
    model = get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    made = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    lora = Lora(rank=4, targets=targets)
    assert Geometry.from_config(config.to_dict()).adapter_parameters(lora) == made


def test_another_kind_of_model_is_refused_by_name(tmp_path: Any) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    with pytest.raises(DataError, match="model_type 'llama' is not one of qwen2, qwen3"):
        Geometry.from_folder(tmp_path)


def test_a_checkpoint_is_12_bytes_for_each_trained_parameter() -> None:
    geometry = geometry_of("Qwen3-8B")
    adapters = Train(method="lora")
    assert checkpoint_bytes(geometry, Train()) == 12 * geometry.parameters
    assert geometry.trained_parameters(adapters) == 43_646_976
    assert checkpoint_bytes(geometry, adapters) == 12 * 43_646_976


def index_of(*groups: Group, **changes: Any) -> BlockIndex:
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


HELD_OUT = index_of(Group(1.0, 3))


def steps_counted(groups: list[Group], batch_blocks: int, epochs: int) -> list[int]:
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
        st.builds(Group, st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 2.5]), st.integers(1, 900)), min_size=1, max_size=3
    ),
    ranks=st.integers(1, 16),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    epochs=st.integers(10, 13),
)
def test_steps_use_every_block_as_often_as_weighted(
    groups: list[Group], ranks: int, micro: int, accumulation: int, epochs: int
) -> None:
    batch_blocks = ranks * micro * accumulation
    train = Train(global_batch_tokens=batch_blocks * 64, micro_batch_blocks=micro, epochs=epochs)
    plan = plan_batches(train, ranks, index_of(*groups), 1)
    counted = steps_counted(groups, batch_blocks, epochs)
    assert (plan.blocks, plan.accumulation) == (sum(group.blocks for group in groups), accumulation)
    assert (plan.steps, plan.steps_per_epoch) == (sum(counted), counted[0])
    assert plan.epoch_blocks == sum(math.floor(Decimal(str(group.weight)) * group.blocks) for group in groups)
    if plan.epoch_blocks:
        assert (plan.steps_per_epoch - 1) * batch_blocks + plan.last_step_blocks == plan.epoch_blocks
        assert 1 <= plan.last_step_blocks <= batch_blocks
    else:
        assert plan.last_step_blocks == 0


def test_until_step_shortens_the_run_and_never_lengthens_it() -> None:
    train = Train(global_batch_tokens=640, until_step=3)
    assert plan_batches(train, 1, index_of(Group(1.0, 100)), 1).steps == 3
    assert plan_batches(train, 1, index_of(Group(1.0, 11)), 1).steps == 2


def test_a_run_without_a_step_is_refused_and_the_epochs_it_says_make_one() -> None:
    index = index_of(Group(0.01, 3), Group(0.02, 2))
    refused = r"\(3 of weight 0.01, 2 of weight 0.02\), 24 epochs use none.* set train.epochs to 25 or more"
    with pytest.raises(DataError, match=refused):
        plan_batches(Train(global_batch_tokens=640, epochs=24), 1, index, 1)
    assert plan_batches(Train(global_batch_tokens=640, epochs=25), 1, index, 1).steps == 1


def plan_job(folder: Path, training: BlockIndex, validation: BlockIndex, **train: Any) -> Job:
    """A job of the stage for a model of 96 tokens and 128 positions and blocks with those indexes."""
    config = Qwen3Config(**SMALL, max_position_embeddings=128)
    write_json(folder / "model" / "config.json", config.to_dict())
    write_json(folder / "shard" / "train" / "index.json", asdict(training))
    write_json(folder / "shard" / "validation" / "index.json", asdict(validation))
    manifest = Manifest(stage="any", digest="0", spec={}, files={})
    inputs = {name: Sealed(folder / name, manifest) for name in ("model", "shard")}
    settings = {"experiment": "test", "train": {"global_batch_tokens": 640, **train}, "cluster": {}, "tracking": {}}
    out = folder / "plan"
    out.mkdir()
    return Job(Spec("plan", 2, settings, {}), Store(folder / "store"), inputs, out, lambda text: None)


def test_the_stage_counts_the_steps_of_weighted_blocks_and_says_so(tmp_path: Path) -> None:
    job = plan_job(tmp_path, index_of(Group(2.5, 100)), HELD_OUT)
    assert stage.run(job)["steps"] == 25
    shown = (job.out / "plan.txt").read_text()
    assert "the first epoch uses 250, as weighted" in shown
    assert "25 in 1 epochs (25 in the first, the last of them of 10 blocks)" in shown
    assert read_json(job.out / "plan.json")["batch"]["epoch_blocks"] == 250


def test_the_stage_keeps_the_settings_and_asks_for_room_for_the_best(tmp_path: Path) -> None:
    train = {"global_batch_tokens": 640, "method": "lora", "validate_every_steps": 5}
    plans: list[dict[str, Any]] = []
    for settings in (train, train | {"keep_best": True}):
        folder = tmp_path / str(len(plans))
        stage.run(job := plan_job(folder, index_of(Group(1.0, 100)), HELD_OUT, **settings))
        plans.append(read_json(job.out / "plan.json"))
        assert plans[-1]["train"] == settings
    one = plans[0]["disk"]["checkpoint_bytes"]
    assert [plan["disk"]["needed_bytes"] for plan in plans] == [3 * one, 4 * one]
    assert "for 2 kept, the best and one" in " ".join((job.out / "plan.txt").read_text().replace("│", " ").split())


@pytest.mark.parametrize("side", ["training", "validation"])
def test_a_token_outside_the_vocabulary_is_refused_before_training(tmp_path: Path, side: str) -> None:
    indexes = {"training": index_of(Group(1.0, 100)), "validation": HELD_OUT}
    indexes[side] = replace(indexes[side], largest_token=96)
    with pytest.raises(DataError, match="the blocks hold token 96, but the model's vocabulary ends at 95"):
        stage.run(plan_job(tmp_path, **indexes))


def test_blocks_longer_than_the_model_reaches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shard.block_tokens: 129 tokens are more than the model's 128 positions"):
        stage.run(plan_job(tmp_path, index_of(Group(1.0, 100), block_tokens=129), HELD_OUT))
