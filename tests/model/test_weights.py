"""Weights loaded in parts are transformers' and peft's, and no rank holds those of others."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.model.build import DTYPES, build_trainable, empty_base, load_base
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.rank import let_first_rank_warn
from tests.ranks import run_ranks
from tests.train.loading import SIZES, grown_bytes, spread, write_dense, write_large, write_random

Values = NDArray[np.float32]
FULL = Train(precision="fp32", seed=7)
LORA = Train(method="lora", precision="bf16", lora=Lora(rank=4, alpha=8), seed=7)
CPU = torch.device("cpu")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def write_moe(folder: Path) -> Path:
    """A small Qwen3-MoE with five experts, stored as by its authors: three matrices for each."""
    experts: dict[str, Any] = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, tie_word_embeddings=False))
    return write_random(folder, model, torch.bfloat16)


def load_spread(
    environ: Mapping[str, str], folder: Path, train: Train, strategy: str
) -> dict[str, Values]:
    """All parameters and buffers after loading, gathered from the ranks."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        model, _ = spread(folder, world, train, strategy)
        found = values_of(model)
        is_sharded = [isinstance(parameter, DTensor) for parameter in model.parameters()]
        assert all(is_sharded) if strategy == "fsdp" else not any(is_sharded)
        return found


def values_of(model: torch.nn.Module) -> dict[str, Values]:
    """Whole parameters and buffers, fp32, with dtype and gradient in names; tied ones twice."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        f"{name} {tensor.dtype} {tensor.requires_grad}": whole(tensor) for name, tensor in tensors
    }


def whole(tensor: Tensor) -> Values:
    """The values of all ranks, as fp32."""
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().float().numpy()


def reference(folder: Path, train: Train) -> dict[str, Values]:
    """The same of a model that transformers loads whole, and peft gives adapters."""
    if train.method == "full":
        return values_of(load_base(folder, torch.float32))
    return values_of(
        add_adapters(load_base(folder, DTYPES[train.precision]), train.lora, train.seed)
    )


def assert_same(found: Mapping[str, Values], expected: Mapping[str, Values]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


@pytest.mark.parametrize("train", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("strategy", "ranks", "head"),
    [("ddp", 1, "tied"), ("fsdp", 3, "tied, stored twice"), ("fsdp", 3, "untied")],
)
def test_values_are_those_of_a_model_loaded_whole(
    tmp_path: Path, strategy: str, ranks: int, head: str, train: Train
) -> None:
    folder = write_dense(tmp_path, head != "untied", torch.bfloat16)
    if head == "tied, stored twice":
        change(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    for found in run_ranks(load_spread, ranks, folder, train, strategy).values():
        assert_same(found, reference(folder, train))


def test_fp32_files_in_several_parts_are_found_by_their_index(tmp_path: Path) -> None:
    folder = write_dense(tmp_path, False, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "leftover.safetensors").write_bytes(b"of another download")
    assert_same(run_ranks(load_spread, 2, folder, FULL, "fsdp")[0], reference(folder, FULL))


def test_experts_are_put_together_from_their_own_matrices(tmp_path: Path) -> None:
    folder = write_moe(tmp_path)
    assert "model.layers.1.mlp.experts.4.up_proj.weight" in load_file(folder / "model.safetensors")
    assert_same(run_ranks(load_spread, 2, folder, FULL, "fsdp")[0], reference(folder, FULL))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of the only file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load(folder: Path, train: Train = FULL) -> torch.nn.Module:
    model = build_trainable(folder, train)
    load_weights(model, folder, CPU, train.seed)
    return model


def saved_by_peft(folder: Path, lora: Lora) -> tuple[Path, dict[str, Values]]:
    """Adapters with other values than new ones have, as peft saves them; and these values."""
    torch.manual_seed(3)
    model = add_adapters(load_base(folder, torch.float32), lora, seed=3)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.rand_like(parameter)
    model.save_pretrained(str(folder / "adapter"))
    values = values_of(model)
    return folder / "adapter" / "adapter_model.safetensors", {
        name: each for name, each in values.items() if ".lora_" in name
    }


def load_continued(
    environ: Mapping[str, str], folder: Path, train: Train, strategy: str, adapter: Path
) -> dict[str, Values]:
    """The adapters after loading those of the file `adapter`, gathered from the ranks."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        model, _ = spread(folder, world, train, strategy, adapter)
        return {name: each for name, each in values_of(model).items() if ".lora_" in name}


@pytest.mark.parametrize("lora", [LORA.lora, Lora(rank=4, dora=True)], ids=["lora", "dora"])
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 3)])
def test_adapters_that_peft_has_saved_are_trained_on_from_their_values(
    tmp_path: Path, strategy: str, ranks: int, lora: Lora
) -> None:
    folder = write_dense(tmp_path, tied=False)
    adapter, expected = saved_by_peft(folder, lora)
    train = Train(method="lora", precision="fp32", lora=lora, seed=7)
    for found in run_ranks(load_continued, ranks, folder, train, strategy, adapter).values():
        assert_same(found, expected)


@pytest.mark.parametrize(
    "other", [Lora(rank=8), Lora(rank=4, targets=("q_proj",)), Lora(rank=4, dora=True)]
)
def test_adapters_of_another_kind_are_refused(tmp_path: Path, other: Lora) -> None:
    folder = write_dense(tmp_path, tied=False)
    adapter, _ = saved_by_peft(folder, Lora(rank=4))
    model = build_trainable(folder, Train(method="lora", precision="fp32", lora=other))
    with pytest.raises(DataError, match="not the adapters that train.lora describes"):
        load_weights(model, folder, CPU, 0, adapter)


@pytest.mark.parametrize("train", [FULL, LORA], ids=["full", "lora"])
def test_a_tied_weight_may_be_stored_as_the_head(tmp_path: Path, train: Train) -> None:
    folder = write_dense(tmp_path, tied=True)
    value = load_file(folder / "model.safetensors")[EMBEDDING]
    change(folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    model = load(folder, train)
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert torch.equal(base.lm_head.weight, value.to(base.lm_head.weight.dtype))


def test_tied_weights_that_are_stored_with_two_values_are_refused(tmp_path: Path) -> None:
    folder = write_dense(tmp_path, tied=True)
    change(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(DataError, match=r"lm_head.weight is not equal .* tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.pop(DOWN), f"it lacks {DOWN}"),
        (lambda tensors: tensors.update(stray=torch.zeros(3)), "it holds besides stray"),
        (
            lambda tensors: tensors.update({DOWN: torch.zeros(60, 32)}),
            rf"another shape {DOWN} \[60, 32\] instead of \[32, 60\]",
        ),
        (lambda tensors: tensors.update({DOWN: torch.zeros(32)}), r"\[32\] instead of \[32, 60\]"),
        (lambda tensors: tensors.clear(), r"it lacks model.embed_tokens.weight, .* and 19 more"),
    ],
    ids=["missing", "extra", "turned", "flat", "empty"],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    folder = write_dense(tmp_path, tied=True)
    change(folder, edit)
    for train in (FULL, LORA):
        with pytest.raises(DataError, match=said):
            load(folder, train)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_moe(tmp_path)
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.4.up_proj.weight"))
    with pytest.raises(
        DataError, match=r"lacks model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight\."
    ):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "size"), [("cut", "1GB"), ("header", "20KB"), ("gone", "1GB"), ("gone", "20KB")]
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, size: str) -> None:
    folder = write_dense(tmp_path, True, max_shard_size=size)
    path = sorted(folder.glob("*.safetensors"))[0]
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-5] if damage == "cut" else b"\xff" * 16 + content[16:])
    with pytest.raises(DataError, match=f"{path.name}: cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        (
            json.dumps({"weight_map": {DOWN: "../elsewhere.safetensors"}}),
            "not the name of a safetensors file",
        ),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, text: str, said: str) -> None:
    folder = write_dense(tmp_path, True, max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=f"index.json: .*{said}"):
        load(folder)


def test_a_config_that_transformers_does_not_take_is_refused(tmp_path: Path) -> None:
    folder = write_dense(tmp_path, True)
    write_json(
        folder / "config.json", {**read_json(folder / "config.json"), "model_type": "qwen99"}
    )
    with pytest.raises(DataError, match="transformers cannot load this model"):
        load(folder)


# How often a rank keeps its part of what is trained: weights and two moments, under DeepSpeed
# gradients too, which moves its weights once when it begins. With adapters that is little, beside
# the part of the base.
@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
@pytest.mark.parametrize(
    ("strategy", "copies", "with_adapters"), [("fsdp", 3, 1.0), ("zero3", 5, 1.4)]
)
@pytest.mark.parametrize("train", [FULL, LORA], ids=["full", "lora"])
def test_a_rank_holds_its_part_of_the_model_and_no_more(
    tmp_path: Path, train: Train, strategy: str, copies: int, with_adapters: float
) -> None:
    write_dense(tmp_path / "small", tied=False)
    model_bytes = write_large(tmp_path / "large", layers=10) * (4 if train.method == "full" else 2)
    kept_bytes = model_bytes * (copies if train.method == "full" else with_adapters)
    for part_bytes in run_ranks(grown_bytes, 2, tmp_path, train, strategy, "cpu").values():
        print(
            f"{strategy}, {train.method}: {part_bytes / 1e6:.0f} MB; the model "
            f"{model_bytes / 1e6:.0f} MB"
        )
        assert 0.45 * model_bytes < part_bytes < 0.75 * kept_bytes


def warnings_of_transformers(environ: Mapping[str, str], folder: Path) -> list[str]:
    """What transformers warns of while this rank builds the model in `folder`."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    let_first_rank_warn(World.from_env(environ, "cpu"))
    empty_base(folder, torch.bfloat16)
    return told


def test_only_the_first_rank_says_what_transformers_warns_of(tmp_path: Path) -> None:
    folder = write_dense(tmp_path, tied=True)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "eos_token_id": 10 * config["vocab_size"]})
    told = run_ranks(warnings_of_transformers, 2, folder)
    assert any("eos_token_id" in line for line in told[0])
    assert told[1] == []
