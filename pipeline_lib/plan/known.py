"""Look up what is known of a config's model and data before anything is computed: in the store, on disk, in a table.

Uses no network: if the store does not remember a hub's branch, or has not hashed a file, nothing made from them counts
as known. Loads no numpy unless there are blocks to read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline_lib.config.compile import compile_config, pinned
from pipeline_lib.config.content import HashCache, read_content
from pipeline_lib.config.schema import Config, LocalModel, TinyModel
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import Sealed, open_sealed
from pipeline_lib.core.store import Manifest, Spec, Store
from pipeline_lib.data.chat_template import repetition
from pipeline_lib.hub.repository import Repository, is_commit
from pipeline_lib.hub.snapshot import Revisions
from pipeline_lib.model.geometry import Geometry, published
from pipeline_lib.plan.workload import Workload, workload_from

if TYPE_CHECKING:
    from pipeline_lib.data.blocks import BlockIndex

BLOCK_SIZES = ("*/index.json", "*/costs.npy")  # the files of a sealed shard stage that `read_blocks` reads
# Copied from data/demo.py, which needs numpy; a test compares them.
_TINY_VOCAB_MULTIPLE, _TINY_MLP_MULTIPLE, _TINY_POSITIONS = 128, 64, 4096


@dataclass(frozen=True)
class Blocks:
    """The sealed blocks of a config: the index of the training blocks, and their workload."""

    training: "BlockIndex"
    workload: Workload


def geometry_of(config: Config, store: Store) -> Geometry:
    """Return the sizes of the config's model. Raise DataError if they are not known here or the kind is unsupported."""
    found = find_geometry(config, store)
    if found is not None:
        return found
    name = getattr(config.model, "name", getattr(config.model, "path", config.model.source))
    raise DataError(
        f"model: the sizes of {name} are not known here: it was not downloaded to {store.root}, and is none of the "
        "published Qwen models that the plan has a table of; run `snakemake`, which downloads it, or name a folder "
        "with its config.json (model: {source: local, path: ...})"
    )


def find_geometry(config: Config, store: Store) -> Geometry | None:
    """Return the sizes of the config's model, or None if unknown. Raise DataError for an unsupported kind of model."""
    model = config.model
    if isinstance(model, LocalModel):
        folder = Path(model.path)
        return Geometry.from_folder(folder) if (folder / "config.json").is_file() else None
    # The model's key does not depend on the data, so data that is not known yet is left out.
    alone = config.model_copy(update={"data": config.data.model_copy(update={"train": ()})})
    if sealed := _sealed(alone, store, "model"):
        return Geometry.from_folder(sealed.folder("config.json"))
    if isinstance(model, TinyModel):
        return _tiny(model)
    table = published(model.name)
    return Geometry.from_config(table) if table is not None else None


def workload_of(config: Config, store: Store) -> Workload:
    """Return the workload of the config's blocks, or an assumed one if there are none."""
    blocks = blocks_of(config, store)
    return blocks.workload if blocks else Workload.assumed(config)


def blocks_of(config: Config, store: Store) -> Blocks | None:
    """Return the blocks of the config's shard stage, or None if it is not sealed. Raise IntegrityError on damage."""
    sealed = _sealed(config, store, "shard")
    return read_blocks(sealed.folder(*BLOCK_SIZES)) if sealed else None


def read_blocks(folder: Path) -> Blocks:
    """Return the content of the sealed shard stage in `folder`. Raise IntegrityError on damage."""
    from pipeline_lib.data.blocks import BlockIndex, BlockReader

    reader, held_out = BlockReader(folder / "train"), BlockIndex.read(folder / "validation")
    workload = workload_from(reader.index, reader.costs, reader.samples_per_block(), held_out.blocks)
    return Blocks(reader.index, workload)


def repetition_of(config: Config, store: Store) -> str:
    """Return what it costs that conversations become several samples; empty before they are tokenized."""
    sealed = _sealed(config, store, "tokenize")
    return repetition_in(sealed.manifest) if sealed else ""


def repetition_in(tokenized: Manifest) -> str:
    """Return the same for a sealed tokenize stage; empty also if older code did not count it."""
    counts = tokenized.counts
    return repetition(*(counts.get(key) for key in ("conversations", "kept", "tokens", "repeated_tokens")))


def is_sealed(config: Config, store: Store, part: str) -> bool:
    """Return whether that part of the experiment is sealed, as far as the store remembers its inputs."""
    specs = remembered_specs(config, store)
    return specs is not None and store.is_sealed(specs[part].ref)


def _sealed(config: Config, store: Store, part: str) -> Sealed | None:
    specs = remembered_specs(config, store)
    return open_sealed(specs[part].ref, store) if specs and store.is_sealed(specs[part].ref) else None


def remembered_specs(config: Config, store: Store) -> Mapping[str, Spec] | None:
    """Return the config's specs from remembered hashes and commits; None if one of them is not remembered."""
    hashes = _RememberedHashes(**vars(HashCache.load(store.root / "hashes.json")))
    revisions = _RememberedRevisions(**vars(Revisions.load(store.root / "revisions.json")))
    try:
        return compile_config(pinned(config, revisions), read_content(config, Path("the config"), hashes)).specs
    except (ConfigError, _NotRememberedError):
        return None


class _NotRememberedError(Exception):
    """The sign that a file would have to be read in full, or a hub asked."""


class _RememberedHashes(HashCache):
    """Hashes that never read a large file for the first time: what was sealed was hashed before."""

    def sha256(self, file: Path) -> str:
        if str(file.resolve()) not in self.entries:
            raise _NotRememberedError
        return super().sha256(file)


class _RememberedRevisions(Revisions):
    def commit_of(self, repository: Repository, revision: str | None) -> str:
        entry = self.entries.get(f"{repository} {revision or 'main branch'}", {})
        is_known = (revision is not None and is_commit(revision)) or is_commit(str(entry.get("commit")))
        if not is_known:
            raise _NotRememberedError
        return super().commit_of(repository, revision)


def _tiny(model: TinyModel) -> Geometry:
    """Return the sizes of the model that data/demo.py will build, if its tokenizer gets the size it asks for."""
    tokens = _tokenizer_tokens(Path(model.tokenizer)) if model.tokenizer is not None else model.vocab_tokens
    return Geometry(
        vocab=math.ceil(tokens / _TINY_VOCAB_MULTIPLE) * _TINY_VOCAB_MULTIPLE,
        hidden=model.hidden_size,
        intermediate=math.ceil(3 * model.hidden_size / _TINY_MLP_MULTIPLE) * _TINY_MLP_MULTIPLE,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.heads // 2,
        head_dim=model.hidden_size // model.heads,
        tied=True,
        max_positions=_TINY_POSITIONS,
    )


def _tokenizer_tokens(folder: Path) -> int:
    path = folder / "tokenizer.json"
    try:
        content = read_json(path)
        added = {token["content"] for token in content.get("added_tokens", ())}
        return len(added | set(content["model"]["vocab"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a tokenizer with a vocabulary ({error})") from error
