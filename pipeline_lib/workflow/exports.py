"""What is said before a run of what `export` asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline_lib.arch import fp8, gguf
from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.exports import FP8, Q4_K_M
from pipeline_lib.config.findings import Finding
from pipeline_lib.config.schema import Config, LocalModel
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.known import find_geometry

# What yields why a model is not exported, by its sizes or by its config.json.
OfSizes = Callable[[Geometry], Iterator[str]]
OfConfig = Callable[[Mapping[str, Any]], Iterator[str]]


def on_export(config: Config, store: Store) -> Iterator[Finding]:
    """Yield a refusal for each format that has no place for what the config's model is made of."""
    files = [kind for kind in config.export if kind != FP8]
    if files:
        unnamed = _found(config, store, gguf.unnamed_in, gguf.unnamed_in_config)
        why = "GGUF, as llama.cpp reads it, has no names for {} of this model"
        yield from _refusal(why, unnamed, files)
    if Q4_K_M in config.export and find_spec("llama_cpp") is None:
        yield Finding("refusal", "export", f"{Q4_K_M} {gguf.LACKING_QUANTIZER}")
    if FP8 in config.export:
        unfit = _found(config, store, fp8.unfit_in, fp8.unfit_in_config)
        yield from _refusal("this model is not exported in FP8: it has {}", unfit, [FP8])


def _refusal(why: str, found: list[str], kinds: Sequence[str]) -> Iterator[Finding]:
    if found:
        problem = f"{why.format('; '.join(found))}; remove {', '.join(kinds)}"
        yield Finding("refusal", "export", problem)


def _found(config: Config, store: Store, of_sizes: OfSizes, of_config: OfConfig) -> list[str]:
    """Return why the model is not exported, as far as it is known."""
    model = config.root.model
    try:
        if isinstance(model, LocalModel):
            path = Path(model.path) / "config.json"
            return list(of_config(read_object(path))) if path.is_file() else []
        geometry = find_geometry(config, store)
        return [] if geometry is None else list(of_sizes(geometry))
    except (DataError, OSError):  # named where the model is looked at
        return []
