"""What is refused before any job is submitted, and what is not."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.compile import compile_config, run_digest
from pipeline_lib.config.content import RUNNING_PYTHON, Content, HashCache, read_content
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.files import read_json, write_json, write_text
from pipeline_lib.core.store import Manifest, Store, write_manifest
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.plan.answer import question_of, run_of
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import MARGIN, predict
from pipeline_lib.plan.preflight import lacking_to_train, too_little_disk, wrong_with
from pipeline_lib.plan.stages import stored_bytes
from pipeline_lib.workflow.findings import refuse_wrong
from tests.tiny import tiny_model

TERABYTE = 10**12


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred terabytes, so that the disk of this machine decides nothing."""
    set_free(monkeypatch, 100 * TERABYTE)


def set_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    class Usage:
        free = free_bytes

    monkeypatch.setattr("pipeline_lib.plan.preflight.disk_usage", lambda path: Usage)


def config_of(
    name: str = "Qwen/Qwen3-8B",
    block_tokens: int = 4096,
    cluster: dict[str, Any] | None = None,
    rope: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    model = {
        **({"source": "huggingface", "name": name} if "/" in name else {"source": name}),
        "rope": rope,
    }
    sections = {
        "experiment": "big",
        "model": model,
        "data": {"train": [{"source": "pydoc"}]},
        "tokenize": {"max_tokens": min(1024, block_tokens)},
        "shard": {"block_tokens": block_tokens},
        "cluster": cluster
        if cluster is not None
        else {"gpus_per_node": 8, "gpu": "h200", "memory_gb": 1000},
        "train": {"global_batch_tokens": 64 * block_tokens, "strategy": "auto", **train},
    }
    return Config.model_validate_json(json.dumps(sections))


def problems(config: Config, store: Store) -> list[str]:
    found = [*wrong_with(config, store), *lacking_to_train(config, store)]
    assert {one.kind for one in found} <= {"refusal"}
    return [one.text for one in found]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


A10 = {"gpus_per_node": 2, "gpu": "a10", "memory_gb": 64}
POSSIBLE = {
    "auto": config_of(),
    "fsdp": config_of(strategy="fsdp"),
    "lora": config_of(cluster=A10, method="lora"),
    "host memory that nobody says anything of": config_of(
        cluster={"gpus_per_node": 8, "gpu": "h200"}, strategy="zero2", offload="optimizer"
    ),
    "blocks for which the model is stretched": config_of(
        block_tokens=65536, method="lora", rope={"type": "yarn", "factor": 2.0}
    ),
    "on CPUs": config_of("tiny", 256, cluster={}, strategy="ddp"),
    "on a GPU that is not named": config_of(cluster={"gpus_per_node": 1}, strategy="ddp"),
    "fp16 where there is no bf16": config_of(
        "Qwen/Qwen3-0.6B", 512, {"gpus_per_node": 1, "gpu": "v100"}, precision="fp16"
    ),
    "several nodes, which are only planned": config_of(
        cluster={"nodes": 2, "gpus_per_node": 8, "gpu": "h200", "internode_gbit_s": 100}
    ),
    "a model that is not known yet": config_of("owner/model", 10**6, cluster=A10, strategy="ddp"),
}


@pytest.mark.parametrize("config", POSSIBLE.values(), ids=POSSIBLE)
def test_what_is_possible_or_not_known_is_not_refused(config: Config, store: Store) -> None:
    assert problems(config, store) == []


IMPOSSIBLE: dict[str, tuple[Config, list[str]]] = {
    "no strategy fits": (
        config_of("Qwen/Qwen3-32B", cluster=A10),
        [
            "train.strategy: auto finds no way that fits: even train.offload: optimizer+params "
            "needs 610",
            "cluster.memory_gb gives 64.00 GB; set cluster.memory_gb: 611, if",
            "this would fit: cluster.memory_gb: 611, if",
        ],
    ),
    "the strategy does not fit": (
        config_of(strategy="ddp"),
        [
            "train.strategy: ddp needs ",
            " more than the 139.8 GiB of each H200\n",
            "this would fit: train.strategy: fsdp",
        ],
    ),
    "what is held does not fit": (
        config_of(
            "Qwen/Qwen3-8B",
            16384,
            {"gpus_per_node": 8, "gpu": "h100"},
            recompute="none",
            context_ranks=1,
        ),
        [
            "train.strategy: auto finds no way",
            "this would fit: train.activation_checkpointing left out, so that the plan chooses it",
        ],
    ),
    "host memory": (
        config_of(
            cluster={"gpus_per_node": 8, "gpu": "h200", "memory_gb": 8},
            strategy="zero2",
            offload="optimizer",
        ),
        [
            "train.offload: optimizer needs 232.40 GB of host memory on each node (168.61 GB for "
            "what is offloaded, 13.30 GB for what is copied of a checkpoint before it is "
            "written, 50.50 GB for 8 interpreters and what is around them), and "
            "cluster.memory_gb gives 8.00 GB; set cluster.memory_gb: 233, if",
        ],
    ),
    "no host memory for the copy of a checkpoint": (
        config_of(
            cluster={"gpus_per_node": 8, "gpu": "h200", "memory_gb": 100},
            strategy="fsdp",
            save_async=True,
        ),
        [
            "train.strategy: fsdp needs 168.45 GB of host memory on each node (117.95 GB",
            "set cluster.memory_gb: 169, if the nodes have as much, or leave out train.save_async: "
            "true",
        ],
    ),
    "no host memory for that, and a GPU too small": (
        config_of(
            cluster={"gpus_per_node": 2, "gpu": "a10", "memory_gb": 100},
            strategy="fsdp",
            save_async=True,
        ),
        [
            "train.strategy: fsdp needs ",
            " more than the 22.0 GiB of each A10, and 133.65 GB of host memory",
        ],
    ),
    "longer than the model": (
        config_of(block_tokens=65536),
        [
            "shard.block_tokens: 65536 tokens are more than the model's 40960 positions; lower it, "
            "or set model.rope: "
            "{type: yarn, factor: 2.0}"
        ],
    ),
    "longer than the stretched model": (
        config_of(block_tokens=65537, rope={"type": "yarn", "factor": 2.0}),
        [
            "shard.block_tokens: 65537 tokens are more than the model's 65536 positions; lower it, "
            "or raise it to "
            "model.rope: {type: yarn, factor: 3.0}"
        ],
    ),
    "too few blocks for ranks that 28 heads keep from sharing them": (
        config_of("Qwen/Qwen2.5-7B", strategy="ddp", method="lora", global_batch_tokens=4096),
        [
            "train.global_batch_tokens: it has 1 block of 4096 tokens, fewer than the 8 ranks",
            "; try 32768",
        ],
    ),
    "too few blocks on GPUs that are not named": (
        config_of(
            "Qwen/Qwen2.5-7B", 4096, {"gpus_per_node": 8}, strategy="ddp", global_batch_tokens=4096
        ),
        [
            "train.global_batch_tokens: it has 1 block of 4096 tokens, fewer than the 8 ranks",
            "; try 32768",
        ],
    ),
    "an unknown GPU": (
        config_of(cluster={"gpus_per_node": 8, "gpu": "h2000"}),
        ["cluster.gpu: 'h2000' is not known; did you mean one of H200"],
    ),
    "a GPU without bf16": (
        config_of("Qwen/Qwen3-0.6B", 512, {"gpus_per_node": 1, "gpu": "v100"}),
        ["train.precision: bf16, which a V100"],
    ),
}


HOST_OF_128_GB = {
    "8B on 4 x A100": config_of(
        "Qwen/Qwen3-8B", 4096, {"gpus_per_node": 4, "gpu": "a100 80gb", "memory_gb": 128}
    ),
    "4B offloaded on 4 x 3090": config_of(
        "Qwen/Qwen3-4B",
        2048,
        {"gpus_per_node": 4, "gpu": "3090", "memory_gb": 128},
        strategy="zero2",
        offload="optimizer",
        recompute="full",
    ),
}


@pytest.mark.parametrize("config", HOST_OF_128_GB.values(), ids=HOST_OF_128_GB)
def test_a_host_with_no_room_for_a_whole_checkpoint_trains_too(
    config: Config, store: Store
) -> None:
    assert problems(config, store) == []
    train = config.train.model_copy(update={"save_async": True})
    [problem] = problems(config.model_copy(update={"train": train}), store)
    assert "cluster.memory_gb gives 128.00 GB" in problem
    assert "leave out train.save_async: true" in problem


@pytest.mark.parametrize(("config", "said"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_is_impossible_is_refused_with_what_would_do(
    config: Config, said: list[str], store: Store
) -> None:
    [problem] = problems(config, store)
    assert problem.startswith(said[0])
    assert all(part in problem for part in said), problem


@pytest.mark.parametrize(
    ("train", "library"),
    [
        ({"strategy": "zero2"}, "train.strategy: zero2 needs DeepSpeed"),
        ({"strategy": "fsdp", "precision": "fp8"}, "train.precision: fp8 needs torchao"),
        (
            {"strategy": "fsdp", "optimizer": "adamw_8bit"},
            "train.optimizer: adamw_8bit needs torchao",
        ),
    ],
)
def test_libraries_of_settings_are_missed_before_anything_is_made(
    train: dict[str, Any], library: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(cluster={"gpus_per_node": 8, "gpu": "h200"}, **train)
    monkeypatch.setattr("pipeline_lib.plan.preflight.find_spec", lambda name: object())
    assert problems(config, store) == []
    monkeypatch.setattr("pipeline_lib.plan.preflight.find_spec", lambda name: None)
    [problem] = problems(config, store)
    assert problem.startswith(f"{library}, which is not installed here: ")
    assert "pip install -e '.[" in problem


RATES = ["matmul_flop_s", "attention_flop_s", "memory_bytes_s", "pointwise_bytes_s", "launch_s"]
RATES += ["in_node_bytes_s", "in_node_latency_s", "copy_bytes_s", "host_bytes_s", "disk_bytes_s"]


def on_a_gpu_with(memory_bytes: int, store: Store, strategy: str) -> Config:
    """A small model on one GPU of that size, which is in no catalogue."""
    path = store.root / f"{memory_bytes}.json"
    rate = {"value": 1.0, "low": 1.0, "high": 1.0}
    gpu = {
        "gpu": "NVIDIA Test",
        "gpu_memory_bytes": memory_bytes,
        "ranks": 1,
        "nodes": 1,
        "precision": "bf16",
    }
    write_json(path, {"schema": 1, **gpu, "rates": dict.fromkeys(RATES, rate), "parts": []})
    return config_of(
        "Qwen/Qwen3-0.6B",
        1024,
        {"gpus_per_node": 1, "measured": str(path)},
        strategy=strategy,
        offload="none",
        offload_activations=False,
    )


def test_what_fits_without_the_margin_is_refused_to_auto_and_left_to_who_names_it(
    store: Store,
) -> None:
    """Who names a strategy is warned by the plan; auto never takes what may not fit."""
    geometry = geometry_in(published("Qwen/Qwen3-0.6B") or {})
    leanest = Train(recompute="full", compile=True)
    needed = predict(geometry, leanest, Ranks(1, 1, has_triton=True), 1024, 64).total_bytes
    assert len(problems(on_a_gpu_with(needed - 1, store, "ddp"), store)) == 1
    assert problems(on_a_gpu_with(needed, store, "ddp"), store) == []
    leanest = Train(strategy="fsdp", recompute="full", compile=True)
    needed = predict(geometry, leanest, Ranks(1, 1, has_triton=True), 1024, 64).total_bytes
    assert len(problems(on_a_gpu_with(needed, store, "auto"), store)) == 1
    assert problems(on_a_gpu_with(math.ceil(needed / (1 - MARGIN)), store, "auto"), store) == []


def test_too_little_disk_is_refused_unless_the_checkpoints_lie_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkpoints and one being written of 12 bytes for each of 8.19e9 parameters: 294.9 GB.

    The base and the merged model take 2 bytes for each, and the trained weights 4.
    """
    config = config_of(strategy="fsdp")
    set_free(monkeypatch, 361 * 10**9)
    assert problems(config, store) == []
    set_free(monkeypatch, 360 * 10**9)
    assert problems(config, store) == [
        "the run writes 360.39 GB (base model 16.38 GB, checkpoints 294.87 GB, trained weights "
        f"32.76 GB, merged model 16.38 GB), and 360.00 GB are free in {store.root.parent}; free "
        "some space, or point PIPELINE_STORE at a larger disk"
    ]
    set_free(monkeypatch, 294 * 10**9)
    [problem] = problems(config, store)
    assert problem.startswith(
        "train.keep_last: the checkpoints kept and the one being written need 294.87 GB, and 294.00"
    )
    tiny = config_of("tiny", 256, cluster={}, strategy="ddp")
    set_free(monkeypatch, 37_000_000)
    [problem] = problems(tiny, store)
    assert "need 37.8 MB, and 37.0 MB are free" in problem
    assert "lie there" not in problem
    specs = compile_config(tiny, Content(dict(RUNNING_PYTHON), (dict(RUNNING_PYTHON),))).specs
    write_text(
        store.run_dir(run_digest(specs["train"])) / "checkpoints" / "step-1" / "model.safetensors",
        "x" * 800_000,
    )
    set_free(monkeypatch, 45_500_000)
    assert problems(tiny, store) == []
    set_free(monkeypatch, 36_000_000)
    [problem] = problems(tiny, store)
    assert "and 36.0 MB are free in " in problem
    assert " beside 800.0 kB of them that lie there; free some space" in problem


@pytest.mark.parametrize("place", ["a folder", "a hub's cache", "a private blob", "the store"])
def test_a_local_model_counts_on_the_disk_if_its_weights_will_be_copied(
    place: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store.root / "merge" if place == "the store" else store.root.parent / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "model.safetensors").chmod(0o600 if place == "a private blob" else 0o644)
    if place in ("a hub's cache", "a private blob"):
        blob = store.root.parent / "blobs" / "of-weights"
        blob.parent.mkdir()
        (folder / "model.safetensors").rename(blob)
        (folder / "model.safetensors").symlink_to(blob)
    store.root.mkdir(exist_ok=True)
    store.root.chmod(0o755)
    sections = config_of("tiny", 256, cluster={}, strategy="ddp").model_dump(mode="json")
    config = Config.model_validate_json(
        json.dumps({**sections, "model": {"source": "local", "path": str(folder)}})
    )
    run = run_of(question_of(config, store))
    needed = sum(stored_bytes(run, is_downloaded=place in ("a hub's cache", "the store")).values())
    set_free(monkeypatch, needed)
    assert list(too_little_disk(run, config, store)) == []
    set_free(monkeypatch, needed - 1)
    assert len(list(too_little_disk(run, config, store))) == 1


def test_a_run_is_refused_for_the_memory_that_its_merge_and_evaluation_lack(store: Store) -> None:
    """235B trains on 8 GPUs with 12 GB hosts; an expert matrix of 0.8 billion merges in fp32.

    These are weights.
    """
    cluster = {"nodes": 8, "gpus_per_node": 1, "gpu": "h200", "internode_gbit_s": 400}
    config = config_of(
        "Qwen/Qwen3-235B-A22B", cluster={**cluster, "memory_gb": 12}, method="lora", strategy="fsdp"
    )
    found = problems(config, store)
    assert [problem.partition(":")[0] for problem in found] == ["merge", "evaluate"]
    assert re.match(
        r"merge: needs 22\.\d\d GB of host memory, and cluster.memory_gb gives 12.00 GB; take a node",
        found[0],
    )
    enough = config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"memory_gb": 40})}
    )
    assert problems(enough, store) == []


def test_a_training_that_was_done_is_not_refused(store: Store) -> None:
    impossible = {"gpus_per_node": 1, "gpu": "no such GPU"}
    config = config_of("tiny", 256, cluster=impossible, strategy="ddp")
    assert len(problems(config, store)) == 1
    specs = compile_config(config, Content(dict(RUNNING_PYTHON), (dict(RUNNING_PYTHON),))).specs
    write_json(store.sealed(specs["train"].ref) / "manifest.json", {})
    assert problems(config, store) == []


def test_all_problems_are_told_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 0)
    config = config_of(block_tokens=65536, cluster={"gpus_per_node": 8, "gpu": "x"})
    assert [problem.partition(":")[0] for problem in problems(config, store)] == [
        *("cluster.gpu", "shard.block_tokens", "train.keep_last")
    ]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_training_alone_lacks_stops_no_plan_and_no_data(name: str, store: Store) -> None:
    config, _ = IMPOSSIBLE[name]
    is_too_large = name not in (
        "longer than the model",
        "longer than the stretched model",
        "an unknown GPU",
        "a GPU without bf16",
    )
    assert bool(lacking_to_train(config, store)) == is_too_large
    assert bool(wrong_with(config, store)) != is_too_large


def test_a_full_disk_stops_the_training_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 0)
    [refusal] = lacking_to_train(config_of(), store)
    assert (refusal.kind, refusal.key) == ("refusal", "train.keep_last")
    assert wrong_with(config_of(), store) == []


def test_keys_that_leave_no_way_to_train_are_refused(store: Store) -> None:
    [problem] = problems(config_of(shard_ranks=4, offload="optimizer"), store)
    assert problem.startswith(
        "train.strategy: auto finds no way to train beside train.shard_ranks: 4 and train.offload"
    )


def test_it_costs_next_to_nothing(store: Store, tables: list[int]) -> None:
    """Every call of snakemake waits for it."""
    assert problems(config_of(), store) == []
    assert sum(tables) < 500


def test_a_model_that_is_stretched_already_is_refused_with_what_to_do(
    tmp_path: Path, store: Store
) -> None:
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    write_json(
        tmp_path / "config.json",
        {**read_json(tmp_path / "config.json"), "rope_parameters": scaling},
    )
    model = {"source": "local", "path": str(tmp_path), "rope": {"type": "yarn", "factor": 2.0}}
    sections = {**config_of(cluster={}, strategy="ddp").model_dump(mode="json"), "model": model}
    with pytest.raises(
        ConfigError, match=r"model\.path: .* \(rope_type 'linear'\), .*; remove model\.rope$"
    ):
        refuse_wrong(Config.model_validate_json(json.dumps(sections)), store)


def test_a_model_folder_is_looked_at_before_anything_is_made(tmp_path: Path) -> None:
    """What keeps it from being trained, and, once trained, what keeps it from publication."""
    shutil.copytree(tiny_model(), tmp_path / "model")
    store = Store(tmp_path / "store", UserCache(tmp_path / "cache"))
    path = tmp_path / "model" / "generation_config.json"
    sections = {
        "experiment": "big",
        "model": {"source": "local", "path": str(tmp_path / "model")},
        "data": {"train": [{"source": "pydoc"}]},
    }
    config = Config.model_validate_json(json.dumps(sections))
    refuse_wrong(config, store)
    path.write_text('{"eos_token_id": "x"}')
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for")
    with pytest.raises(ConfigError) as caught:
        refuse_wrong(config, store)
    generation, template = caught.value.problems
    assert generation.startswith(f"model.path: {path}: eos_token_id: 'x' is not a token id")
    assert template.startswith(
        f"model.path: {tmp_path / 'model' / 'chat_template.jinja'}: not a chat template"
    )

    cache = HashCache.load(store.remembered("hashes.json"))
    specs = compile_config(config, read_content(config, Path("config.yaml"), cache)).specs
    write_manifest(
        store.sealed(specs["train"].ref), Manifest(stage="train", digest="0", spec={}, files={})
    )
    with pytest.raises(ConfigError) as caught:
        refuse_wrong(config, store)
    assert caught.value.problems == [generation]
    write_manifest(
        store.sealed(specs["merge"].ref), Manifest(stage="merge", digest="0", spec={}, files={})
    )
    refuse_wrong(config, store)


TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
SEEN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, TURNS[1]]
FIRST_ROWS: dict[str, tuple[str, str | None]] = {
    "good": (json.dumps({"messages": TURNS}), None),
    "pictures": (
        json.dumps({"messages": TURNS, "images": ["a.png"]}),
        "images: only text is supported",
    ),
    "pictures in a turn": (
        json.dumps({"messages": SEEN}),
        "a part of type 'image_url'; only text is supported",
    ),
    "preference data": (
        json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}),
        "is preference data",
    ),
    "another layout": (json.dumps({"question": "a", "reply": "b"}), "none of alpaca"),
    "no row": ("", "holds no rows"),
}


def data_of(path: Path, **more: Any) -> Config:
    rows = {"data": {"train": [{"source": "file", "path": str(path)}]}, **more}
    return Config.model_validate_json(
        json.dumps({"experiment": "big", "model": {"source": "tiny"}, **rows})
    )


@pytest.mark.parametrize(("text", "problem"), FIRST_ROWS.values(), ids=FIRST_ROWS)
def test_the_first_row_of_a_local_file_is_looked_at(
    tmp_path: Path, store: Store, text: str, problem: str | None
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    found = problems(data_of(tmp_path / "*.jsonl"), store)
    assert len(found) == (0 if problem is None else 1)
    for one in found:
        assert one.startswith(f"data.train[0].path: {tmp_path}/rows.jsonl") and str(problem) in one


def test_a_first_row_that_may_be_put_aside_is_no_problem(tmp_path: Path, store: Store) -> None:
    (tmp_path / "rows.jsonl").write_text(FIRST_ROWS["pictures"][0])
    assert (
        problems(
            data_of(tmp_path / "rows.jsonl", tokenize={"max_quarantined_fraction": 0.5}), store
        )
        == []
    )


@pytest.mark.parametrize(
    ("row", "more", "idle"),
    [
        (
            '{"text": "some text"}',
            {"tokenize": {"thinking": "strip", "system": "Be brief."}},
            ["system", "thinking"],
        ),
        (
            '{"text": "some text"}',
            {"tokenize": {"system": "Be."}, "evaluate": {"prompts": ["Who?"]}},
            [],
        ),
        (json.dumps({"messages": TURNS}), {"tokenize": {"thinking": "strip"}}, []),
    ],
)
def test_keys_of_conversations_are_refused_for_raw_text(
    tmp_path: Path, store: Store, row: str, more: dict[str, Any], idle: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    found = problems(data_of(tmp_path / "rows.jsonl", **more), store)
    assert [problem.partition(": has no effect")[0] for problem in found] == [
        f"tokenize.{key}" for key in idle
    ]


@pytest.mark.parametrize("kind", ["local", "tiny"])
def test_conversations_need_a_model_with_a_chat_template(
    tmp_path: Path, store: Store, kind: str
) -> None:
    """`check` says what tokenize would say; texts, and unknown rows, need no template."""
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_model(), folder)
    key = {"local": "path", "tiny": "tokenizer"}[kind]
    model = {"source": kind, key: str(folder)}

    def found(source: dict[str, Any], text: str) -> list[str]:
        rows.write_text(text)
        config = {"experiment": "big", "model": model, "data": {"train": [source]}}
        return problems(Config.model_validate_json(json.dumps(config)), store)

    file = {"source": "file", "path": str(rows)}
    talk = json.dumps({"messages": TURNS})
    text = '{"text": "some text"}'
    hub = {"source": "huggingface", "name": "owner/rows"}
    assert found(file, talk) == []
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError) as refused:
        ChatTemplate.load(folder)
    wanted = [f"model.{key}: {refused.value}"]
    assert found(file, talk) == wanted
    assert found({"source": "pydoc"}, "") == wanted
    assert found({**hub, "format": "sharegpt"}, "") == wanted
    assert found(file, text) == found(hub, "") == found({**hub, "format": "text"}, "") == []


def test_a_template_has_to_render_what_the_config_gives_all_rows(
    tmp_path: Path, store: Store
) -> None:
    """Else the tokenize stage would stop at the first row, after a download."""
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_model(), folder)
    rows.write_text(json.dumps({"messages": TURNS}))
    tools = ['{"name": "weather", "description": "of a place"}']
    config = data_of(
        rows, model={"source": "local", "path": str(folder)}, tokenize={"tools": tools}
    )
    assert problems(config, store) == []
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    )
    (problem,) = problems(config, store)
    assert problem.startswith("tokenize.tools: ")


def test_a_file_that_cannot_be_read_is_left_to_the_check_of_files(
    tmp_path: Path, store: Store
) -> None:
    """Its name is too long for any disk: it is named with the files that are missing."""
    assert problems(data_of(tmp_path / ("a" * 300 + ".jsonl")), store) == []
