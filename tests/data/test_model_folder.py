"""What is wrong with a model folder is found before anything is computed with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline_lib.arch.generation_config import read_generation_config, take_generation_config
from pipeline_lib.arch.not_finite import refuse_not_finite
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.model_folder import problems_of

Damage = Callable[[Path], object]
NORM = "model.norm.weight"


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A model that is as it should be, to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit(name: str, **values: Any) -> Damage:
    """Set keys of a JSON file."""
    return lambda folder: (folder / name).write_text(
        json.dumps({**json.loads((folder / name).read_text()), **values})
    )


def replace(name: str, text: str) -> Damage:
    """Put `text` in the place of a file's content."""
    return lambda folder: (folder / name).write_text(text)


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    """Change the tensors of the one weights file."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def shift_offsets(folder: Path) -> None:
    """A hole between two tensors, in a file as long as it says."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    last = max(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"],
    )
    header[last]["data_offsets"] = [each + 4 for each in header[last]["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :] + b"\0" * 4)


WRONG: dict[str, tuple[Damage, str]] = {
    "generation: an id in words": (
        edit("generation_config.json", eos_token_id="x"),
        "generation_config.json: eos_token_id: 'x' is not a token id, or a list of them",
    ),
    "generation: no id in a list": (
        edit("generation_config.json", eos_token_id=[0, 0.5]),
        "eos_token_id: [0, 0.5] is",
    ),
    "generation: no JSON": (
        replace("generation_config.json", "{"),
        "generation_config.json: does not read as JSON",
    ),
    "generation: a list": (
        replace("generation_config.json", "[]"),
        "generation_config.json: holds no JSON object",
    ),
    "generation: NaN": (
        replace("generation_config.json", '{"temperature": NaN}'),
        "generation_config.json: temperature: nan is no finite number",
    ),
    "generation: text": (
        edit("generation_config.json", top_p="0.9"),
        "top_p: '0.9' is not a number",
    ),
    "config: infinite": (
        edit("config.json", initializer_range=float("inf")),
        "config.json: initializer_range: inf",
    ),
    "config: padding outside": (
        edit("config.json", pad_token_id=10**6),
        "config.json: pad_token_id: 1000000 is not",
    ),
    "config: nested": (replace("config.json", "[" * 100_000), "config.json: does not read as JSON"),
    "config: quantized": (
        edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "config.json: its weights are quantized (quantization_config)",
    ),
    "config: quantized by mlx": (
        edit("config.json", quantization={"bits": 4, "group_size": 64}),
        "config.json: its weights are quantized (quantization)",
    ),
    "config: a part is quantized": (
        edit(
            "config.json",
            text_config={"quantization_config": {"quant_method": "compressed-tensors"}},
        ),
        "config.json: its weights are quantized (text_config.quantization_config)",
    ),
    "vocabulary": (edit("config.json", vocab_size=100), "config.json says vocab_size 100"),
    "tokenizer": (replace("tokenizer.json", "{}"), "tokenizer.json: not a tokenizer"),
    "tokenizer config": (
        replace("tokenizer_config.json", "[" * 100_000),
        "tokenizer_config.json: cannot read",
    ),
    "template": (replace("chat_template.jinja", "{% for"), "not a chat template that can be used"),
    "a hole": (shift_offsets, "model.safetensors: cannot be read as safetensors"),
    "no header": (
        replace("model.safetensors", "weights"),
        "model.safetensors: cannot be read as safetensors",
    ),
    "lacking": (weights(lambda tensors: tensors.__delitem__(NORM)), f"it lacks {NORM}"),
    "besides": (
        weights(lambda tensors: tensors.update(more=torch.zeros(1))),
        "it holds besides more",
    ),
    "shape": (
        weights(lambda tensors: tensors.update({NORM: torch.zeros(3)})),
        f"{NORM} [3] instead of [32]",
    ),
    "kind": (
        weights(lambda tensors: tensors.update({NORM: torch.ones(32).double()})),
        f"{NORM} is stored as F64",
    ),
}


def test_nothing_is_wrong_with_a_model_as_it_should_be(tiny: Path) -> None:
    assert problems_of(tiny) == []
    refuse_not_finite(tiny)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_its_file(folder: Path, name: str) -> None:
    damage, said = WRONG[name]
    damage(folder)
    problems = problems_of(folder)
    assert any(said in problem for problem in problems), problems
    assert all(str(folder) in problem for problem in problems)


def test_all_that_is_wrong_is_told_at_once(folder: Path) -> None:
    for name in ("generation: an id in words", "template", "besides", "kind"):
        WRONG[name][0](folder)
    assert len(problems_of(folder)) == 4


def test_several_files_are_checked_with_their_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {name: tensors.pop(name) for name in list(tensors)[:3]}
    for name, part in (("a.safetensors", first), ("b.safetensors", tensors)):
        save_file(part, folder / name)
    index = folder / "model.safetensors.index.json"
    weight_map = {
        **dict.fromkeys(first, "a.safetensors"),
        **dict.fromkeys(tensors, "b.safetensors"),
    }
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert problems_of(folder) == []
    (folder / "a.safetensors").write_bytes(b"")
    (folder / "b.safetensors").unlink()
    assert [problem.partition(": ")[0] for problem in problems_of(folder)] == [
        str(folder / "a.safetensors"),
        str(folder / "b.safetensors"),
    ]
    index.write_text("[" * 100_000)
    assert "not an index of safetensors files" in problems_of(folder)[0]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float32, float("nan")), (torch.bfloat16, float("inf")), (torch.float16, float("-inf"))],
)
def test_weights_that_are_not_finite_are_named(
    folder: Path, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)
        tensors[NORM][-1] = torch.finfo(dtype).max
        tensors["model.layers.0.input_layernorm.weight"][7] = value

    weights(spoil)(folder)
    with pytest.raises(
        DataError, match=r"input_layernorm\.weight: holds values that are not finite"
    ):
        refuse_not_finite(folder)


OFTEN_FOUND = {
    "bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 1], "pad_token_id": 1, "repetition_penalty": 1.05,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0", "max_length": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        OFTEN_FOUND,
        {"top_k": -1},
        {"max_length": 20.0, "bos_token_id": [1], "pad_token_id": 512},
        {"do_sample": "yes"},
    ],
)
def test_what_transformers_takes_is_taken(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "generation_config.json"
    path.write_text("{")
    assert problems_of(folder)
    path.write_text(json.dumps(config))
    assert problems_of(folder) == []  # a mended file is read again
    assert take_generation_config(folder) == config
    path.unlink()
    assert take_generation_config(folder) == {}


@pytest.mark.parametrize(
    "config",
    [
        {"cache_implementation": "nope"}, {"compile_config": 5}, {"max_new_tokens": 0}, {"pad_token_id": [1]},
    ],
)  # fmt: skip
def test_what_transformers_does_not_take_is_refused(folder: Path, config: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert read_generation_config(folder) == config
    with pytest.raises(DataError, match=r"generation_config\.json: transformers does not take it"):
        take_generation_config(folder)
