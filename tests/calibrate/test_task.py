"""What is measured: models of real widths, the variants in order, documents of one length."""

from dataclasses import replace

import pytest

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.calibrate.parts import most_tokens, variants
from pipeline_lib.calibrate.random_model import batch_of_documents
from pipeline_lib.calibrate.task import Task, config_json, with_layers
from pipeline_lib.config.train import Train
from pipeline_lib.plan.passes import shape_of, variant_of
from pipeline_lib.records.plan import Workload

SMALL = Geometry(
    vocab=512,
    hidden=64,
    intermediate=192,
    layers=28,
    heads=4,
    kv_heads=2,
    head_dim=16,
    tied=True,
    max_positions=4096,
)
GEOMETRIES = {
    "qwen3": SMALL,
    "qwen3 with biases": replace(
        SMALL, biased=("q_proj", "k_proj", "v_proj", "o_proj"), tied=False
    ),
    "qwen2": replace(SMALL, biased=("q_proj", "k_proj", "v_proj"), normed_heads=False),
    "qwen3_moe": replace(
        SMALL,
        expert_layers=frozenset(range(28)),
        experts=8,
        experts_per_token=2,
        expert_intermediate=32,
    ),
}
each_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)


def task_of(train: Train, device: str = "cpu", geometry: Geometry = SMALL) -> Task:
    return Task(geometry, train, Workload(1024, 1.0, 0.5, 300.0, None, None), device, 10.0)


@each_geometry
def test_a_small_model_has_the_real_widths(geometry: Geometry) -> None:
    small = with_layers(geometry, 3)
    assert geometry_in(config_json(small)) == small
    assert small.layers == 3
    assert shape_of(small) == shape_of(geometry)


@each_geometry
def test_a_task_is_the_same_in_the_process_that_measures(geometry: Geometry) -> None:
    train = Train.model_validate(
        {"strategy": "fsdp", "method": "lora", "lora": {"rank": 4}, "precision": "fp32"}
    )
    task = task_of(train, geometry=geometry)
    assert Task.from_json(task.as_json()) == task


def test_the_way_that_the_config_trains_is_measured_first() -> None:
    train = Train.model_validate({"strategy": "fsdp", "recompute": "full"})
    eager = train.model_copy(update={"compile": False})
    assert [variant_of(way) for way in variants(task_of(train))] == [
        *("fsdp/full/full", "ddp/full/none", "fsdp/full/none", "ddp/full/full")
    ]
    assert variant_of(variants(task_of(train, "cuda"))[0]) == "fsdp/full/full/compiled"
    assert variant_of(variants(task_of(eager, "cuda"))[0]) == "fsdp/full/full"


def test_a_way_that_is_not_among_the_usual_ones_is_measured_too() -> None:
    train = Train.model_validate({"strategy": "zero3", "recompute": "full"})
    names = [variant_of(way) for way in variants(task_of(train, "cuda"))]
    assert names[0] == "zero3/full/full"
    assert len(names) == len(set(names)) == 13


def test_where_the_plan_chooses_all_usual_ways_are_measured() -> None:
    names = [
        variant_of(way)
        for way in variants(task_of(Train.model_validate({"strategy": "auto"}), "cuda"))
    ]
    assert names[:3] == [
        "ddp/full/none/compiled",
        "fsdp/full/none/compiled",
        "fsdp/full/full/compiled",
    ]
    assert len(names) == 12


def test_what_is_not_compiled_by_choice_is_not_measured_so() -> None:
    train = Train.model_validate({"strategy": "auto", "method": "lora", "lora": {"dora": True}})
    names = [variant_of(way) for way in variants(task_of(train, "cuda"))]
    assert names[0] == "ddp/lora/none"
    assert not any(name.endswith("/compiled") for name in names)


def test_what_one_rank_alone_cannot_show_is_left_out() -> None:
    keys = {
        "strategy": "hsdp",
        "shard_ranks": 2,
        "offload": "optimizer+params",
        "unit_layers": 4,
        "reshard": False,
    }
    train = Train.model_validate({**keys, "freeze": ("model.layers.20.*",), "local_sgd_steps": 4})
    way = variants(task_of(train))[0]
    assert way.strategy == "fsdp"
    assert (way.offload, way.unit_layers, way.reshard, way.freeze, way.local_sgd_steps) == (
        "none",
        1,
        True,
        (),
        1,
    )


@pytest.mark.parametrize(("tokens", "length"), [(1024, 128.0), (1000, 300.0), (64, 5000.0)])
def test_documents_have_the_length_that_is_asked_for(tokens: int, length: float) -> None:
    batch = batch_of_documents(tokens, length, 0.5, vocab=100)
    assert batch.tokens.shape == (1, tokens)
    assert batch.real_tokens == tokens
    assert int(batch.tokens.max()) < 100
    lengths = batch.cu_seq_lens.diff()
    assert int(lengths.max()) == min(tokens, length)
    assert batch.supervised_tokens / tokens == pytest.approx(0.5, abs=0.1)
    assert batch.squared_lengths == int((lengths.long() ** 2).sum())


def test_as_many_tokens_as_keep_the_device_busy() -> None:
    assert most_tokens(replace(SMALL, hidden=1024), is_gpu=True) == 32768
    assert most_tokens(replace(SMALL, hidden=4096), is_gpu=True) == 8192
    assert most_tokens(replace(SMALL, hidden=8192), is_gpu=True) == 8192
    assert most_tokens(SMALL, is_gpu=False) == 4096
    assert (
        most_tokens(replace(SMALL, hidden=4096, intermediate=12288, vocab=151936), is_gpu=False)
        == 128
    )
