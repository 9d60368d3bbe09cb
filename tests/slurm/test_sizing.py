"""What the training asks SLURM for follows from the plan, and the config where it says it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline_lib.arch.families import published
from pipeline_lib.config.schema import Config
from pipeline_lib.config.stages import JobKind
from pipeline_lib.core.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.core.store import Manifest, Ref, Store, describe_files, write_manifest
from pipeline_lib.plan.answer import Question, question_of
from pipeline_lib.plan.warnings import on_evaluation
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.slurm.cluster import NodeGroup, fitted
from pipeline_lib.slurm.request import (
    OF_STAGE,
    OF_TRAINING,
    JobRequest,
    stage_resources,
    training_resources,
)
from pipeline_lib.slurm.site import Site
from pipeline_lib.slurm.sizing import (
    Foresight,
    most_cpus_of,
    refuse_long_evaluation,
    sealed_bytes,
    sealed_plan,
    stage_request,
    too_long_evaluation,
    training_request,
)
from tests.complete import plan_document
from tests.core.unreadable import endless_link

SMALL = NodeGroup(
    "small",
    is_default=True,
    is_up=True,
    limit_minutes=720,
    nodes=2,
    cpus=8,
    memory_mb=31_000,
    gpus=4,
)


def foreseen(config: Config, store: Store) -> PlanDocument | None:
    """What is predicted of plan.json."""
    return Foresight(store).plan_of(config)


def config_of(
    model: str = "Qwen/Qwen3-8B", cluster: dict[str, Any] | None = None, **train: Any
) -> Config:
    assert published(model) is not None
    return Config.model_validate(
        {
            "experiment": "asks",
            "model": {"source": "modelscope", "name": model, "revision": "a" * 40},
            "data": {"train": ({"source": "file", "path": "rows.jsonl"},)},
            "shard": {"block_tokens": 4096},
            "cluster": cluster
            or {"nodes": 2, "gpus_per_node": 8, "gpu": "h100", "internode_gbit_s": 400},
            "train": {"strategy": "fsdp", "global_batch_tokens": 262_144, **train},
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_task_for_each_rank_and_memory_by_the_plan(store: Store) -> None:
    config = config_of()
    plan = foreseen(config, store)
    assert plan is not None
    request = training_request(config, plan, [])
    assert (request.nodes, request.tasks_per_node, request.tasks, request.gpus_per_node) == (
        2,
        8,
        16,
        8,
    )
    checkpoint_mb = plan.disk.checkpoint_bytes / 1e6
    assert checkpoint_mb > 90_000  # weights and two moments in fp32
    assert request.memory_mb == pytest.approx(2500 + 8 * 6000 + 1.2 * checkpoint_mb / 2, abs=1000)
    assert request.memory_mb % 1000 == 0


@pytest.mark.parametrize("cluster", [{"gpus_per_node": 8, "gpu": "h200"}, {"cpu_ranks": 4}])
@pytest.mark.parametrize("offload", ["none", "optimizer+params"])
def test_what_a_job_asks_for_is_the_least_that_the_plan_allows(
    cluster: dict[str, Any], offload: str, store: Store
) -> None:
    train: dict[str, Any] = {
        "offload": offload,
        "recompute": "none",
        "save_async": offload == "none",
    }
    train["context_ranks"] = 1  # ranks that share blocks would need less
    config = config_of(cluster=cluster, **train)
    asked_gb = training_request(config, foreseen(config, store), []).memory_mb // 1000
    for memory_gb, is_enough in ((asked_gb, True), (asked_gb - 1, False)):
        given = config_of(cluster={**cluster, "memory_gb": memory_gb}, **train)
        plan = foreseen(given, store)
        assert plan is not None and plan.prediction is not None
        assert plan.prediction.fits == is_enough


def test_what_is_offloaded_to_the_host_of_cpus_is_counted_too(store: Store) -> None:
    held = config_of(cluster={"cpu_ranks": 2}, save_async=False)
    moved = config_of(cluster={"cpu_ranks": 2}, offload="optimizer+params")
    asked = [
        training_request(config, foreseen(config, store), []).memory_mb for config in (held, moved)
    ]
    assert asked[0] > 1.15 * 16 * 8190
    # fsdp adds those of each micro-batch when all of them are there
    second_gradients = 1.3 * 4 * 8190
    assert asked[1] == pytest.approx(asked[0] + second_gradients, rel=0.05)


def test_offloading_asks_for_more_host_memory(store: Store) -> None:
    cluster = {"gpus_per_node": 8, "gpu": "h100", "memory_gb": 2000}
    asked = []
    for offload in ("none", "optimizer"):
        config = config_of(cluster=cluster, strategy="zero3", offload=offload, save_async=False)
        free = config.model_copy(
            update={"cluster": config.cluster.model_copy(update={"memory_gb": None})}
        )
        asked.append(training_request(free, foreseen(config, store), []).memory_mb)
    assert asked[1] > asked[0] + 60_000


def test_a_job_that_goes_on_has_the_time_and_memory_of_what_follows(store: Store) -> None:
    config = config_of()
    plan = foreseen(config, store)
    alone = training_request(config, plan, [])
    merge = replace(alone, memory_mb=alone.memory_mb + 5000, runtime_minutes=40)
    with_it = training_request(config, plan, [], following=[merge])
    assert with_it.runtime_minutes == alone.runtime_minutes + 10
    assert with_it.memory_mb == merge.memory_mb
    node = replace(SMALL, memory_mb=alone.memory_mb + 1000)
    assert training_request(config, plan, [node], following=[merge]).memory_mb == node.memory_mb


def test_what_the_config_says_is_asked_for(store: Store) -> None:
    config = config_of(
        cluster={"gpus_per_node": 1, "memory_gb": 77, "runtime_minutes": 5, "cpus_per_rank": 3}
    )
    request = training_request(config, None, [])
    assert (request.memory_mb, request.runtime_minutes, request.cpus_per_task) == (77_000, 5, 3)
    assert request.warning_s == 150  # half of its time at the most
    # which is refused, by its key
    assert training_request(config, None, [SMALL]).memory_mb == 77_000


def test_time_is_the_end_of_the_band_and_a_margin_but_no_more_than_a_job_may_take() -> None:
    config = config_of()
    content: dict[str, Any] = {
        "prediction": {
            "run_s": {"value": 36_000, "low": 30_000, "high": 48_000},
            "step_s": {"value": 4.0, "low": 3.0, "high": 6.0},
            "checkpoint_s": {"value": 50.0, "low": 40.0, "high": 90.0},
        },
        "chosen": {"strategy": "fsdp"},
        "cluster": {
            "device": config.cluster.device,
            "nodes": config.cluster.nodes,
            "ranks": config.cluster.ranks,
        },
    }
    plan = plan_document(**content)
    request = training_request(config, plan, [])
    assert request.runtime_minutes == 15 + 1000
    assert request.warning_s == 60 + 6 + 180
    assert training_request(config, plan, [SMALL]).runtime_minutes == 720
    asked = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"runtime_minutes": 900})}
    )
    # which is refused, by its key
    assert training_request(asked, plan, [SMALL]).runtime_minutes == 900
    brief = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"runtime_minutes": 4})}
    )
    assert training_request(brief, plan, []).warning_s == 120  # half of its time at the most


def test_what_is_not_known_is_asked_for_generously(store: Store, tmp_path: Path) -> None:
    model = {"source": "local", "path": str(tmp_path)}
    data = {"train": ({"source": "file", "path": "rows.jsonl"},)}
    local = Config.model_validate({"experiment": "x", "model": model, "data": data})
    config = config_of().model_copy(update={"model": local.model})
    assert foreseen(config, store) is None
    request = training_request(config, None, [])
    assert request.memory_mb >= 64_000
    assert request.runtime_minutes == 240
    assert training_request(config, None, [SMALL]).memory_mb == SMALL.memory_mb


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "mpi", "tasks", "tasks_per_node"),
    [
        (1, 1, 0, "", None, None),
        (1, 1, 1, "", None, None),
        (1, 4, 4, "srun", None, 4),
        (2, 1, 1, "srun", 2, None),
        (2, 4, 0, "srun", None, 4),
    ],
)
def test_the_plugin_s_words(
    nodes: int, ranks: int, gpus: int, mpi: str, tasks: int | None, tasks_per_node: int | None
) -> None:
    config = config_of(
        cluster={"nodes": nodes, "gpus_per_node": gpus, "cpu_ranks": ranks, "internode_gbit_s": 10}
    )
    found = training_resources(
        training_request(config, None, []), Site(partition="big", constraint="fast")
    )
    assert (found["nodes"], found["mpi"], found["tasks"], found["tasks_per_node"]) == (
        nodes,
        mpi,
        tasks,
        tasks_per_node,
    )
    assert (found["gres"], found["tasks_per_gpu"]) == ((f"gpu:{gpus}", 0) if gpus else (None, None))
    assert (found["slurm_partition"], found["constraint"]) == ("big", "fast")
    assert found["slurm_extra"] == "--open-mode=append --signal=USR1@300"
    assert set(found) == set(OF_TRAINING)


def test_the_merge_and_the_evaluation_need_a_gpu_where_the_training_has_some(store: Store) -> None:
    site = Site(partition="big", cpu_partition="small", constraint="fast")
    merge = stage_resources(stage_request("merge", config_of(), store, 0), site)
    evaluation = stage_resources(stage_request("evaluate", config_of(), store, 0), site)
    assert (merge["gres"], merge["slurm_partition"], merge["constraint"]) == (
        "gpu:1",
        "big",
        "fast",
    )
    assert (evaluation["gres"], evaluation["slurm_partition"]) == ("gpu:1", "big")
    assert 10_000 < merge["mem_mb"] < 20_000
    assert 16_000 < evaluation["mem_mb"] < 30_000
    assert set(merge) == set(OF_STAGE)
    on_cpus = stage_resources(
        stage_request("merge", config_of(cluster={"cpu_ranks": 2}), store, 0), site
    )
    assert (on_cpus["gres"], on_cpus["slurm_partition"], on_cpus["constraint"]) == (
        None,
        "small",
        None,
    )
    # to the training alone
    given = config_of(cluster={"gpus_per_node": 8, "gpu": "h100", "memory_gb": 2000})
    assert stage_request("merge", given, store, 0).memory_mb == merge["mem_mb"]
    assert stage_request("evaluate", given, store, 0).memory_mb == evaluation["mem_mb"]


@pytest.mark.parametrize(
    ("size", "gpu", "gpus", "memory_gb"),
    [
        ("8B", "l40s", 1, 25),
        ("32B", "h100", 1, 75),
        ("32B", "l40s", 2, 75),
        ("235B-A22B", "h100", 7, 479),
    ],
)
def test_as_many_gpus_are_asked_for_as_hold_the_model_that_answers(
    store: Store, size: str, gpu: str, gpus: int, memory_gb: int
) -> None:
    config = config_of(
        f"Qwen/Qwen3-{size}", {"gpus_per_node": 8, "gpu": gpu}, strategy="fsdp", method="lora"
    )
    request = stage_request("evaluate", config, store, 0)
    assert (request.gpus_per_node, request.memory_mb) == (gpus, memory_gb * 1000)
    assert list(on_evaluation(config, store)) == []


def test_a_model_that_no_gpus_of_a_node_hold_is_scored_on_one_and_does_not_answer(
    store: Store,
) -> None:
    """Two layers of 32B and 4,096 tokens of hidden states are all that 24 GB have to hold."""
    config = config_of(
        "Qwen/Qwen3-32B", {"gpus_per_node": 2, "gpu": "rtx 4090", "memory_gb": 64}, method="lora"
    )
    request = stage_request("evaluate", config, store, 0)
    assert (request.gpus_per_node, request.memory_mb < 20_000) == (1, True)
    (warning,) = on_evaluation(config, store)
    assert (warning.kind, warning.key) == ("warning", "evaluate")
    assert warning.sentence == (
        "gives no answers: the whole model, 65.52 GB in bf16, has no room on 2 "
        "GPUs of 23.5 GiB, and on CPUs it would take 163.81 GB of host memory"
    )


def test_a_plan_that_cannot_be_read_is_named_and_only_a_damaged_one_is_to_be_deleted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "abc" / "plan.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(
        IntegrityError, match=f"{path} is damaged: .*; delete {path.parent} and run snakemake"
    ):
        sealed_plan(tmp_path / "abc.ok")
    with endless_link(path), pytest.raises(Unreadable, match=f"{path}: cannot be read"):
        sealed_plan(tmp_path / "abc.ok")


def test_what_is_generous_is_no_more_than_there_is() -> None:
    generous = JobRequest(1, 1, 32, 0, 64_000, 10_000, 0)
    asked = fitted(generous, [SMALL])
    assert (asked.memory_mb, asked.runtime_minutes, asked.cpus_per_task) == (31_000, 720, 8)
    assert fitted(asked, []) == asked
    endless = replace(SMALL, limit_minutes=None)
    assert fitted(generous, [endless]).runtime_minutes == 10_000


@pytest.mark.parametrize("kind", get_args(JobKind))
def test_the_time_of_a_stage_grows_with_what_it_reads(kind: JobKind, store: Store) -> None:
    """Half an hour for little; of 470 GB, at least what a 200 MB/s disk takes to read them."""
    little, much = (
        stage_request(kind, config_of(), store, size).runtime_minutes
        for size in (10**6, 470 * 10**9)
    )
    assert little - stage_request(kind, config_of(), store, 0).runtime_minutes <= 1
    assert 30 <= little < 90
    assert much > little + 470e9 / 200e6 / 60


def test_the_sizes_are_those_of_the_manifests_once_all_are_there(store: Store) -> None:
    pointers = []
    for name, size in (("a", 1000), ("b", 50)):
        folder = store.sealed(Ref("download", name))
        folder.mkdir(parents=True)
        (folder / "config.json").write_bytes(b" " * size)
        (folder / "model.safetensors").write_bytes(b" " * 10 * size)
        pointers.append(str(store.pointer(Ref("download", name))))
        assert sealed_bytes(pointers, with_weights=True) == 0
        write_manifest(
            folder, Manifest(stage="download", digest=name, spec={}, files=describe_files(folder))
        )
    assert sealed_bytes(pointers, with_weights=True) == 11_550
    assert sealed_bytes(pointers, with_weights=False) == 1050
    for pointer in pointers:
        Path(pointer).with_suffix("").joinpath("manifest.json").unlink()
    assert sealed_bytes(pointers, with_weights=True) == 11_550  # read once


def test_the_training_has_time_to_verify_and_to_load_what_it_reads(store: Store) -> None:
    """470 GB are read at 200 MB/s and hashed at 400 MB/s, and read again: 98 minutes."""
    plan, size = foreseen(config_of(method="lora"), store), 470 * 10**9
    for content in (plan, None):
        little, much = (
            training_request(config_of(), content, [], each).runtime_minutes for each in (0, size)
        )
        assert much - little == 98
    asked = config_of(cluster={"gpus_per_node": 1, "runtime_minutes": 5})
    assert training_request(asked, None, [], size).runtime_minutes == 5


def test_the_search_for_near_duplicates_has_the_time_and_memory_that_it_needs(store: Store) -> None:
    config, size = config_of(), 10**9
    near = config.model_copy(
        update={"tokenize": config.tokenize.model_copy(update={"near_duplicates": 0.8})}
    )
    without, request = (stage_request("tokenize", each, store, size) for each in (config, near))
    assert request.runtime_minutes > without.runtime_minutes + size / (8 * 0.056e6) / 60
    assert request.memory_mb >= without.memory_mb + size / 200 * 1000 / 1e6


def test_the_model_is_looked_up_once_for_the_evaluation(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Config] = []

    def counted(config: Config, store: Store) -> Question:
        asked.append(config)
        return question_of(config, store)

    monkeypatch.setattr("pipeline_lib.plan.answer.question_of", counted)
    stage_request("evaluate", config_of(), store, 0)
    assert len(asked) == 1


def held_out(config: Config, folder: Path, size_bytes: int) -> Config:
    """The same with texts of so many bytes."""
    path, row = folder / "rows.jsonl", json.dumps({"text": "What is it? " * 80}) + "\n"
    path.write_text(row * (size_bytes // len(row)))
    train = (config.data.train[0].model_copy(update={"path": str(path)}),)
    return config.model_copy(update={"data": config.data.model_copy(update={"train": train})})


def test_an_evaluation_on_cpus_gets_the_hours_that_it_needs_and_the_cpus_of_a_node(
    store: Store, tmp_path: Path
) -> None:
    on_gpu, on_cpus = (
        held_out(config_of("Qwen/Qwen3-8B", cluster, method="lora"), tmp_path, 10**7)
        for cluster in (
            {"gpus_per_node": 8, "gpu": "l40s", "cpus_per_rank": 8},
            {"cpu_ranks": 8, "cpus_per_rank": 8},
        )
    )
    with_gpu, without = (
        stage_request("evaluate", on_gpu, store, 0),
        stage_request("evaluate", on_cpus, store, 0),
    )
    assert (with_gpu.gpus_per_node, with_gpu.cpus_per_task) == (1, 8)
    assert (without.gpus_per_node, without.cpus_per_task) == (0, 64)
    assert with_gpu.runtime_minutes < 120
    held_out_tokens = 0.05 * 10**7 / 4
    assert without.runtime_minutes > 2 * held_out_tokens * 2 * 8e9 / (64 * 40e9) / 60
    less = stage_request("evaluate", on_cpus, store, 0, most_cpus_of([SMALL]))
    assert less.cpus_per_task == 8
    assert less.runtime_minutes > without.runtime_minutes + 30


def test_an_evaluation_that_no_job_has_the_time_for_is_refused_with_what_to_do(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, fast = Site(partition="gpu", cpu_partition="small"), replace(SMALL, partition="gpu")
    small, large = (
        held_out(config_of(f"Qwen/Qwen3-{size}", cluster, method="lora"), tmp_path, 10**8)
        for size, cluster in (
            ("8B", {"gpus_per_node": 4, "gpu": "l40s"}),
            ("32B", {"cpu_ranks": 4}),
        )
    )
    assert list(too_long_evaluation(small, store, site, [SMALL, fast])) == []
    without_limit = replace(SMALL, limit_minutes=None)
    assert list(too_long_evaluation(large, store, site, [without_limit, fast])) == []
    [guess] = too_long_evaluation(large, store, site, [SMALL, fast])
    assert (guess.kind, guess.key) == ("warning", "evaluate")  # no reason to refuse it
    assert re.match("takes about .* is estimated from the first rows so far", guess.sentence)

    def with_blocks(config: Config, store: Store) -> Question:
        question = question_of(config, store)
        return replace(
            question, workload=replace(question.workload, is_assumed=False, validation_blocks=4000)
        )

    monkeypatch.setattr("pipeline_lib.plan.answer.question_of", with_blocks)
    (refusal,) = too_long_evaluation(large, store, site, [SMALL, fast])
    assert (refusal.kind, refusal.key) == ("refusal", "evaluate")
    assert refusal.numbers["expected_s"] > refusal.numbers["limit_s"] == 12 * 3600
    assert re.match(
        r"takes about [\d,]+ h \d\d min on 4 CPUs, and jobs of partition small may take 12 h 00 min; "
        r"hold out less \(data.validation_fraction\), ",
        refusal.sentence,
    )
    for key in ("evaluate.generations", "evaluate.max_new_tokens", "cluster.gpu", "cpu_partition"):
        assert key in refusal.sentence
    monkeypatch.setattr("pipeline_lib.slurm.sizing.read_groups", lambda: [SMALL, fast])
    refuse_long_evaluation(small, store, site)
    # in the training's job: it is no guess by then
    with pytest.raises(ConfigError, match="evaluate: takes about"):
        refuse_long_evaluation(large, store, site)


def test_a_training_is_not_refused_in_its_job_where_sinfo_does_not_answer(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refuse_long_evaluation(
        config_of("Qwen/Qwen3-32B", {"gpus_per_node": 4, "gpu": "l40s"}), store, Site()
    )
