"""A model folder's trace back to its sources, each available digest checked, as a tree or JSON."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from pipeline_lib.config.stages import STAGES
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.files import json_text, sha256_file, sha256_text
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
from pipeline_lib.core.text import one_line, redact
from pipeline_lib.core.units import seconds
from pipeline_lib.lineage.record import (
    CODE,
    LINEAGE_NAME,
    Lineage,
    LineageLink,
    attempt_text,
    code_text,
    is_same_model,
    link_of,
    newest_first,
    parse_lineage,
    parse_manifest,
    read_lineage,
    settings_in,
)

# Checks of one link: what it is, and whether it is unchanged since it was read.

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


# The trace: the folder is checked against its manifest, each manifest against the SHA-256 that the
# link above recorded, and each spec against its digest. For links that are in the store, all files
# are checked too.

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
    waiting = [(merge.traced, merge.manifest)]
    base = None
    while waiting:
        above, manifest = waiting.pop(0)
        for part in sorted(manifest.inputs, key=newest_first):
            wanted = manifest.inputs[part]
            ref = Ref(wanted.stage, wanted.digest)
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
            if found is not None:
                waiting.append((traced, found))
            if found is not None and part == "model":
                base = _attach_base(traced, found, merge.record, checks)
    return base


def _attach_base(
    traced: Traced, downloaded: Manifest, record: Lineage | None, checks: Checks
) -> _Merge | None:
    """Attach the merge that made a local base model below it, if this pipeline did."""
    if settings_in(downloaded).get("source") != "local":
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
    if not is_same_model(downloaded, manifest):
        below.problems.append(f"{where}: not the model that was fine-tuned: its files differ")
    elif not below.problems and in_store(below, checks) is None:
        mark_recorded(below)
    return _Merge(below, manifest, own)


# Output: the trace as a tree for people, and as JSON for programs.

STYLES = {
    VERIFIED: "green",
    SAME_SIZES: "green",
    RECORDED: "yellow",
    REMADE: "yellow",
    DAMAGED: "bold red",
}
NAME_CHARS = 11
_IN_ORIGIN = frozenset({"kind", "source", "name", "revision", "content"})


def show(root: Traced, stream: TextIO) -> None:
    """Write the tree to `stream`, one line per fact."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in _tree(root, "", "", {}):
        console.print(line, soft_wrap=True)
    states = [traced.state for traced in root.walk()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(Text(f"\n{len(states)} links: {counts}"), soft_wrap=True)


def to_json(root: Traced) -> str:
    """Return the trace as JSON: nested objects with stable keys, credentials masked."""
    return redact(json.dumps(_object(root), indent=2))


def problems_of(root: Traced) -> list[str]:
    """Return all problems in a trace."""
    return [one_line(problem) for traced in root.walk() for problem in traced.problems]


@contextmanager
def status_line_on(stream: TextIO) -> Iterator[Say]:
    """Yield a `say` that shows a transient status on a terminal; elsewhere it prints nothing."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(one_line(text)))


def facts_of(
    link: LineageLink, settings: Mapping[str, Any], above: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the facts of a link by name; of its versions only those that differ from `above`."""
    made = [link.started_at, f"in {seconds(link.duration_s)}"]
    if link.machine:
        made.append(f"on {link.machine}")
    if link.job:
        made.append(f"in SLURM job {link.job}")
    yield "made", ", ".join(made)
    if not above or link.versions.get(CODE) != above.get(CODE):
        yield CODE, code_text(link.versions)
    others = []
    for name, version in link.versions.items():
        if name != CODE and above.get(name) != version:
            others.append(f"{name} {version}")
    if others:
        yield "versions", ", ".join(others)
    texts = []
    for key, value in settings.items():
        if link.stage == "download" and key in _IN_ORIGIN:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts.append(f"{key}: {text}")
    if texts:
        yield "settings", ", ".join(texts)
    for origin in link.sources[:1]:
        yield "source", origin
    for file in link.sources[1:]:
        yield "file", file
    for attempt in link.attempts:
        yield f"attempt {attempt.number}", attempt_text(attempt)


def _tree(traced: Traced, first: str, rest: str, above: Mapping[str, str]) -> Iterator[Text]:
    """Yield the lines of a link and those below; the first has prefix `first`, others `rest`."""
    head = Text(first, "dim")
    head.append(one_line(f"{traced.part} {traced.ref.digest}"), "not dim bold")
    head.append("  ")
    head.append(traced.state, STYLES.get(traced.state, "yellow"))
    yield head
    bar = rest + ("│  " if traced.inputs else "   ")
    versions = dict(above)
    if traced.link is not None:
        for name, text in facts_of(traced.link, traced.settings, above):
            yield Text(bar, "dim").append(_fact(name, text), "not dim")
        versions = dict(traced.link.versions)
    yield Text(bar, "dim").append(_fact("manifest", f"sha256:{traced.manifest_sha256}"), "not dim")
    for note in traced.notes:
        yield Text(bar, "dim").append(one_line(note), "yellow")
    for problem in traced.problems:
        yield Text(bar, "dim").append(one_line(problem), "bold red")
    for below in traced.inputs:
        if below is traced.inputs[-1]:
            yield from _tree(below, f"{rest}└─ ", f"{rest}   ", versions)
        else:
            yield from _tree(below, f"{rest}├─ ", f"{rest}│  ", versions)


def _fact(name: str, text: str) -> str:
    return f"{name:<{NAME_CHARS}}{one_line(text)}"


def _object(traced: Traced) -> dict[str, Any]:
    link = traced.link
    known: dict[str, Any] = {}
    if link is not None:
        attempts = []
        for one in link.attempts:
            attempt = dict(vars(one))
            del attempt["job"]
            attempts.append(attempt)
        known = {
            "settings": dict(traced.settings),
            "sources": link.sources,
            "versions": dict(link.versions),
            "machine": link.machine,
            "job": link.job,
            "started_at": link.started_at,
            "duration_s": link.duration_s,
            "restarts": link.restarts,
            "attempts": attempts,
        }
    return {
        "part": traced.part,
        "stage": traced.ref.stage,
        "digest": traced.ref.digest,
        "state": traced.state,
        "manifest_sha256": traced.manifest_sha256,
        **known,
        "notes": traced.notes,
        "problems": traced.problems,
        "made_from": [_object(below) for below in traced.inputs],
    }
