"""What is known of a config's model and data before anything is computed: from the store, the disk, or a table.

Asks no network: a branch of a hub that the store does not remember, and files that it has not hashed, mean that
nothing made of them is known. Loads no numpy unless there are blocks to read.
"""

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

BLOCK_SIZES = ("*/index.json", "*/costs.npy")  # what `read_blocks` reads of a sealed shard stage
# As data/demo.py builds it, which a test holds this to; that module needs numpy.
_TINY_VOCAB_MULTIPLE, _TINY_MLP_MULTIPLE, _TINY_POSITIONS = 128, 64, 4096


@dataclass(frozen=True)
class Blocks:
    """The sealed blocks of a config: the index of those to train on, how many are held out, and what they are like."""

    training: "BlockIndex"
    validation_blocks: int
    workload: Workload


def geometry_of(config: Config, store: Store) -> Geometry:
    """The sizes of the config's model. Raises DataError if they are not known here, or are of another kind of model."""
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
    """The same, or None where they are not known. Raises DataError for another kind of model."""
    model = config.model
    if isinstance(model, LocalModel):
        folder = Path(model.path)
        return Geometry.from_folder(folder) if (folder / "config.json").is_file() else None
    # The model's key hangs on no data: what is not known of those is no obstacle.
    alone = config.model_copy(update={"data": config.data.model_copy(update={"train": ()})})
    if sealed := _sealed(alone, store, "model"):
        return Geometry.from_folder(sealed.folder("config.json"))
    if isinstance(model, TinyModel):
        return _tiny(model)
    table = published(model.name)
    return Geometry.from_config(table) if table is not None else None


def workload_of(config: Config, store: Store) -> Workload:
    """What the config's blocks are like, or what is assumed of them while there are none."""
    blocks = blocks_of(config, store)
    return blocks.workload if blocks else Workload.assumed(config)


def blocks_of(config: Config, store: Store) -> Blocks | None:
    """The blocks of the config's shard stage, if it is sealed. Raises IntegrityError if they are damaged."""
    sealed = _sealed(config, store, "shard")
    return read_blocks(sealed.folder(*BLOCK_SIZES)) if sealed else None


def read_blocks(folder: Path) -> Blocks:
    """What the sealed shard stage in `folder` holds. Raises IntegrityError."""
    from pipeline_lib.data.blocks import BlockIndex, BlockReader

    reader, held_out = BlockReader(folder / "train"), BlockIndex.read(folder / "validation")
    return Blocks(reader.index, held_out.blocks, workload_from(reader.index, reader.costs, held_out.blocks))


def repetition_of(config: Config, store: Store) -> str:
    """What it costs that the config's conversations become several samples; empty before they are tokenized."""
    sealed = _sealed(config, store, "tokenize")
    return repetition_in(sealed.manifest) if sealed else ""


def repetition_in(tokenized: Manifest) -> str:
    """The same of a sealed tokenize stage; empty also where older code did not count it."""
    counts = tokenized.counts
    return repetition(*(counts.get(key) for key in ("conversations", "kept", "tokens", "repeated_tokens")))


def is_sealed(config: Config, store: Store, part: str) -> bool:
    """Whether that part of the experiment is done, as far as the store remembers what it is made from."""
    specs = remembered_specs(config, store)
    return specs is not None and store.is_sealed(specs[part].ref)


def _sealed(config: Config, store: Store, part: str) -> Sealed | None:
    """The directory of that part of the experiment, if it is done."""
    specs = remembered_specs(config, store)
    return open_sealed(specs[part].ref, store) if specs and store.is_sealed(specs[part].ref) else None


def remembered_specs(config: Config, store: Store) -> Mapping[str, Spec] | None:
    """The config's specs as the store's memory has them; None if something in them is not remembered."""
    hashes = _RememberedHashes(**vars(HashCache.load(store.root / "hashes.json")))
    revisions = _RememberedRevisions(**vars(Revisions.load(store.root / "revisions.json")))
    try:
        return compile_config(pinned(config, revisions), read_content(config, Path("the config"), hashes)).specs
    except (ConfigError, _NotRememberedError):
        return None


class _NotRememberedError(Exception):
    """It would have to be read in full, or asked of a hub."""


class _RememberedHashes(HashCache):
    """Reads no large file for the first time: what was sealed was hashed before."""

    def sha256(self, file: Path) -> str:
        if str(file.resolve()) not in self.entries:
            raise _NotRememberedError
        return super().sha256(file)


class _RememberedRevisions(Revisions):
    """Asks no hub."""

    def commit_of(self, repository: Repository, revision: str | None) -> str:
        entry = self.entries.get(f"{repository} {revision or 'main branch'}", {})
        is_known = (revision is not None and is_commit(revision)) or is_commit(str(entry.get("commit")))
        if not is_known:
            raise _NotRememberedError
        return super().commit_of(repository, revision)


def _tiny(model: TinyModel) -> Geometry:
    """What data/demo.py will build, if its tokenizer comes out as large as it is told."""
    tokens = _tokenizer_tokens(Path(model.tokenizer)) if model.tokenizer is not None else model.vocab_tokens
    return Geometry(
        vocab=_round_up(tokens, _TINY_VOCAB_MULTIPLE),
        hidden=model.hidden_size,
        intermediate=_round_up(3 * model.hidden_size, _TINY_MLP_MULTIPLE),
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.heads // 2,
        head_dim=model.hidden_size // model.heads,
        tied=True,
        max_positions=_TINY_POSITIONS,
    )


def _tokenizer_tokens(folder: Path) -> int:
    """Entries of the tokenizer in `folder`. Raises DataError."""
    path = folder / "tokenizer.json"
    try:
        content = read_json(path)
        added = {token["content"] for token in content.get("added_tokens", ())}
        return len(added | set(content["model"]["vocab"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a tokenizer with a vocabulary ({error})") from error


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
