"""Models to load, loading as a rank does it, and what that takes of the host's memory."""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.strategies import make_strategy

M_MMAP_THRESHOLD = -3  # of malloc.h: blocks from this size on are pages of their own
SIZES: dict[str, Any] = {
    "vocab_size": 67,  # odd, so that ranks have parts of different sizes
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def write_dense(folder: Path, tied: bool, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """A small Qwen3."""
    return write_random(
        folder, Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied)), dtype, **save
    )


def multimodal(sizes: dict[str, Any], has_experts: bool = False) -> PreTrainedModel:
    """A small Qwen3.5 with a picture model; every layer is recurrent but each second one."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts["shared_expert_intermediate_size"] = 12
    linear: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    kinds = ["linear_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    kind, model = (
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
        if has_experts
        else (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    )
    config: Any = kind(
        text_config={
            **(experts if has_experts else {}),
            **{**linear, **sizes, "layer_types": kinds, "tie_word_embeddings": True},
            "rope_parameters": {**rope, "mrope_section": [1, 1, 0]},
        },
        vision_config={
            **{
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "num_position_embeddings": 4,
            },
            **{"out_hidden_size": sizes["hidden_size"]},
        },
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
        tie_word_embeddings=True,
    )
    built: PreTrainedModel = model(config)
    return built


def write_multimodal(
    folder: Path, dtype: torch.dtype = torch.float32, has_experts: bool = False, **save: Any
) -> Path:
    """A small Qwen3.5 as repositories have it, with random values everywhere."""
    write_random(folder, multimodal(SIZES, has_experts), dtype, **save)
    add_other_parts(folder, dtype)
    return folder


def add_other_parts(folder: Path, dtype: torch.dtype) -> None:
    """Add a multi-token head and a file of pictures to the model of both in `folder`.

    The model is one of pictures and text.
    """
    (folder / "preprocessor_config.json").write_text('{"patch_size": 16}')
    *_, last = sorted(folder.glob("*.safetensors"))
    several = {
        "mtp.fc.weight": torch.randn(32, 64).to(dtype),
        "mtp.norm.weight": torch.randn(32).to(dtype),
    }
    save_file({**load_file(last), **several}, last, {"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        content = read_json(index)
        content["weight_map"] |= dict.fromkeys(several, last.name)
        write_json(index, content)


def write_large(folder: Path, layers: int) -> int:
    """A Qwen3 of 5 M parameters a layer, stored in bf16; how many it has."""
    sizes = {
        **SIZES,
        "vocab_size": 2000,
        "hidden_size": 640,
        "intermediate_size": 2560,
        "num_hidden_layers": layers,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    write_random(folder, model, torch.bfloat16)
    return sum(parameter.numel() for parameter in model.parameters())


def write_random(folder: Path, model: PreTrainedModel, dtype: torch.dtype, **save: Any) -> Path:
    """Save `model` with random values everywhere, norms too, in `dtype`."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.to(dtype).save_pretrained(folder, **save)  # type: ignore[arg-type]
    return folder


def spread(
    folder: Path, world: World, train: Train, strategy: str, adapter: Path | None = None
) -> tuple[nn.Module, nn.Module]:
    """The model in `folder`, loaded and spread as a rank does it, and the module to call.

    Its adapters are those of the file `adapter`, or new ones.
    """
    model = build_trainable(folder, train)
    wrapped = make_strategy(world, train.model_copy(update={"strategy": strategy}), 1).spread(
        model, lambda empty: load_weights(empty, folder, world.device, train.seed, adapter)
    )
    return model, wrapped


def grown_bytes(
    environ: Mapping[str, str], folder: Path, train: Train, strategy: str, device: str
) -> int:
    """By how much the peak host memory of this process grew while it loaded `folder`/large."""
    world = World.from_env(environ, device)
    with process_group(world, 60):

        def load(size: str) -> None:
            model, _ = spread(folder / size, world, train, strategy)
            assert not any(parameter.is_meta for parameter in model.parameters())

        return grown_during(partial(load, "small"), partial(load, "large"))


def grown_during(first: Callable[[], object], measured: Callable[[], object]) -> int:
    """By how much the most memory that this process ever held grew in `measured`, in bytes.

    `first` has the imports and the libraries' own memory behind it. Memory that is freed goes back
    to the system at once: what glibc would keep of it depends on which thread frees first, 17 MB in
    one run and none in the next.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    first()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far becomes what it is now
    before = memory_bytes("VmHWM")
    measured()
    return memory_bytes("VmHWM") - before


def memory_bytes(field: str) -> int:
    """A figure of /proc/self/status; it counts the pages of mapped files too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
