"""What peft's adapter_config.json says of adapters, compared with what a training takes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import ADAPTER_CONFIG
from pipeline_lib.config.train import Lora
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json

# peft's keys, by the keys of `train.lora` that have to say the same. The targets show in the
# tensors themselves.
_KEYS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
# What adapters may have that are not trained here, by peft's key, with the value of those without.
_PLAIN: dict[str, Any] = {
    "modules_to_save": None,
    "trainable_token_indices": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
}


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the adapter_config.json in `folder`. Raises DataError if it is no JSON object."""
    path = folder / ADAPTER_CONFIG
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: does not read as a JSON object ({error})") from error


def unusable(config: Mapping[str, Any], base: str | None) -> Iterator[str]:
    """Yield why adapters with this `config` cannot be trained on, on a `base` of a hub, if named."""
    kind = config.get("peft_type")
    if kind != "LORA":
        yield f"peft_type is {kind!r}; only LORA adapters are trained here"
    for key, plain in _PLAIN.items():
        value = config.get(key, plain)
        if (value or plain) != plain:
            yield f"{key} is {value!r}, which is not trained here; merge it with peft first"
    trained_on = config.get("base_model_name_or_path")
    if base is not None and isinstance(trained_on, str) and _is_other(trained_on, base):
        yield (
            f"they were trained on {trained_on}, and model.name is {base}; adapters are for the "
            "weights that they were trained on, so name that model"
        )


def _is_other(trained_on: str, base: str) -> bool:
    """Return whether the name `trained_on` is that of another hub model than `base`.

    A path of the machine that they were trained on says nothing.
    """
    is_name = trained_on.count("/") == 1 and not trained_on.startswith((".", "/", "~"))
    return is_name and trained_on.lower() != base.lower()


def differences(config: Mapping[str, Any], lora: Lora) -> Iterator[tuple[str, Any]]:
    """Yield the keys of `lora` that differ from adapters with this `config`, with their value."""
    defaults = {"use_rslora": False, "use_dora": False}
    for key, name in _KEYS.items():
        value = config.get(name, defaults.get(name))
        if value != getattr(lora, key):
            yield key, value


def refuse_unusable_adapters(folder: Path, base: str | None) -> None:
    """Raise DataError if the adapters in `folder` cannot be trained on, on `base`."""
    problems = list(unusable(read_adapter_config(folder), base))
    if problems:
        lines = [f"  - {problem}" for problem in problems]
        raise DataError("\n".join(["these adapters cannot be trained on:", *lines]))


def refuse_other_adapters(folder: Path, lora: Lora) -> None:
    """Raise DataError if the adapters in `folder` are others than those that `lora` describes."""
    for key, value in differences(read_adapter_config(folder), lora):
        raise DataError(
            f"train.lora.{key}: {getattr(lora, key)}, and the adapters that are trained on have "
            f"{value}; write that"
        )
