"""What is said before a run of the files that `export` asks for."""

from collections.abc import Iterator
from pathlib import Path

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.gguf import unnamed_in, unnamed_in_config
from pipeline_lib.config.findings import Finding
from pipeline_lib.config.schema import Config, LocalModel
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.known import find_geometry


def on_export(config: Config, store: Store) -> Iterator[Finding]:
    """Yield a refusal if GGUF has no names for what the config's model is made of."""
    if not config.export:
        return
    try:
        unnamed = list(_unnamed(config, store))
    except (DataError, OSError):  # named where the model is looked at
        return
    if unnamed:
        problem = (
            f"GGUF, as llama.cpp reads it, has no names for {'; '.join(unnamed)} of this model; "
            f"remove {', '.join(config.export)}"
        )
        yield Finding("refusal", "export", problem)


def _unnamed(config: Config, store: Store) -> Iterator[str]:
    model = config.root.model
    if isinstance(model, LocalModel):
        path = Path(model.path) / "config.json"
        if path.is_file():
            yield from unnamed_in_config(read_object(path))
        return
    geometry = find_geometry(config, store)
    if geometry is not None:
        yield from unnamed_in(geometry)
