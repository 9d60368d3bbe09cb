"""Which files of a data set are a subset's split: decided by `datasets` itself, from names and the README alone.

It sees a folder of empty files with the repository's names beside the real README.md. It reads no rows, runs no
code of the data set and asks no network: a README whose patterns lead elsewhere is refused before.
"""

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipeline_lib.base.errors import DataError
from pipeline_lib.hub.snapshot import Snapshot

README = "README.md"


def files_of_split(snapshot: Snapshot, names: Collection[str], subset: str | None, split: str) -> list[str]:
    """Those of the data files `names` that are `split` of `subset`, or of the default subset.

    Raises DataError that lists what there is, HubError.
    """
    with tempfile.TemporaryDirectory() as skeleton:
        folder = Path(skeleton).resolve() / "data"  # every data set looks alike from its folder's name
        for file in snapshot.check(names):
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if README in snapshot.files:
            snapshot.fetch([README], folder, lambda here, total: None)
            _check_patterns(snapshot, folder / README)
        return _resolve(snapshot, folder, subset, split)


def _resolve(snapshot: Snapshot, folder: Path, subset: str | None, split: str) -> list[str]:
    import datasets  # type: ignore[import-untyped]  # takes seconds

    try:
        subsets = datasets.get_dataset_config_names(str(folder))
        if subset is None and datasets.get_dataset_default_config_name(str(folder)) is None:
            raise DataError(f"{snapshot}: it has several subsets; give `subset` one of {', '.join(subsets)}")
        if subset is not None and subset not in subsets:
            raise DataError(f"{snapshot}: it has no subset {subset!r}; give `subset` one of {', '.join(subsets)}")
        builder = datasets.load_dataset_builder(str(folder), name=subset, cache_dir=str(folder.parent / "cache"))
        splits: Any = builder.config.data_files or {}
    except (ValueError, TypeError, KeyError, AttributeError, OSError, yaml.YAMLError) as error:
        reason = (str(error).replace(f"{folder}", "the data set").splitlines() or [""])[0]
        raise DataError(
            f"{snapshot}: `datasets` cannot tell its splits ({type(error).__name__}: {reason}); give `files`"
        ) from error
    if split not in splits:
        there = ", ".join(map(str, splits)) or "none"
        raise DataError(f"{snapshot}: it has no split {split!r}; give `split` one of these: {there}")
    return sorted(Path(path).relative_to(folder).as_posix() for path in splits[split])


def _check_patterns(snapshot: Snapshot, readme: Path) -> None:
    """Refuse patterns that lead out of the repository: to other folders of this machine, or to addresses."""
    from huggingface_hub import metadata_load

    try:
        metadata: Any = metadata_load(readme) or {}
        patterns = list(_texts([entry.get("data_files") for entry in metadata.get("configs") or []]))
        patterns += _texts([entry.get("data_dir") for entry in metadata.get("configs") or []])
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, yaml.YAMLError) as error:
        raise DataError(
            f"{snapshot}: the metadata in its {README} cannot be read ({type(error).__name__}); give `files`"
        ) from error
    for pattern in patterns:
        if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~")) or ".." in pattern.split("/"):
            raise DataError(f"{snapshot}: refused: its {README} names {pattern!r}, outside of it; give `files`")


def _texts(value: Any) -> Iterator[str]:
    """Every text within nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
