"""The data files of a subset's split, as `datasets` itself resolves them from names and metadata.

`datasets` sees a folder of empty files with the repository's names beside its real metadata files.
It reads no rows, runs no code of the data set and needs no network. The metadata is checked first:
its size, the size of unfolded YAML aliases, and patterns that lead elsewhere. It runs in its own
process, because matching a pattern may never end.
"""

import multiprocessing
import resource
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import shortened
from pipeline_lib.hub.names import some_of
from pipeline_lib.hub.snapshot import Snapshot

README = "README.md"
METADATA_FILES = (README, ".huggingface.yaml")
# `datasets` reads these as descriptions, not as rows, and could not parse empty ones.
NO_ROWS = frozenset(
    {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
)
MAX_METADATA_BYTES = 1_000_000
MAX_METADATA_VALUES = 200_000
MAX_NUMBER_CHARS = 100  # parsing a base-60 number takes time quadratic in its length
RESOLVE_S = 90
# Spawned, not forked: the parent may have threads.
_CONTEXT = multiprocessing.get_context("spawn")


def is_aside(name: str) -> bool:
    """Return whether the file `name` describes rows or is a cache of `datasets`, by its name."""
    last = name.rpartition("/")[2]
    return last in NO_ROWS or (last.startswith("cache-") and last.endswith(".arrow"))


def files_of_split(
    snapshot: Snapshot, names: Collection[str], subset: str | None, split: str
) -> list[str]:
    """Return those of the data files `names` that are in `split` of `subset` or the default subset.

    Raises DataError, listing the choices, if there is no such split or subset, and if files would
    be left out although the metadata names none; HubError.
    """
    with tempfile.TemporaryDirectory() as skeleton:
        folder = Path(skeleton).resolve() / "data"  # the same folder name for every data set
        for file in snapshot.check(names):
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        # A list, not a generator: every metadata file has to be fetched.
        are_named = any([_fetch_metadata(snapshot, name, folder) for name in METADATA_FILES])
        with _CONTEXT.Pool(1, _limit_time) as pool:
            try:
                splits = pool.apply_async(_resolve, (str(snapshot), folder, subset)).get(RESOLVE_S)
            except multiprocessing.TimeoutError as error:
                raise DataError(
                    f"{snapshot}: `datasets` cannot tell its splits within {RESOLVE_S} s; give "
                    "`files`"
                ) from error
    if split not in splits:
        raise DataError(
            f"{snapshot}: it has no split {split!r}; give `split` one of these: "
            f"{some_of(list(splits))}"
        )
    left_out = sorted(set(names).difference(*splits.values()))
    if left_out and not are_named:
        raise DataError(
            f"{snapshot}: `datasets` puts {some_of(left_out)} into no split (it takes files of one "
            "kind, and by their names); name all files that you want in `files`"
        )
    return splits[split]


def _limit_time() -> None:
    """Limit the process's CPU time, so that it ends even if its parent was killed."""
    resource.setrlimit(resource.RLIMIT_CPU, (2 * RESOLVE_S, 2 * RESOLVE_S))


def _resolve(title: str, folder: Path, subset: str | None) -> dict[str, list[str]]:
    """Return the sorted files of each split of `subset`; an empty dict if there are no splits."""
    import datasets  # type: ignore[import-untyped]  # takes seconds

    try:
        subsets = datasets.get_dataset_config_names(str(folder))
        if subset is None and datasets.get_dataset_default_config_name(str(folder)) is None:
            raise DataError(
                f"{title}: it has several subsets; give `subset` one of {', '.join(subsets)}"
            )
        if subset is not None and subset not in subsets:
            raise DataError(
                f"{title}: it has no subset {subset!r}; give `subset` one of {', '.join(subsets)}"
            )
        builder = datasets.load_dataset_builder(
            str(folder), name=subset, cache_dir=str(folder.parent / "cache")
        )
        splits: Any = builder.config.data_files or {}
        return {
            str(split): sorted(Path(path).relative_to(folder).as_posix() for path in paths)
            for split, paths in splits.items()
        }
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OSError,
        RuntimeError,
        yaml.YAMLError,
    ) as error:
        reason = shortened(
            (str(error).replace(f"{folder}", "the data set").splitlines() or [""])[0], 300
        )
        raise DataError(
            f"{title}: `datasets` cannot tell its splits ({type(error).__name__}: {reason}); give "
            "`files`"
        ) from error


def _fetch_metadata(snapshot: Snapshot, name: str, folder: Path) -> bool:
    """Put the metadata file `name`, if it exists, into `folder`; return if it names data files.

    Raises DataError for one that is too large, does not parse, or names paths outside the
    repository: other folders of this machine, or URLs.
    """
    if name not in snapshot.files:
        return False
    if snapshot.files[name].size > MAX_METADATA_BYTES:
        raise DataError(
            f"{snapshot}: its {name} has more than {MAX_METADATA_BYTES / 1e6:.0f} MB; give `files`"
        )
    snapshot.fetch([name], folder, lambda here, total: None)
    try:
        subsets = _load(folder / name).get("configs") or []
        patterns = list(
            _texts([[entry.get("data_files"), entry.get("data_dir")] for entry in subsets])
        )
    except (
        ValueError,
        TypeError,
        AttributeError,
        OSError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        raise DataError(
            f"{snapshot}: the metadata in its {name} cannot be read ({type(error).__name__}); give "
            "`files`"
        ) from error
    for pattern in patterns:
        if (
            "://" in pattern
            or "::" in pattern
            or pattern.startswith(("/", "~"))
            or ".." in pattern.split("/")
        ):
            raise DataError(
                f"{snapshot}: refused: its {name} names {pattern!r}, outside of it; give `files`"
            )
    return bool(patterns)


def _load(path: Path) -> Any:
    """Return the metadata in the file at `path`.

    Raises ValueError if it is too large, before building any value.
    """
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    with path.open(encoding="utf-8-sig", newline="") as file:
        text = file.read()
    if path.name == README:
        block = REGEX_YAML_BLOCK.search(text)
        text = block.group(2) if block else ""
    loader = yaml.SafeLoader(text)
    node = loader.get_single_node()
    if node is None:
        return {}
    if _values_of(node, {}) > MAX_METADATA_VALUES:
        raise ValueError(f"more than {MAX_METADATA_VALUES} values")
    return loader.construct_document(node)


def _values_of(node: Any, known: dict[int, int]) -> int:
    """Return the number of values in `node`, its aliases unfolded; each node is visited once."""
    if id(node) not in known:
        known[id(node)] = MAX_METADATA_VALUES + 1  # the count of a node that contains itself
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif (
            isinstance(node, yaml.ScalarNode)
            and len(node.value) > MAX_NUMBER_CHARS
            and not node.tag.endswith(":str")
        ):
            raise ValueError(f"a number of more than {MAX_NUMBER_CHARS} characters")
        known[id(node)] = 1 + sum(_values_of(child, known) for child in children)
    return known[id(node)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
