"""The exported folder is the trained model, as peft and transformers load it, laid out as base."""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Lora, Train
from pipeline_lib.core.errors import DataError, IntegrityError, TrainingError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.stage import Job, Sealed
from pipeline_lib.core.store import Manifest, Spec, Store
from pipeline_lib.data.blocks import Block
from pipeline_lib.export.adapter import export_adapter
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.export.merge import export, run
from pipeline_lib.model.build import freeze, load_base
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.probe import probe_logits, save_probe
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors
from tests.complete import training_json
from tests.locks import hold
from tests.train.loading import SIZES, write_multimodal, write_random

TOKENS = torch.arange(3, 23).unsqueeze(0)
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**NO_HEAD_DIM, tie_word_embeddings=False),
    "moe": lambda: Qwen3MoeConfig(
        **SIZES, **EXPERTS, mlp_only_layers=[0], tie_word_embeddings=False
    ),
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
LORAS = {
    "lora": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8, rslora=True, targets=("q_proj", "o_proj")),
    "dora": Lora(rank=4, alpha=8, dora=True),
}


@pytest.fixture(params=[*CONFIGS, "qwen3.5", "qwen3.5-moe"])
def base(request: pytest.FixtureRequest, tmp_path: Path, tiny: Path) -> Path:
    """A model of each kind in bf16, in several files."""
    return write_base(tmp_path / "base", request.param, tiny, torch.bfloat16)


def write_base(folder: Path, kind: str, tiny: Path, dtype: torch.dtype, size: str = "30KB") -> Path:
    if kind.startswith("qwen3.5"):
        write_multimodal(folder, dtype, kind.endswith("moe"), max_shard_size=size)
    else:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[kind]())  # type: ignore[no-untyped-call]
        write_random(folder, model, dtype, max_shard_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


def train_a_little(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Change what is trained, and leave it as a training stage does."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tensors = {name: parameter.detach().float() for name, parameter in trainable(model).items()}
    save_tensors(folder / "weights", tensors)
    return tensors


def logits_of(model: nn.Module) -> Tensor:
    model.train(False)
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def merge(base: Path, tmp_path: Path, train: Train, dtype: torch.dtype | None = None) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    fold = plan_fold(base, tmp_path / "trained", train)
    export(fold, base, {}, out, dtype)
    if train.method == "lora":
        export_adapter(
            fold.trained.adapters,
            train,
            {"source": "huggingface", "name": "Qwen/Some", "path": "/store"},
            out,
        )
    return out


def tensors_of(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def layout(folder: Path) -> dict[str, dict[str, tuple[Any, ...]]]:
    """What each file holds."""
    return {
        file: {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        for file, tensors in tensors_of(folder).items()
    }


@pytest.mark.parametrize(
    "globs", [(), ("model.embed_tokens.*", "model.layers.0.*")], ids=["all", "frozen"]
)
def test_full_training_is_exported_tensor_by_tensor(
    base: Path, tmp_path: Path, globs: tuple[str, ...]
) -> None:
    train = Train(precision="fp32", freeze=globs)
    model = load_base(base, torch.float32)
    freeze(model, train)
    train_a_little(model, tmp_path / "trained")
    out = merge(base, tmp_path, train)
    assert len(layout(out)) > 1
    assert layout(out) == layout(base)
    assert (
        read_json(out / "model.safetensors.index.json")["weight_map"]
        == (read_json(base / "model.safetensors.index.json")["weight_map"])
    )
    expected = model.to(torch.bfloat16).state_dict()  # type: ignore[arg-type]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert loaded.keys() == expected.keys()
    assert [name for name in loaded if not torch.equal(loaded[name], expected[name])] == []
    kept = {
        name
        for name, tensor in load_base(base, torch.bfloat16).state_dict().items()
        if tensor.equal(loaded[name])
    }
    assert any(name.startswith("model.layers.0.") for name in kept) == bool(globs)


def test_what_is_beside_the_text_model_is_copied_in_every_bit(tmp_path: Path, tiny: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3.5", tiny, torch.bfloat16)
    train_a_little(load_base(base, torch.float32), tmp_path / "trained")
    out = merge(base, tmp_path, Train(precision="fp32"), torch.float32)
    stored, written = (dict(ChainMap(*tensors_of(one).values())) for one in (base, out))
    assert written.keys() == stored.keys()
    parts = ("model.visual.", "mtp.")
    assert all(any(name.startswith(part) for name in stored) for part in parts)
    for name, tensor in written.items():
        if name.startswith(parts):
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, stored[name])
        else:
            assert tensor.dtype == torch.float32 and not torch.equal(tensor, stored[name].float())
    whole, loaded = (
        Qwen3_5ForConditionalGeneration.from_pretrained(one, dtype=torch.float32)
        for one in (base, out)
    )
    assert torch.equal(loaded.model.visual.pos_embed.weight, whole.model.visual.pos_embed.weight)
    torch.testing.assert_close(
        logits_of(loaded), logits_of(load_base(out, torch.float32)), rtol=1e-4, atol=1e-4
    )
    assert (out / "preprocessor_config.json").read_bytes() == (
        base / "preprocessor_config.json"
    ).read_bytes()


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_folded_adapters_and_adapters_alone_are_what_peft_makes_of_them(
    base: Path, tmp_path: Path, lora: Lora
) -> None:
    train = Train(method="lora", precision="fp32", lora=lora)
    adapted = add_adapters(load_base(base, torch.float32), lora, seed=0)
    trained = train_a_little(adapted, tmp_path / "trained")
    expected = logits_of(adapted)
    out = merge(base, tmp_path, train, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with_adapter = logits_of(PeftModel.from_pretrained(plain, out / "adapter"))
    torch.testing.assert_close(with_adapter, expected, rtol=1e-4, atol=1e-4)
    saved = load_file(out / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == sum(
        tensor.numel() for tensor in trained.values()
    )
    text = (out / "adapter" / "adapter_config.json").read_text()
    assert (
        read_json(out / "adapter" / "adapter_config.json")["base_model_name_or_path"] == "Qwen/Some"
    )
    assert str(tmp_path) not in text and "/store" not in text
    # A base that is a folder of this machine is named by it, so that peft finds it.
    local = tmp_path / "local"
    local.mkdir()
    adapters = plan_fold(base, tmp_path / "trained", train).trained.adapters
    export_adapter(adapters, train, {"source": "local"}, local, str(base))
    found = AutoPeftModelForCausalLM.from_pretrained(local / "adapter", dtype=torch.float32)
    torch.testing.assert_close(logits_of(found), expected, rtol=1e-4, atol=1e-4)
    # Of a size of 30; a recurrent state carries what rounding the weights once more has changed.
    torch.testing.assert_close(
        logits_of(load_base(out, torch.float32)), expected, rtol=1e-4, atol=1e-3
    )
    assert not torch.allclose(logits_of(load_base(base, torch.float32)), expected, atol=1e-2)
    folded = adapted.merge_and_unload().state_dict()
    for name, tensor in load_base(out, torch.float32).state_dict().items():
        torch.testing.assert_close(tensor, folded[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bf16_is_rounded_once(tmp_path: Path, tiny: Path, stored: torch.dtype) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, stored)
    train = Train(method="lora", precision="fp32", lora=LORAS["lora"])
    adapted = add_adapters(load_base(base, torch.float32), train.lora, seed=0)
    train_a_little(adapted, tmp_path / "trained")
    out = merge(base, tmp_path, train, torch.bfloat16)
    folded = adapted.merge_and_unload().to(torch.bfloat16).state_dict()
    off = [
        int((tensor != folded[name]).sum())
        for name, tensor in load_base(out, torch.bfloat16).state_dict().items()
        if name != HEAD
    ]
    elements = sum(tensor.numel() for tensor in folded.values())
    assert sum(off) < 1e-3 * elements  # fp32 sums in another order, at the edge of a rounding


@pytest.mark.parametrize("stored_twice", [False, True])
def test_a_tied_head_is_not_written_twice(tmp_path: Path, tiny: Path, stored_twice: bool) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.float32, size="1GB")
    if stored_twice:
        tensors = load_file(base / "model.safetensors")
        save_file(
            {**tensors, HEAD: tensors[EMBEDDING].clone()},
            base / "model.safetensors",
            {"format": "pt"},
        )
    model = load_base(base, torch.float32)
    train_a_little(model, tmp_path / "trained")
    out = merge(base, tmp_path, Train(precision="fp32"))
    assert HEAD not in load_file(out / "model.safetensors")
    assert not (out / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits_of(loaded), logits_of(AutoModelForCausalLM.from_pretrained(out)))
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-5, atol=1e-5)


def test_layer_by_layer_is_the_whole_model(base: Path) -> None:
    documents = np.repeat([0, 1, 2, -1], 6).astype(np.int32)
    block = Block(np.arange(3, 27, dtype=np.int32), np.ones(24, np.bool_), documents)
    for dtype in (torch.float32, torch.bfloat16):
        whole = probe_logits(load_base(base, dtype), block, torch.device("cpu"))
        assert torch.equal(
            StreamedModel(base, dtype, torch.device("cpu")).probe_logits(block)[0], whole
        )


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_training_left_has_to_be_what_it_trained(
    tmp_path: Path, tiny: Path, method: Any
) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.float32)
    train = Train(method=method, precision="fp32")
    model: nn.Module = load_base(base, torch.float32)
    if method == "lora":
        model = add_adapters(load_base(base, torch.float32), train.lora, seed=0)
    tensors = {name: parameter.detach() for name, parameter in trainable(model).items()}
    *_, other, name = tensors
    left = {**tensors, "stray": torch.zeros(3), other: torch.zeros(3)}
    del left[name]
    save_tensors(tmp_path / "trained" / "weights", left)
    with pytest.raises(IntegrityError) as failure:
        plan_fold(base, tmp_path / "trained", train)
    for problem in (
        f"lacks {name}",
        "holds stray, which is not trained",
        f"holds {other} as [3] instead of",
    ):
        assert problem in str(failure.value)


def test_a_trained_tensor_that_belongs_to_none_of_the_base_is_refused(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the model had a parameter that its tensors' list omits: its training would be lost."""
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.float32)
    stray = {"model.layers.0.stray.weight": nn.Parameter(torch.zeros(3))}
    model = load_base(base, torch.float32)
    tensors = {
        name: parameter.detach() for name, parameter in {**trainable(model), **stray}.items()
    }
    save_tensors(tmp_path / "trained" / "weights", tensors)
    monkeypatch.setattr(
        "pipeline_lib.export.fold.trainable", lambda model: {**trainable(model), **stray}
    )
    with pytest.raises(
        IntegrityError, match="layers.0.stray.weight belongs to no tensor of the base model"
    ):
        plan_fold(base, tmp_path / "trained", Train(precision="fp32"))


def test_a_base_without_a_tensor_is_refused(tmp_path: Path, tiny: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.float32, size="1GB")
    train_a_little(load_base(base, torch.float32), tmp_path / "trained")
    tensors = load_file(base / "model.safetensors")
    del tensors[DOWN]
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=f"lacks {DOWN}"):
        plan_fold(base, tmp_path / "trained", Train(precision="fp32"))
    with pytest.raises(DataError, match=DOWN):
        load_base(base, torch.float32)


@pytest.mark.parametrize(
    "value", [float("nan"), 3.4e38], ids=["not a number", "too large for bf16"]
)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, tiny: Path, value: float) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.bfloat16)
    model = load_base(base, torch.float32)
    with torch.no_grad():
        model.get_parameter(DOWN)[0, 0] = value
    save_tensors(
        tmp_path / "trained" / "weights", {name: p.detach() for name, p in trainable(model).items()}
    )
    with pytest.raises(TrainingError, match=f"{DOWN} is not finite"):
        merge(base, tmp_path, Train(precision="fp32"))


def test_the_precision_that_is_asked_for_is_written_and_named(tmp_path: Path, tiny: Path) -> None:
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.bfloat16)
    write_json(base / "config.json", {**read_json(base / "config.json"), "torch_dtype": "bfloat16"})
    train_a_little(load_base(base, torch.float32), tmp_path / "trained")
    out = merge(base, tmp_path, Train(precision="fp32"), torch.float32)
    config = read_json(out / "config.json")
    assert config["dtype"] == "float32" and "torch_dtype" not in config
    assert {
        tensor.dtype for tensors in tensors_of(out).values() for tensor in tensors.values()
    } == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe"])
def test_a_text_model_in_a_whole_one_loads_in_the_precision_that_is_written(
    tmp_path: Path, tiny: Path, kind: str
) -> None:
    """By the line of the README, which names no dtype."""
    base = write_base(tmp_path / "base", kind, tiny, torch.bfloat16)
    config = read_json(base / "config.json")
    write_json(
        base / "config.json",
        {**config, "text_config": {**config["text_config"], "dtype": "bfloat16"}},
    )
    model = load_base(base, torch.float32)
    train_a_little(model, tmp_path / "trained")
    out = merge(base, tmp_path, Train(precision="fp32"), torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-4)


BLOCK = Block(
    np.arange(3, 27, dtype=np.int32), np.ones(24, np.bool_), np.repeat([0, 1], 12).astype(np.int32)
)


def leave_training(model: nn.Module, trained: Path) -> None:
    """What a training stage leaves for the merge."""
    train_a_little(model, trained)
    save_probe(trained, BLOCK, probe_logits(model, BLOCK, torch.device("cpu")))
    write_json(trained / "summary.json", training_json(steps=3, supervised_tokens=99))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_stage_publishes_only_what_answers_as_the_trained_model_did(
    tmp_path: Path, tiny: Path, method: Any
) -> None:
    base = write_base(tmp_path / "base", "moe", tiny, torch.float32)
    train = Train(method=method, precision="fp32", lora=LORAS["dora"])
    model: Any = load_base(base, torch.float32)
    trained = tmp_path / "trained"
    leave_training(model if method == "full" else add_adapters(model, train.lora, seed=0), trained)
    job = stage_job(base, trained, train, tmp_path / "out")
    assert run(job)["relative_difference"] < 1e-5
    assert (job.out / "adapter" / "adapter_model.safetensors").exists() == (method == "lora")
    assert "qwen3_moe" in (job.out / "README.md").read_text()
    assert "<|im_end|>" in AutoTokenizer.from_pretrained(job.out).decode(
        read_json(job.out / "generation_config.json")["eos_token_id"][:1]
    )
    save_probe(
        trained, BLOCK, probe_logits(load_base(base, torch.float32), BLOCK, torch.device("cpu"))
    )
    again = stage_job(base, trained, train, tmp_path / "again")
    with pytest.raises(TrainingError, match="is not the trained one") as failure:
        run(again)
    kept = again.run_dir / "refused"
    assert f"the refused model is in {kept}" in str(failure.value)
    assert (kept / "config.json").exists() and not again.out.exists()


@pytest.fixture
def trained_base(tmp_path: Path, tiny: Path) -> Path:
    """A base model beside what a training of all its weights left."""
    base = write_base(tmp_path / "base", "qwen3-tied", tiny, torch.float32)
    leave_training(load_base(base, torch.float32), tmp_path / "trained")
    return base


def test_the_generation_config_of_a_local_model_comes_by_itself(
    tmp_path: Path, trained_base: Path
) -> None:
    config = tmp_path / "generation" / "generation_config.json"
    write_json(config, {"compile_config": 5})
    job = stage_job(trained_base, tmp_path / "trained", Train(precision="fp32"), tmp_path / "out")
    sealed = Sealed(config.parent, Manifest(stage="download", digest="0", spec={}, files={}))
    job = replace(job, inputs={**job.inputs, "generation": sealed})
    with pytest.raises(
        DataError, match=r"; mend it in the model's folder and run snakemake again$"
    ):
        run(job)  # no file in the store is to be edited
    write_json(config, {"eos_token_id": 1, "top_k": 7})
    run(job)
    published = read_json(job.out / "generation_config.json")
    assert published["top_k"] == 7
    assert published["eos_token_id"][-1] == 1


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', "{", '{"early_stopping": "often"}'])
def test_a_bad_generation_config_is_an_error_before_anything_is_merged(
    tmp_path: Path, trained_base: Path, content: str
) -> None:
    (trained_base / "generation_config.json").write_text(content)
    job = stage_job(trained_base, tmp_path / "trained", Train(precision="fp32"), tmp_path / "out")
    with pytest.raises(DataError, match=r"base/generation_config\.json: "):
        run(job)
    assert not list(job.out.iterdir())


def test_code_of_the_base_model_is_named_nowhere(tmp_path: Path, trained_base: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        content = read_json(trained_base / name)
        write_json(trained_base / name, {**content, "auto_map": {"AutoModel": "modeling_own.Own"}})
    job = stage_job(trained_base, tmp_path / "trained", Train(precision="fp32"), tmp_path / "out")
    said: list[str] = []
    run(replace(job, say=said.append))
    assert not any("auto_map" in path.read_text() for path in job.out.glob("*.json"))
    assert [line for line in said if "own code (auto_map)" in line]


def test_how_the_base_was_stored_is_not_said_of_the_merged_model(
    tmp_path: Path, trained_base: Path
) -> None:
    """Of trainings that were made before such a base was refused."""
    config = read_json(trained_base / "config.json")
    gptq = {"quant_method": "gptq", "bits": 4}
    write_json(
        trained_base / "config.json",
        {**config, "quantization_config": gptq, "quantization": {"bits": 4}},
    )
    job = stage_job(trained_base, tmp_path / "trained", Train(precision="fp32"), tmp_path / "out")
    run(job)
    assert read_json(job.out / "config.json").keys() == config.keys() | {"use_cache"}
    AutoModelForCausalLM.from_pretrained(job.out)


def stage_job(base: Path, trained: Path, train: Train, out: Path) -> Job:
    """A merge of what lies in those folders, as the harness would have it."""
    out.mkdir()
    specs = {
        "model": Spec("download", 1, {"kind": "model", "source": "tiny"}, {}),
        "train": Spec("train", 1, settings_of(train, PLACEMENT_KEYS), {}),
    }
    inputs = {
        name: Sealed(
            path,
            Manifest(stage=specs[name].stage, digest="0", spec=specs[name].to_json(), files={}),
        )
        for name, path in (("model", base), ("train", trained))
    }
    spec = Spec("merge", 1, {}, {name: each.ref for name, each in specs.items()})
    return Job(spec, Store(out.parent), inputs, out, lambda _: None, hold(out.parent / "lock"))
