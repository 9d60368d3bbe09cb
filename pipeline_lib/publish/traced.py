"""One link of a traced chain: what it is, and whether it is as it was when it was read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import sha256_file
from pipeline_lib.base.manifest import MANIFEST_NAME, Manifest, read_manifest, verify, verify_sizes
from pipeline_lib.base.run_folder import EVENTS_NAME
from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.stage import Say
from pipeline_lib.base.store import Store
from pipeline_lib.publish.ancestry import LINEAGE_NAME, Record, parse_manifest
from pipeline_lib.publish.attempts import Attempt, attempts_of
from pipeline_lib.publish.lineage import Link, events_in, link_of, settings_in

VERIFIED, SAME_SIZES, REMADE, RECORDED = "verified", "sizes agree", "made again", "not here"
UNKNOWN, DAMAGED = "unknown", "DAMAGED"
MADE_BY_US = frozenset({"download", "tokenize", "shard", "train", "merge"})
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass
class Traced:
    """A link and what came of checking it; `link` is None where nothing tells of it. `inputs` are those below it."""

    part: str
    ref: Ref
    manifest_sha256: str
    state: str = UNKNOWN
    link: Link | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    inputs: list["Traced"] = field(default_factory=list)

    def walk(self) -> Iterator["Traced"]:
        """This link and all below it, the newest first."""
        yield self
        for traced in self.inputs:
            yield from traced.walk()


@dataclass(frozen=True)
class Look:
    """How links are checked: against which store, whether by sizes only, and who is told what is read now."""

    store: Store
    sizes_only: bool
    say: Say

    @property
    def verified(self) -> str:
        """What a link is called whose files were checked."""
        return SAME_SIZES if self.sizes_only else VERIFIED

    def verify(self, folder: Path, manifest: Manifest) -> None:
        """Check the files of a sealed `folder`. Raises IntegrityError."""
        size_bytes = sum(entry.bytes for entry in manifest.files.values())
        self.say(f"reading {manifest.stage} {manifest.digest}, {size_bytes / 1e9:,.2f} GB")
        if self.sizes_only:
            verify_sizes(folder)
        else:
            verify(folder)


def check(traced: Traced, record: Record | None, look: Look) -> Manifest | None:
    """Check a link as the record and as the store have it, and describe it; its manifest, if either has one."""
    if traced.ref.stage not in MADE_BY_US or not _DIGEST.fullmatch(traced.ref.digest):
        traced.problems.append(f"{traced.part}: {traced.ref.stage} {traced.ref.digest} is no stage instance")
        return None
    here = in_store(traced, look)
    recorded = _recorded(traced, record, look)
    manifest = here if traced.state == look.verified else recorded or here
    if manifest is None:
        if not traced.problems:
            what = "which has no" if record is None else "which lacks it in"
            traced.notes.append(f"not here, and this model, {what} {LINEAGE_NAME}, tells no more of it")
        return None
    traced.problems += [f"{traced.part}: {problem}" for problem in problems_of_spec(manifest)]
    if Ref(manifest.stage, manifest.digest) != traced.ref:
        traced.problems.append(f"{traced.part}: its manifest is that of {manifest.stage} {manifest.digest}")
    describe(traced, manifest, _attempts(traced, record, look))
    if here is None:
        tell_recorded(traced)
    return manifest


def tell_recorded(traced: Traced) -> None:
    """Mark a link that the record alone tells of."""
    traced.state = RECORDED
    traced.notes.append("not here: known only from the model's own record")


def _recorded(traced: Traced, record: Record | None, look: Look) -> Manifest | None:
    """The manifest of a link as the model's record has it."""
    entry = record.links.get(traced.part) if record else None
    if entry is None:
        return None
    if entry.unproven is not None and traced.state != look.verified:
        traced.notes.append(f"its sha256 cannot be checked by the record alone: {entry.unproven}")
    elif entry.unproven is None and entry.manifest_sha256 != traced.manifest_sha256:
        traced.problems.append(f"{LINEAGE_NAME}: {traced.part}: not the manifest that what was made from it recorded")
    try:
        return parse_manifest(entry.manifest, f"{LINEAGE_NAME}: {traced.part}")
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None


def in_store(traced: Traced, look: Look) -> Manifest | None:
    """The manifest of a link as the store has it, with all its files checked; None if it is not there."""
    folder = look.store.sealed(traced.ref)
    try:
        is_here = (folder / MANIFEST_NAME).is_file()
    except OSError:
        return None
    if not is_here:
        return None
    try:
        manifest = read_manifest(folder)
        look.verify(folder, manifest)
    except IntegrityError as error:
        traced.problems.append(str(error))
        return None
    sha256 = sha256_file(folder / MANIFEST_NAME)
    pointer = look.store.pointer(traced.ref)
    if sha256 == traced.manifest_sha256:
        traced.state = look.verified
    elif pointer.is_file() and read_pointer(pointer) == sha256:
        traced.state = REMADE
        traced.notes.append(f"the store holds another making of it, of {manifest.started_at}; its files are whole")
    else:
        traced.problems.append(f"{folder / MANIFEST_NAME}: not the one that was read, nor as it was sealed")
    return manifest


def problems_of_spec(manifest: Manifest) -> Iterator[str]:
    """Whether the spec is that of the digest, and what it names that which was read."""
    try:
        spec = Spec.from_json(manifest.spec, "its spec")
        digest = spec.digest
    except (IntegrityError, ValueError, RecursionError) as error:
        yield f"its spec is damaged ({error})"
        return
    if (spec.stage, digest) != (manifest.stage, manifest.digest):
        yield f"its spec is that of {spec.stage} {digest}, and not of {manifest.stage} {manifest.digest}"
    read = {name: Ref(entry.stage, entry.digest) for name, entry in manifest.inputs.items()}
    if read != dict(spec.inputs):
        yield "what it was made from is not what its spec names"


def describe(traced: Traced, manifest: Manifest, attempts: Sequence[Attempt] = ()) -> None:
    """Let a link tell what `manifest` does."""
    traced.link = link_of(traced.part, manifest, attempts)
    traced.settings = settings_in(manifest)


def _attempts(traced: Traced, record: Record | None, look: Look) -> Sequence[Attempt]:
    """Those at a training: as the record tells, else as the store does."""
    if traced.part != "train":
        return ()
    if record is not None:
        return record.attempts
    return attempts_of(events_in(look.store.sealed(traced.ref) / EVENTS_NAME))


def read_pointer(pointer: Path) -> str:
    """The sha256 in a pointer file of the store."""
    return pointer.read_text(encoding="utf-8", errors="replace").strip()
