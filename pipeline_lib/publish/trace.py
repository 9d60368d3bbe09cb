"""Where a model folder comes from, link by link, with every digest checked that can be.

The folder is checked against its manifest, each manifest against the sha256 that what was made from it recorded, the
digest of each spec against its content; and of the links that are in the store all files, too.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.base.errors import DataError, IntegrityError
from pipeline_lib.base.fsio import json_text, sha256_file, sha256_text
from pipeline_lib.base.manifest import MANIFEST_NAME, InputEntry, Manifest, read_manifest
from pipeline_lib.base.spec import Ref
from pipeline_lib.base.stage import Say
from pipeline_lib.base.store import Store
from pipeline_lib.publish.ancestry import (
    LINEAGE_NAME,
    Folder,
    Record,
    is_same_model,
    parse_manifest,
    parse_record,
    read_record,
)
from pipeline_lib.publish.lineage import place_of, settings_in
from pipeline_lib.publish.traced import (
    DAMAGED,
    Look,
    Traced,
    check,
    describe,
    in_store,
    problems_of_spec,
    read_pointer,
    tell_recorded,
)

MOST_BASES = 32  # models that were each tuned further from the one before


def model_folder(path: Path) -> Path:
    """The model folder at `path`, or around it if that is its `adapter`. Raises DataError if there is none."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; give a model folder, as results/NAME/model")
    for folder in (path, path.resolve().parent):
        if (folder / MANIFEST_NAME).is_file() and (folder == path or path.resolve().name == "adapter"):
            return folder
    hint = f"; {path / 'model'} is one" if (path / "model" / MANIFEST_NAME).is_file() else ""
    raise DataError(f"{path}: no model folder of this pipeline, for it has no {MANIFEST_NAME}{hint}")


def trace(path: Path, store: Store, sizes_only: bool, say: Say) -> Traced:
    """The chain from the model folder at `path`, newest first; what is wrong stands in it as `problems`.

    `say` hears what is being read. Raises DataError if it is no model of ours, IntegrityError if its manifest does not
    read.
    """
    folder = model_folder(path)
    manifest = read_manifest(folder)
    if manifest.stage != "merge":
        raise DataError(f"{path}: sealed by the {manifest.stage} stage, and no model folder")
    home = folder.resolve()
    if home.name == manifest.digest and home.parent.name == manifest.stage:
        store = Store(home.parent.parent)
    look = Look(store, sizes_only, say)
    root, record = _root(folder, manifest, look)
    above: _Made | None = _Made(root, manifest, record)
    for _ in range(MOST_BASES):
        if above is not None:
            above = _grow(above, look)
    if above is not None:
        above.traced.notes.append(f"made from still more models, one from another: the first {MOST_BASES} are shown")
    for traced in root.walk():
        traced.state = DAMAGED if traced.problems else traced.state
    return root


@dataclass(frozen=True)
class _Made:
    """A merge whose inputs are looked at, and what its folder's lineage.json holds."""

    traced: Traced
    manifest: Manifest
    record: Record | None


def _root(folder: Path, manifest: Manifest, look: Look) -> tuple[Traced, Record | None]:
    """The link that the folder itself is, checked, and its lineage.json."""
    root = Traced("merge", Ref(manifest.stage, manifest.digest), sha256_file(folder / MANIFEST_NAME), look.verified)
    describe(root, manifest)
    root.problems += problems_of_spec(manifest)
    pointer = folder.resolve().with_suffix(".ok")
    is_at_home = look.store.pointer(root.ref).resolve() == pointer and pointer.is_file()
    if is_at_home and read_pointer(pointer) != root.manifest_sha256:
        root.problems.append(f"{folder / MANIFEST_NAME}: not as it was sealed")
    record = None
    try:
        look.verify(folder, manifest)
        record = read_record(folder)
    except IntegrityError as error:
        root.problems.append(_told(error))
    return root, record


def _grow(made: _Made, look: Look) -> _Made | None:
    """Hang all that a merge was made from below it, each link below the newest that read it.

    Returns the merge that its base model is from, if that was one of this pipeline.
    """
    seen: dict[str, Traced] = {}
    waiting = [(made.traced, made.manifest)]
    base = None
    while waiting:
        above, manifest = waiting.pop(0)
        for part in sorted(manifest.inputs, key=place_of):
            wanted = manifest.inputs[part]
            if part in seen:
                _compare(seen[part], above, wanted)
                continue
            seen[part] = traced = Traced(part, Ref(wanted.stage, wanted.digest), wanted.manifest_sha256)
            above.inputs.append(traced)
            found = check(traced, made.record, look)
            if found is not None:
                waiting.append((traced, found))
            if found is not None and part == "model":
                base = _go_on(traced, found, made.record, look)
    return base


def _compare(traced: Traced, above: Traced, wanted: InputEntry) -> None:
    """Whether `above` read what is shown already below something newer."""
    if traced.ref != Ref(wanted.stage, wanted.digest):
        above.problems.append(f"{above.part}: made from {traced.part} {wanted.digest}, and not {traced.ref.digest}")
    elif traced.manifest_sha256 != wanted.manifest_sha256:
        traced.notes.append(f"{above.part} read another making of it")


def _go_on(traced: Traced, downloaded: Manifest, record: Record | None, look: Look) -> _Made | None:
    """If a local base model was itself made by this pipeline, hang the link of that merge below it."""
    if settings_in(downloaded).get("source") != "local":
        return None
    if record is None or record.base is None:
        traced.notes.append("what this folder was made from is not known here")
        return None
    where = f"{LINEAGE_NAME}: base"
    try:
        manifest = parse_manifest(record.base.manifest, where)
        own = _own_record(record.base, manifest, where)
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None
    ref = Ref(manifest.stage, manifest.digest)
    below = Traced("merge", ref, sha256_text(json_text(record.base.manifest)))
    traced.inputs.append(below)
    describe(below, manifest)
    below.problems += problems_of_spec(manifest)
    if not is_same_model(downloaded, manifest):
        below.problems.append(f"{where}: not the model that was tuned further: its files are others")
    elif not below.problems and in_store(below, look) is None:
        tell_recorded(below)
    return _Made(below, manifest, own)


def _own_record(base: Folder, manifest: Manifest, where: str) -> Record | None:
    """The lineage.json of a base model, as it was sealed. Raises IntegrityError."""
    if base.lineage is None:
        return None
    entry = manifest.files.get(LINEAGE_NAME)
    if entry is None or entry.sha256 != sha256_text(json_text(base.lineage)):
        raise IntegrityError(f"{where}: its lineage is not the one that was sealed")
    return parse_record(base.lineage, where)


def _told(error: IntegrityError) -> str:
    """What is wrong with a model folder; what to do is another matter where it is a copy."""
    return str(error).rpartition("; delete ")[0] or str(error)
