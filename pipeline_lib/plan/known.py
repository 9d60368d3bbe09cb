"""Look up what is known of a config's model and data before any work: in store, disk or table.

Only `learn_architecture` uses the network. If the store does not remember a hub's branch, or has
not hashed a file, nothing made from them counts as known. Loads no numpy unless there are blocks to
read.
"""

import math
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.arch.config_json import refuse_quantized
from pipeline_lib.arch.families import checked_geometry, geometry_in, published, read_geometry
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.compile import compile_config, pinned
from pipeline_lib.config.content import (
    HASHES_NAME,
    HashCache,
    is_model_file,
    missing_model_files,
    model_key,
    not_json,
    read_content,
)
from pipeline_lib.config.schema import Config, HubModel, LocalModel, TinyModel
from pipeline_lib.core.errors import (
    ConfigError,
    DataError,
    DiskFull,
    HubError,
    IntegrityError,
    PipelineError,
    Unreadable,
)
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.stage import Say, Sealed, open_sealed
from pipeline_lib.core.store import Manifest, Spec, Store
from pipeline_lib.core.units import MIB
from pipeline_lib.data.chat_template import repetition
from pipeline_lib.hub.repository import Repository, is_commit
from pipeline_lib.hub.snapshot import REVISIONS_NAME, Revisions, Snapshot
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.workload import workload_from
from pipeline_lib.records.data import LEDGER_NAME, BlockIndex, Ledger
from pipeline_lib.records.plan import Workload
from pipeline_lib.records.record import read_record

# the files of a sealed shard stage that `read_blocks` reads
BLOCK_SIZES = ("*/index.json", "*/costs.npy")
# Copied from data/tiny_model.py, which needs numpy; a test compares them.
_TINY_VOCAB_MULTIPLE, _TINY_MLP_MULTIPLE, _TINY_POSITIONS = 128, 64, 4096


@dataclass(frozen=True)
class Blocks:
    """The sealed blocks of a config: the index of the training blocks, and their workload."""

    training: BlockIndex
    workload: Workload


def geometry_of(config: Config, store: Store) -> Geometry:
    """Return the sizes of the config's model, which may be one that is only planned.

    Raise DataError if they are not known here, or if the kind is not even planned.
    """
    found = find_geometry(config, store)
    if found is not None:
        return found
    model = config.root.model
    name = getattr(model, "name", getattr(model, "path", model.source))
    raise DataError(
        f"model: the sizes of {name} are not known here: it was not downloaded to {store.root}, "
        "and is none of the "
        "published Qwen models that the plan has a table of; for a plan alone, put its config.json "
        "into a folder and "
        "name that (model: {source: local, path: ...}); `snakemake` downloads the model"
    )


def find_geometry(config: Config, store: Store) -> Geometry | None:
    """Return the sizes of the config's model with its `rope`, or None if unknown.

    Raise DataError for an unsupported kind of model, or for `rope` if the model has a scaling of
    its own.
    """
    found = _find_geometry(config, store)
    return None if found is None else found.stretched(config.model.rope)


def _find_geometry(config: Config, store: Store) -> Geometry | None:
    model = config.model
    if config.parent is not None:  # no training changes the sizes
        try:
            return find_geometry(config.parent, store)
        except DataError:  # said of that experiment
            return None
    if isinstance(model, LocalModel):
        path = Path(model.path) / "config.json"
        if not path.is_file():
            return None
        geometry = read_geometry(path.parent, may_be_planned=True)
        refuse_quantized(read_json(path), str(path))
        return geometry
    # The model's key does not depend on the data, so data that is not known yet is left out.
    alone = config.model_copy(
        update={"data": config.data.model_copy(update={"train": (), "validation": ()})}
    )
    if sealed := _sealed(alone, store, "model"):
        return read_geometry(sealed.folder("config.json"))
    if isinstance(model, TinyModel):
        return _tiny(model)
    if not isinstance(model, HubModel):
        return None
    table = published(model.name)
    return geometry_in(table) if table is not None else _looked_up(model, store)


# What the hubs say of models that are in no table: the kilobytes of config.json, looked up once and
# remembered in the user's own cache. With them, a model that cannot be trained is refused before
# its weights are downloaded.

ARCHITECTURES_NAME = "architectures.json"
_MOST_CONFIG_BYTES = MIB


def learn_architecture(config: Config, store: Store, say: Say) -> None:
    """Look up the config.json of the config's hub model, unless its sizes or its seal are known.

    It is fetched at the pinned commit, verified, and remembered in the user's cache. If the hub
    cannot be asked, a line says so, and nothing more is known than before. Raise DataError for
    hostile file names, IntegrityError for wrong content.
    """
    model = config.root.model
    if not isinstance(model, HubModel) or is_sealed(config, store, "train"):
        return
    try:
        if find_geometry(config, store) is not None:
            return
    except DataError:  # it is known, and whoever needs it is told why it cannot be used
        return
    repository = Repository(model.source, "model", model.name)
    revisions = Revisions.load(store.remembered(REVISIONS_NAME))
    try:
        commit = revisions.commit_of(repository, model.revision)
        revisions.save()
        found = _fetch_architecture(repository, commit, say)
    except HubError as error:
        say(
            f"warning: {model_key(model)}: the architecture could not be looked up, so it is not "
            f"checked before the download: {error}"
        )
        return
    if (path := store.remembered(ARCHITECTURES_NAME)) is None:  # it is looked up again next time
        return
    with suppress(OSError, DiskFull):
        write_json(path, _architectures(store) | {f"{repository} {commit}": found})


def _fetch_architecture(repository: Repository, commit: str, say: Say) -> dict[str, Any]:
    """Return config.json's content as `config`, and as `problem` why it is no model to train."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        snapshot = Snapshot(repository, commit, folder / "work", say)
        names = [name for name in snapshot.files if is_model_file(name)]
        if missing := missing_model_files(names):
            return {
                "problem": f"it has no {', '.join(missing)}; another repository may have it "
                "converted"
            }
        if snapshot.files["config.json"].size > _MOST_CONFIG_BYTES:
            return {"problem": "its config.json has more than 1 MiB"}
        snapshot.fetch(["config.json"], folder, lambda here, total: None)
        try:
            content = dict(read_json(folder / "config.json"))
            wrong = next(not_json(content), None)
        except (ValueError, TypeError, RecursionError) as error:
            return {"problem": f"its config.json does not read as a JSON object ({error})"}
        return (
            {"config": content}
            if wrong is None
            else {"problem": f"its config.json is no JSON: {wrong}"}
        )


def _looked_up(model: HubModel, store: Store) -> Geometry | None:
    """Return the sizes that were looked up before; None if they were not.

    Raise DataError as `find_geometry`.
    """
    repository = Repository(model.source, "model", model.name)
    try:
        commit = _remembered_revisions(store).commit_of(repository, model.revision)
    except _NotRememberedError:
        return None
    entry = _architectures(store).get(f"{repository} {commit}")
    if not isinstance(entry, dict):
        return None
    where = f"{repository} at {commit[:12]}"
    if "problem" in entry:
        raise DataError(f"{where}: {entry['problem']}")
    config = entry.get("config")
    if not isinstance(config, dict):
        return None
    origin = f"{where}: config.json"
    geometry = checked_geometry(config, origin, may_be_planned=True)
    refuse_quantized(config, origin)
    return geometry


def _architectures(store: Store) -> dict[str, Any]:
    path = store.remembered(ARCHITECTURES_NAME)
    if path is None:
        return {}
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError):
        return {}


def workload_of(config: Config, store: Store) -> Workload:
    """Return the workload of the config's blocks, or what is expected of them if there are none."""
    blocks = blocks_of(config, store)
    return blocks.workload if blocks else expected_workload(config, vocabulary_of(config, store))


def vocabulary_of(config: Config, store: Store) -> int | None:
    """Return the size of the model's vocabulary; None if it is not known before the download."""
    with suppress(PipelineError):
        return geometry_of(config, store).vocab
    return None


def blocks_of(config: Config, store: Store) -> Blocks | None:
    """Return the blocks of the config's shard stage, or None if it is not sealed.

    Raise IntegrityError on damage.
    """
    sealed = _sealed(config, store, "shard")
    return read_blocks(sealed.folder(*BLOCK_SIZES)) if sealed else None


def read_blocks(folder: Path) -> Blocks:
    """Return the content of the sealed shard stage in `folder`. Raise IntegrityError on damage."""
    from pipeline_lib.data.blocks import BlockReader, read_index

    reader = BlockReader(folder / "train")
    held_out = read_index(folder / "validation")
    workload = workload_from(
        reader.index, reader.costs, reader.samples_per_block(), held_out.blocks
    )
    return Blocks(reader.index, workload)


def repetition_of(config: Config, store: Store) -> str:
    """Return what it costs that conversations are split into samples; empty until tokenized."""
    sealed = _sealed(config, store, "tokenize")
    return repetition_in(sealed.manifest) if sealed else ""


def repetition_in(tokenized: Manifest) -> str:
    """Return the same for a sealed tokenize stage."""
    counts = tokenized.counts
    return repetition(
        *(counts.get(key) for key in ("conversations", "kept", "tokens", "repeated_tokens"))
    )


def losses_of(config: Config, store: Store) -> list[str]:
    """Return what the sealed tokenize stage left out beyond its limits, which no digest has.

    A damaged ledger is passed over: the stage that reads it names it.
    """
    try:
        sealed = _sealed(config, store, "tokenize")
        if sealed is None:
            return []
        from pipeline_lib.data.ledger import too_many_left_out

        ledger = read_record(Ledger, sealed.file(LEDGER_NAME))
    except (IntegrityError, Unreadable, OSError):
        return []
    return list(too_many_left_out(ledger, config.tokenize))


def is_sealed(config: Config, store: Store, part: str) -> bool:
    """Return whether that part of the experiment is sealed, as far as the store remembers."""
    specs = remembered_specs(config, store)
    return specs is not None and store.is_sealed(specs[part].ref)


def _sealed(config: Config, store: Store, part: str) -> Sealed | None:
    specs = remembered_specs(config, store)
    return (
        open_sealed(specs[part].ref, store) if specs and store.is_sealed(specs[part].ref) else None
    )


def remembered_specs(config: Config, store: Store) -> Mapping[str, Spec] | None:
    """Return the config's specs from remembered hashes and commits; None if one is missing."""
    hashes = _RememberedHashes(
        **vars(HashCache.load(store.remembered(HASHES_NAME), store.verified))
    )
    try:
        content = read_content(config, Path("the config"), hashes)
        return compile_config(pinned(config, _remembered_revisions(store)), content).specs
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
        is_known = (revision is not None and is_commit(revision)) or is_commit(
            str(entry.get("commit"))
        )
        if not is_known:
            raise _NotRememberedError
        return super().commit_of(repository, revision)


def _remembered_revisions(store: Store) -> _RememberedRevisions:
    return _RememberedRevisions(**vars(Revisions.load(store.remembered(REVISIONS_NAME))))


def _tiny(model: TinyModel) -> Geometry:
    """Return the sizes of the model of data/tiny_model.py, if its tokenizer gets its size."""
    tokens = (
        _tokenizer_tokens(Path(model.tokenizer))
        if model.tokenizer is not None
        else model.vocab_tokens
    )
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
