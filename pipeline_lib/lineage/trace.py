"""A model folder's trace back to its sources, each available digest checked.

The folder is checked against its manifest, each manifest against the SHA-256 that the link above
recorded, and each spec against its digest. For links that are in the store, all files are checked
too.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import json_text, sha256_file, sha256_text
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    Manifest,
    Ref,
    Store,
    read_manifest,
)
from pipeline_lib.lineage.checks import (
    DAMAGED,
    Checks,
    Traced,
    check,
    describe,
    in_store,
    mark_recorded,
    problems_of_spec,
    read_pointer,
)
from pipeline_lib.lineage.record import (
    EXPERIMENT,
    LINEAGE_NAME,
    Lineage,
    is_same_model,
    newest_first,
    parse_lineage,
    parse_manifest,
    part_of_base,
    part_read,
    read_lineage,
    settings_in,
)

MOST_BASES = 32  # models in a row, each fine-tuned from the one before


def model_folder(path: Path) -> Path:
    """Return the model folder at `path`, or the one around it for its `adapter`.

    Raises DataError for others.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; give a model folder, such as results/NAME/model")
    if (path / MANIFEST_NAME).is_file():
        return path
    home = path.resolve()
    if home.name == "adapter" and (home.parent / MANIFEST_NAME).is_file():
        return home.parent
    hint = ""
    if (path / "model" / MANIFEST_NAME).is_file():
        hint = f"; {path / 'model'} is one"
    raise DataError(f"{path}: not a model folder of this pipeline: it has no {MANIFEST_NAME}{hint}")


def store_of(folder: Path, manifest: Manifest, store: Store) -> Store:
    """Return the store in which the sealed `folder` lies; `store` if it is a copy elsewhere."""
    home = folder.resolve()
    if home.name == manifest.digest and home.parent.name == manifest.stage:
        return replace(store, root=home.parent.parent)
    return store


def trace(path: Path, store: Store, sizes_only: bool, say: Say) -> Traced:
    """Return the trace from the model folder at `path`, newest first; links hold their `problems`.

    `say` reports what is being read. Raises DataError if it is no model folder of this pipeline,
    IntegrityError if its manifest cannot be parsed.
    """
    folder = model_folder(path)
    manifest = read_manifest(folder)
    if manifest.stage != "merge":
        raise DataError(f"{path}: made by the {manifest.stage} stage, so it is not a model folder")
    home = folder.resolve()
    store = store_of(folder, manifest, store)
    checks = Checks(store, sizes_only, say)
    root = Traced(
        "merge",
        Ref(manifest.stage, manifest.digest),
        sha256_file(folder / MANIFEST_NAME),
        checks.verified,
    )
    describe(root, manifest)
    root.problems += problems_of_spec(manifest)
    pointer = home.with_suffix(".ok")
    is_at_home = store.pointer(root.ref).resolve() == pointer and pointer.is_file()
    if is_at_home and read_pointer(pointer) != root.manifest_sha256:
        root.problems.append(f"{folder / MANIFEST_NAME}: not as it was sealed")
    record = None
    try:
        checks.verify(folder, manifest)
        record = read_lineage(folder)
    except IntegrityError as error:
        # The folder may be a copy: the advice to delete it does not hold.
        root.problems.append(str(error).rpartition("; delete ")[0] or str(error))
    above: _Merge | None = _Merge(root, manifest, record)
    for _ in range(MOST_BASES):
        if above is not None:
            above = _attach_inputs(above, checks)
    if above is not None:
        above.traced.notes.append(
            f"its base models go back further; only the first {MOST_BASES} are shown"
        )
    for traced in root.walk():
        if traced.problems:
            traced.state = DAMAGED
    return root


@dataclass(frozen=True)
class _Merge:
    """A merge whose inputs are to be checked, and the content of its lineage.json."""

    traced: Traced
    manifest: Manifest
    record: Lineage | None


def _attach_inputs(merge: _Merge, checks: Checks) -> _Merge | None:
    """Attach everything that a merge was made from, each link below the newest one that read it.

    Returns the merge that made its base model, if this pipeline did.
    """
    seen: dict[str, Traced] = {}
    of_base = part_of_base(merge.record.links if merge.record is not None else {})
    waiting = [(merge.traced, merge.manifest)]
    base = None
    model: Manifest | None = None
    while waiting:
        above, manifest = waiting.pop(0)
        for name in sorted(manifest.inputs, key=newest_first):
            wanted = manifest.inputs[name]
            ref = Ref(wanted.stage, wanted.digest)
            part = name if model is None else part_read(name, wanted.digest, model)
            if part in seen:
                if seen[part].ref != ref:
                    above.problems.append(
                        f"{above.part}: made from {part} {wanted.digest}, and not "
                        f"{seen[part].ref.digest}"
                    )
                elif seen[part].manifest_sha256 != wanted.manifest_sha256:
                    seen[part].notes.append(f"{above.part} read another making of it")
                continue
            traced = Traced(part, ref, wanted.manifest_sha256)
            seen[part] = traced
            above.inputs.append(traced)
            found = check(traced, merge.record, checks)
            if found is not None and found.stage != "download":
                waiting.append((traced, found))
            if part == "model":
                model = found
            if found is not None and part == of_base:
                base = _attach_base(traced, found, merge.record, checks)
    return base


def _attach_base(
    traced: Traced, downloaded: Manifest, record: Lineage | None, checks: Checks
) -> _Merge | None:
    """Attach the merge that made a base model below it, if this pipeline did."""
    if settings_in(downloaded).get("source") not in ("local", EXPERIMENT):
        return None
    if record is None or record.base is None:
        traced.notes.append("the origin of this folder is unknown")
        return None
    where = f"{LINEAGE_NAME}: base"
    base = record.base
    own = None
    try:
        manifest = parse_manifest(base.manifest, where)
        if base.lineage is not None:
            entry = manifest.files.get(LINEAGE_NAME)
            if entry is None or entry.sha256 != sha256_text(json_text(base.lineage)):
                raise IntegrityError(f"{where}: its lineage differs from the sealed one")
            own = parse_lineage(base.lineage, where)
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None
    sha256 = sha256_text(json_text(base.manifest))
    below = Traced("merge", Ref(manifest.stage, manifest.digest), sha256)
    traced.inputs.append(below)
    describe(below, manifest)
    below.problems += problems_of_spec(manifest)
    read = downloaded.inputs.get("merge")
    if read is not None and read.digest != below.ref.digest:
        below.problems.append(f"{where}: not the merge that was read, which is {read.digest}")
    elif not is_same_model(downloaded, manifest):
        below.problems.append(f"{where}: not the model that was fine-tuned: its files differ")
    elif not below.problems and in_store(below, checks) is None:
        mark_recorded(below)
    return _Merge(below, manifest, own)
