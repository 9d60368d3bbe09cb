"""Checks of one link: what it is, and whether it is unchanged since it was read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline_lib.config.stages import STAGES
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.run_folder import EVENTS_NAME
from pipeline_lib.core.run_record import Attempt, RunRecord
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    Manifest,
    Ref,
    Spec,
    Store,
    read_manifest,
    verify,
    verify_sizes,
)
from pipeline_lib.lineage.record import (
    LINEAGE_NAME,
    Lineage,
    LineageLink,
    link_of,
    parse_manifest,
    settings_in,
)

VERIFIED, SAME_SIZES, REMADE, RECORDED = "verified", "sizes agree", "made again", "not here"
UNKNOWN, DAMAGED = "unknown", "DAMAGED"
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass
class Traced:
    """A link and the results of checking it.

    `link` is None if nothing describes it; `inputs` are the links below.
    """

    part: str
    ref: Ref
    manifest_sha256: str
    state: str = UNKNOWN
    link: LineageLink | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    inputs: list["Traced"] = field(default_factory=list)

    def walk(self) -> Iterator["Traced"]:
        """Yield this link and all links below it, depth first."""
        yield self
        for traced in self.inputs:
            yield from traced.walk()


@dataclass(frozen=True)
class Checks:
    """How to check links: against which store, if by size only, where to report progress."""

    store: Store
    sizes_only: bool
    say: Say

    @property
    def verified(self) -> str:
        """The state of a link whose files passed the check."""
        return SAME_SIZES if self.sizes_only else VERIFIED

    def verify(self, folder: Path, manifest: Manifest) -> None:
        """Check the files of a sealed `folder`. Raises IntegrityError."""
        size_bytes = sum(entry.bytes for entry in manifest.files.values())
        self.say(f"reading {manifest.stage} {manifest.digest}, {size_bytes / 1e9:,.2f} GB")
        if self.sizes_only:
            verify_sizes(folder)
        else:
            verify(folder)


def check(traced: Traced, record: Lineage | None, checks: Checks) -> Manifest | None:
    """Check a link against record and store, and describe it; return its manifest, or None.

    The store's manifest is used if it is the recorded one, else the record's if there is one.
    """
    if traced.ref.stage not in STAGES or not _DIGEST.fullmatch(traced.ref.digest):
        traced.problems.append(
            f"{traced.part}: {traced.ref.stage} {traced.ref.digest} is not a stage instance"
        )
        return None
    here = in_store(traced, checks)
    recorded = _recorded(traced, record, checks)
    manifest = here if traced.state == checks.verified else recorded or here
    if manifest is None:
        if not traced.problems:
            what = "has no" if record is None else "does not have it in its"
            traced.notes.append(f"not in the store, and the model folder {what} {LINEAGE_NAME}")
        return None
    traced.problems += [f"{traced.part}: {problem}" for problem in problems_of_spec(manifest)]
    if Ref(manifest.stage, manifest.digest) != traced.ref:
        traced.problems.append(
            f"{traced.part}: its manifest is that of {manifest.stage} {manifest.digest}"
        )
    attempts: Sequence[Attempt] = ()
    if traced.part == "train":
        if record is None:
            folder = checks.store.sealed(traced.ref)
            attempts = RunRecord.read(folder / EVENTS_NAME).attempts
        else:
            attempts = record.attempts
    describe(traced, manifest, attempts)
    if here is None:
        mark_recorded(traced)
    return manifest


def mark_recorded(traced: Traced) -> None:
    """Mark a link that only the record describes."""
    traced.state = RECORDED
    traced.notes.append("not in the store: known only from the model's own record")


def _recorded(traced: Traced, record: Lineage | None, checks: Checks) -> Manifest | None:
    """Return the link's manifest from the record, checked by SHA-256; None if there is none."""
    entry = record.links.get(traced.part) if record else None
    if entry is None:
        return None
    if entry.unproven is not None and traced.state != checks.verified:
        traced.notes.append(f"its sha256 cannot be checked by the record alone: {entry.unproven}")
    elif entry.unproven is None and entry.manifest_sha256 != traced.manifest_sha256:
        traced.problems.append(
            f"{LINEAGE_NAME}: {traced.part}: its sha256 differs from the recorded one"
        )
    try:
        return parse_manifest(entry.manifest, f"{LINEAGE_NAME}: {traced.part}")
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None


def in_store(traced: Traced, checks: Checks) -> Manifest | None:
    """Return the link's manifest from the store, with files checked; None if gone or damaged."""
    folder = checks.store.sealed(traced.ref)
    try:
        if not (folder / MANIFEST_NAME).is_file():
            return None
    except OSError:
        return None
    try:
        manifest = read_manifest(folder)
        checks.verify(folder, manifest)
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None
    sha256 = sha256_file(folder / MANIFEST_NAME)
    pointer = checks.store.pointer(traced.ref)
    if sha256 == traced.manifest_sha256:
        traced.state = checks.verified
    elif pointer.is_file() and read_pointer(pointer) == sha256:
        traced.state = REMADE
        traced.notes.append(
            f"the store has another build of it, made {manifest.started_at}; its files are whole"
        )
    else:
        traced.problems.append(
            f"{folder / MANIFEST_NAME}: neither the manifest that was read nor the one that was "
            "sealed"
        )
    return manifest


def problems_of_spec(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong if the spec does not match the digest, or its inputs differ."""
    try:
        spec = Spec.from_json(manifest.spec, "its spec")
        digest = spec.digest
    except (IntegrityError, ValueError, RecursionError) as error:
        yield f"its spec is damaged ({error})"
        return
    if (spec.stage, digest) != (manifest.stage, manifest.digest):
        yield (
            f"its spec belongs to {spec.stage} {digest}, not to {manifest.stage} {manifest.digest}"
        )
    read = {name: Ref(entry.stage, entry.digest) for name, entry in manifest.inputs.items()}
    if read != dict(spec.inputs):
        yield "its inputs are not those that its spec names"


def describe(traced: Traced, manifest: Manifest, attempts: Sequence[Attempt] = ()) -> None:
    """Set the link and the settings of `traced` from `manifest`."""
    traced.link = link_of(traced.part, manifest, attempts)
    traced.settings = settings_in(manifest)


def read_pointer(pointer: Path) -> str:
    """Return the SHA-256 in a pointer file of the store."""
    return pointer.read_text(encoding="utf-8", errors="replace").strip()
