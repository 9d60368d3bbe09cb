"""A model's lineage as its folder stores it: links, training attempts, all stages' manifests."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline_lib.config.spec_settings import ADAPTER_PART, ROOT
from pipeline_lib.config.stages import place_of
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.files import json_text, read_json, sha256_file, sha256_text
from pipeline_lib.core.run_folder import EVENTS_NAME
from pipeline_lib.core.run_record import Attempt, RunRecord
from pipeline_lib.core.stage import Say, Sealed
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, Ref, Store, read_manifest

EXPERIMENT = "experiment"  # the source of a model that another experiment trained
CODE = "code"  # the key of the git commit in `versions`


@dataclass(frozen=True)
class LineageLink:
    """One stage instance of the lineage.

    `made_from` lists its inputs by part and digest; `sources` is text. `job` names the SLURM jobs
    that made it. `duration_s` is in seconds; `restarts` counts those of a training.
    """

    part: str
    stage: str
    digest: str
    made_from: list[tuple[str, str]]
    sources: list[str]
    versions: Mapping[str, str]
    machine: str | None
    job: str | None
    started_at: str
    duration_s: float
    restarts: int
    attempts: Sequence[Attempt] = field(default=())


def chain(inputs: Mapping[str, Sealed]) -> list[LineageLink]:
    """Return the links of `inputs` (sealed directories by part), newest stage first."""
    links = []
    for part in sorted(inputs, key=newest_first):
        attempts = RunRecord.read(inputs[part].file(EVENTS_NAME)).attempts
        links.append(link_of(part, inputs[part].manifest, attempts))
    return links


def link_of(part: str, manifest: Manifest, attempts: Sequence[Attempt] = ()) -> LineageLink:
    """Return the link that `manifest` describes; `attempts` are those of a training."""
    jobs = [attempt.job for attempt in attempts]
    jobs.append(manifest.job)
    return LineageLink(
        part=part,
        stage=manifest.stage,
        digest=manifest.digest,
        made_from=[
            (name, manifest.inputs[name].digest)
            for name in sorted(manifest.inputs, key=newest_first)
        ],
        sources=sources_of(manifest),
        versions=manifest.versions,
        machine=manifest.machine or None,
        job=", ".join(dict.fromkeys(filter(None, jobs))) or None,
        started_at=manifest.started_at,
        duration_s=manifest.duration_s,
        restarts=sum(not attempt.is_completed for attempt in attempts[:-1]),
        attempts=attempts,
    )


def settings_in(manifest: Manifest) -> Mapping[str, Any]:
    """Return the settings of the manifest's spec; empty if they are no mapping."""
    settings = manifest.spec.get("settings")
    return settings if isinstance(settings, dict) else {}


def sources_of(manifest: Manifest) -> list[str]:
    """Return the origin of a download and the SHA-256 of each file; empty for other stages."""
    if manifest.stage != "download":
        return []
    sources = [origin_of(manifest)]
    for name, entry in sorted(manifest.files.items()):
        sources.append(f"{name} sha256:{entry.sha256}")
    return sources


def origin_of(manifest: Manifest) -> str:
    """Describe a download's origin: `modelscope Qwen/Qwen3-8B@COMMIT`, `files of the machine`."""
    settings = settings_in(manifest)
    source = str(settings.get("source", "unknown"))
    if "name" in settings:
        return f"{source} {settings['name']}@{settings.get('revision', 'unknown')}"
    if source == "tiny":
        return "tiny: built by the pipeline"
    if source == "pydoc":
        content = settings.get("content")
        python = content.get("python") if isinstance(content, dict) else None
        version = f" {python}" if python else ""
        return f"pydoc: made of the documentation of Python{version}"
    if source == "file":
        return "files of the machine"
    if source == "local" and settings.get("kind") == ADAPTER_PART:
        return "an adapter folder of the machine"
    if source == "local":
        return "a model folder of the machine"
    if source == EXPERIMENT:
        merged = manifest.inputs["merge"].digest if "merge" in manifest.inputs else "unknown"
        return f"experiment {manifest.counts.get('experiment', 'unknown')}, merge {merged}"
    return source


def attempt_text(attempt: Attempt) -> str:
    """Describe an attempt: `2 ranks by spawn, from step 50: done`."""
    start = f"from step {attempt.first_step}" if attempt.first_step else "from the start"
    return f"{attempt.place}, {start}: {attempt.end}"


def code_text(versions: Mapping[str, str]) -> str:
    """Describe the commit of the code, and whether it had uncommitted changes."""
    commit = versions.get(CODE)
    if commit is None:
        return "unknown: not run from a git repository"
    if commit.endswith("-dirty"):
        return f"{commit.removesuffix('-dirty')}, with changes that were not committed"
    return commit


def newest_first(part: str) -> tuple[int, int]:
    """Return the sort key of `part` (`train`, `data.1`) in the lineage: the last stage is first."""
    place, number = place_of(part)
    return -place, number


# lineage.json of a model folder: the manifests of everything it was made from, so that a copied
# folder has them too. Each manifest records the SHA-256 of its inputs' manifests, so an edited link
# does not match the manifest above it. File paths, and host names outside SLURM, are left out
# because they may identify people and machines.

LINEAGE_NAME = "lineage.json"
REMADE = "made again since it was read"
WITHOUT_PATHS = "its manifest contains paths, which are left out here"
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:;,'\"()]+/)+(?=[^\s/])")


class ManifestEntry(BaseModel):
    """A link's manifest. `unproven` says why its SHA-256 is not the recorded one; None if it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    manifest: dict[str, Any]
    unproven: str | None = None

    @property
    def manifest_sha256(self) -> str:
        """The SHA-256 of the manifest's file, provided that the manifest was recorded unchanged."""
        return sha256_text(json_text(self.manifest))


class Folder(BaseModel):
    """A base model that this pipeline made: its manifest and its lineage.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    manifest: dict[str, Any]
    lineage: dict[str, Any] | None = None


class Lineage(BaseModel):
    """The content of lineage.json: links by part, attempts, the origin of a base model made here."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = 1
    links: dict[str, ManifestEntry] = {}
    attempts: list[Attempt] = []
    base: Folder | None = None


def lineage_of(inputs: Mapping[str, Sealed], store: Store, say: Say) -> Lineage:
    """Return the record of everything that `inputs`, the inputs of a merge, were made from.

    Links whose manifest is not in the store are left out and reported to `say`.
    """
    links: dict[str, ManifestEntry] = {}
    waiting: list[tuple[str, Path, str | None]] = []
    for part in sorted(inputs, key=newest_first):
        waiting.append((part, inputs[part].path, None))
    asked_for = set(inputs)
    while waiting:
        part, path, wanted_sha256 = waiting.pop(0)
        try:
            manifest = read_manifest(path)
        except IntegrityError as error:
            say(f"merge: the lineage leaves out {part}: {error}")
            continue
        links[part] = _entry(path, wanted_sha256)
        if manifest.stage == "download":  # what made a base model is in the lineage of that
            continue
        for name in sorted(manifest.inputs, key=newest_first):
            entry = manifest.inputs[name]
            read = part_read(name, entry.digest, inputs["model"].manifest)
            if read not in asked_for:
                sealed = store.sealed(Ref(entry.stage, entry.digest))
                waiting.append((read, sealed, entry.manifest_sha256))
                asked_for.add(read)
    # Attempts without folder paths, and without the name of a machine that trained alone.
    public = []
    for event in RunRecord.read(inputs["train"].file(EVENTS_NAME)).events:
        public.append(event if _has_public_nodes(event) else {**event, "nodes": None})
    attempts = []
    for attempt in RunRecord(public).attempts:
        attempts.append(replace(attempt, end=_FOLDERS.sub("", attempt.end)))
    of_base = inputs["model"].manifest
    if part_of_base(links) == ADAPTER_PART:  # which were trained on this model
        of_base = parse_manifest(links[ADAPTER_PART].manifest, ADAPTER_PART)
    base = base_folder(of_base, store)
    return Lineage(links=links, attempts=attempts, base=base)


def part_read(name: str, digest: str, trained: Manifest) -> str:
    """Return the part of the input `name` of a stage before the training of the model `trained`.

    Of a model that another experiment has trained, what needs only a tokenizer read the model at
    the beginning of the chain: that is the part ROOT.
    """
    is_of_experiment = settings_in(trained).get("source") == EXPERIMENT
    if name == "model" and is_of_experiment and digest != trained.digest:
        return ROOT
    return name


def part_of_base(links: Mapping[str, ManifestEntry]) -> str:
    """Return which of `links` the experiment before has made, if any: adapters, or the model."""
    entry = links.get(ADAPTER_PART)
    if entry is not None:
        with suppress(IntegrityError):
            settings = settings_in(parse_manifest(entry.manifest, ADAPTER_PART))
            if settings.get("source") == EXPERIMENT:
                return ADAPTER_PART
    return "model"


def _has_public_nodes(event: Mapping[str, Any]) -> bool:
    """Return whether the nodes of an event are those of a cluster, or several hosts."""
    nodes = event.get("nodes")
    return bool(event.get("job")) or (isinstance(nodes, list) and len(nodes) > 1)


def _entry(path: Path, wanted_sha256: str | None) -> ManifestEntry:
    """Return the entry for the manifest at `path`, without paths of this machine.

    `wanted_sha256` is the recorded SHA-256 of the manifest; None for an input that was just
    verified.
    """
    manifest = read_json(path / MANIFEST_NAME)
    unproven = None if wanted_sha256 in (None, sha256_file(path / MANIFEST_NAME)) else REMADE
    if manifest["spec"].get("where"):
        manifest["spec"]["where"] = {}
        unproven = unproven or WITHOUT_PATHS
    return ManifestEntry(manifest=manifest, unproven=unproven)


def base_folder(downloaded: Manifest, store: Store) -> Folder | None:
    """Return the manifest and lineage of a base model that this pipeline made.

    It is another experiment's, or in a local folder. Returns None if the base is something else,
    has other files now or cannot be read.
    """
    if settings_in(downloaded).get("source") not in ("local", EXPERIMENT):
        return None
    for path in _folders_of_base(downloaded, store):
        with suppress(IntegrityError, Unreadable):
            manifest = read_manifest(path)
            if is_same_model(downloaded, manifest):
                return _folder(path, manifest)
    return None


def _folders_of_base(downloaded: Manifest, store: Store) -> Iterator[Path]:
    """Yield where a base model may lie with its manifest.

    That of an experiment is in the store. Of a local one, the spec has the path of who wrote it
    last, which may be another user's copy without a manifest: all who work with the store have its
    own merges.
    """
    if "merge" in downloaded.inputs:
        yield store.sealed(Ref("merge", downloaded.inputs["merge"].digest))
        return
    with suppress(IntegrityError, KeyError):
        yield Path(store.read_spec(store.spec_path(downloaded.digest)).where["path"])
    yield from sorted(path for path in (store.root / "merge").glob("*") if path.is_dir())


def _folder(path: Path, manifest: Manifest) -> Folder:
    """Return the manifest in `path`, read as `manifest`, with the lineage that it sealed."""
    found = path / LINEAGE_NAME
    lineage = None
    with suppress(OSError, ValueError, RecursionError, KeyError):
        if sha256_file(found) == manifest.files[LINEAGE_NAME].sha256:
            lineage = read_json(found)
    return Folder(manifest=read_json(path / MANIFEST_NAME), lineage=lineage)


def is_same_model(downloaded: Manifest, merged: Manifest) -> bool:
    """Return whether `merged` is a merge that sealed every file of the base `downloaded`."""
    if merged.stage != "merge":
        return False
    return bool(downloaded.files) and all(
        merged.files.get(name) == entry for name, entry in downloaded.files.items()
    )


def read_lineage(folder: Path) -> Lineage | None:
    """Return the lineage.json of a model folder; None if there is none.

    Raises IntegrityError if it is damaged or cannot be read.
    """
    path = folder / LINEAGE_NAME
    try:
        content = read_json(path)
        json_text(content)  # fails for content that is nested too deep or not finite
        return parse_lineage(content, str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged ({error})") from error


def parse_lineage(content: Any, where: str) -> Lineage:
    """Return the record in `content`. Raises IntegrityError naming `where` if it is invalid."""
    return _parsed(Lineage, content, where)


def parse_manifest(content: Any, where: str) -> Manifest:
    """Return the manifest in `content`. Raises IntegrityError naming `where` if it is invalid."""
    return _parsed(Manifest, content, where)


Document = TypeVar("Document", bound=BaseModel)


def _parsed(kind: type[Document], content: Any, where: str) -> Document:
    try:
        return kind.model_validate(content)
    except RecursionError as error:
        raise IntegrityError(f"{where}: damaged (nested too deep)") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        raise IntegrityError(f"{where}: damaged ({key}: {first['msg']})") from error
