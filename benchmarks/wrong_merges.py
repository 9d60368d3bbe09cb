"""Subtly wrong merges that an export's proof must refuse: benchmarks.merges counts them.

Tests try them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.export.fold import Fold, TensorRecipe

# Wrong plans: each takes the right one, and returns None if the model has nothing of the kind.

Plan = Callable[[Fold], Fold | None]


def alpha_off(fold: Fold) -> Fold | None:
    """Adapters are scaled by 1 % too much."""
    if not any(recipe.adapter for recipe in fold.recipes.values()):
        return None
    return replace(fold, lora=fold.lora.model_copy(update={"alpha": fold.lora.alpha * 1.01}))


def one_layer_off(fold: Fold) -> Fold | None:
    """Layer 0 gets what was trained of layer 1."""
    return _renamed(
        fold, lambda recipe: ".layers.0." in recipe.stored.name, "layers.0.", "layers.1."
    )


def wrong_projection(fold: Fold) -> Fold | None:
    """The values' projection of layer 0 gets what was trained of the keys'."""
    return _renamed(
        fold, lambda recipe: ".layers.0.self_attn.v_proj" in recipe.stored.name, "v_proj", "k_proj"
    )


def untrained(fold: Fold) -> Fold | None:
    """A trained matrix stays the base's."""
    trained = [
        name
        for name, one in fold.recipes.items()
        if (one.trained or one.adapter) and name.endswith("_proj.weight")
    ]
    if not trained:
        return None
    name = max(trained)
    return replace(
        fold,
        recipes={**fold.recipes, name: replace(fold.recipes[name], trained=None, adapter=None)},
    )


def _renamed(
    fold: Fold, is_meant: Callable[[TensorRecipe], bool], old: str, new: str
) -> Fold | None:
    changed = dict(fold.recipes)
    for name, recipe in fold.recipes.items():
        trained, adapter = (
            text.replace(old, new) if text is not None else None
            for text in (recipe.trained, recipe.adapter)
        )
        other = {text for one in fold.recipes.values() for text in (one.trained, one.adapter)}
        if is_meant(recipe) and {trained, adapter} <= other | {None}:
            changed[name] = replace(recipe, trained=trained, adapter=adapter)
    return None if changed == fold.recipes else replace(fold, recipes=changed)


PLANS: Mapping[str, Plan] = {
    "alpha off by 1 %": alpha_off,
    "one layer off": one_layer_off,
    "wrong projection": wrong_projection,
    "untrained matrix": untrained,
}

# Wrong files: each changes an exported folder, and returns whether the model has anything of the
# kind.

Damage = Callable[[Path], bool]


def layers_swapped(folder: Path) -> bool:
    """Swap the attention of two layers."""
    return _swap(folder, "layers.0.self_attn.", "layers.1.self_attn.")


def experts_swapped(folder: Path) -> bool:
    """Swap two experts of a layer."""
    tensors = _tensors(folder)
    fused = [name for name in tensors if name.endswith("experts.gate_up_proj")]
    if fused:
        return _change(folder, fused[0], lambda tensor: tensor[[1, 0, *range(2, len(tensor))]])
    layer = next(
        (name.partition(".experts.")[0] for name in tensors if ".experts.0." in name), None
    )
    return layer is not None and _swap(folder, f"{layer}.experts.0.", f"{layer}.experts.1.")


def transposed(folder: Path) -> bool:
    """Transpose a square matrix."""
    squares = [
        name
        for name, tensor in _tensors(folder).items()
        if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]
    ]
    return bool(squares) and _change(folder, squares[0], lambda tensor: tensor.T.contiguous())


def one_value_off(folder: Path) -> bool:
    """Change one value of a matrix by 2 %."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[0, tensor[0].abs().argmax()] *= 1.02
        return changed

    name = max(name for name in _tensors(folder) if name.endswith("_proj.weight"))
    return _change(folder, name, change)


def tie_lost(folder: Path) -> bool:
    """Say the opposite of how the head and the embedding are tied."""
    return _configure(
        folder,
        lambda config: config | {"tie_word_embeddings": not config.get("tie_word_embeddings")},
    )


def other_rope(folder: Path) -> bool:
    """Turn positions by another base frequency."""

    def change(config: dict[str, Any]) -> dict[str, Any]:
        rope = config.get("rope_parameters") or {"rope_type": "default"}
        return config | {"rope_parameters": {**rope, "rope_theta": 2 * rope.get("rope_theta", 1e4)}}

    return _configure(folder, change)


FILES: Mapping[str, Damage] = {
    "two layers swapped": layers_swapped,
    "two experts swapped": experts_swapped,
    "transposed matrix": transposed,
    "one value off by 2 %": one_value_off,
    "tie lost": tie_lost,
    "other rope_theta": other_rope,
}


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _change(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> bool:
    return _write(folder, {name: change(_tensors(folder)[name])})


def _swap(folder: Path, first: str, second: str) -> bool:
    tensors = _tensors(folder)
    pairs = [(name, name.replace(first, second)) for name in tensors if first in name]
    changed = {}
    for one, other in pairs:
        if other in tensors and tensors[other].shape == tensors[one].shape:
            changed[one], changed[other] = tensors[other], tensors[one]
    return bool(changed) and _write(folder, changed)


def _write(folder: Path, changed: Mapping[str, Tensor]) -> bool:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        here = {name: tensor.clone() for name, tensor in changed.items() if name in tensors}
        if here:
            save_file({**tensors, **here}, path, {"format": "pt"})
    return True


def _configure(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    config = read_json(folder / "config.json")
    changed = change(config)
    if "text_config" in config:
        changed = {**changed, "text_config": change(config["text_config"])}
    write_json(folder / "config.json", changed)
    return True
