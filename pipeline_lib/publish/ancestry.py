"""lineage.json of a model folder: the manifests of all that it was made from, so that a copy tells it too.

Each manifest names the sha256 of those that it was made from, up to that of the folder itself. So no link can be
edited without one above it that no longer fits. Names of people and machines stay behind: the paths of files, the
host where there is no SLURM.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline_lib.base.errors import IntegrityError, Unreadable
from pipeline_lib.base.fsio import json_text, read_json, sha256_file, sha256_text
from pipeline_lib.base.manifest import MANIFEST_NAME, Manifest, read_manifest
from pipeline_lib.base.run_folder import EVENTS_NAME
from pipeline_lib.base.spec import Ref
from pipeline_lib.base.stage import Say, Sealed
from pipeline_lib.base.store import Store
from pipeline_lib.publish.attempts import Attempt, attempts_of
from pipeline_lib.publish.lineage import events_in, place_of, settings_in

LINEAGE_NAME = "lineage.json"
REMADE, WITHOUT_PATHS = "made again since it was read", "its manifest told paths, which are left out here"
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:;,'\"()]+/)+(?=[^\s/])")


class Entry(BaseModel):
    """The manifest of a link. `unproven` says why its sha256 is not the one that was recorded of it, if it is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    manifest: dict[str, Any]
    unproven: str | None = None

    @property
    def manifest_sha256(self) -> str:
        """That of the file that this manifest was, if it is told unchanged."""
        return sha256_text(json_text(self.manifest))


class Folder(BaseModel):
    """A model folder of this pipeline that was the base of another training: its manifest and its lineage.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    manifest: dict[str, Any]
    lineage: dict[str, Any] | None = None


class Record(BaseModel):
    """What lineage.json holds: the links by part, the attempts at the training, and whence a local base model is."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = 1
    links: dict[str, Entry] = {}
    attempts: list[Attempt] = []
    base: Folder | None = None


def record_of(inputs: Mapping[str, Sealed], store: Store, say: Say) -> Record:
    """What is known of all that `inputs`, those of a merge, were made from; what the store lacks is left out."""
    links: dict[str, Entry] = {}
    waiting: list[tuple[str, Path, str | None]] = [
        (part, inputs[part].path, None) for part in sorted(inputs, key=place_of)
    ]
    asked_for = set(inputs)
    while waiting:
        part, path, wanted_sha256 = waiting.pop(0)
        try:
            manifest = read_manifest(path)
        except IntegrityError as error:
            say(f"merge: the lineage goes without {part}: {error}")
            continue
        links[part] = _entry(path, wanted_sha256)
        for name in sorted(manifest.inputs.keys() - asked_for, key=place_of):
            entry = manifest.inputs[name]
            waiting.append((name, store.sealed(Ref(entry.stage, entry.digest)), entry.manifest_sha256))
        asked_for |= manifest.inputs.keys()
    base = base_folder(inputs["model"].manifest, store)
    return Record(links=links, attempts=_attempts(inputs["train"].file(EVENTS_NAME)), base=base)


def _entry(path: Path, wanted_sha256: str | None) -> Entry:
    """The manifest at `path`; `wanted_sha256` is what was recorded of it, None of an input that was just verified."""
    manifest = read_json(path / MANIFEST_NAME)
    unproven = None if wanted_sha256 in (None, sha256_file(path / MANIFEST_NAME)) else REMADE
    if manifest["spec"].get("where"):
        manifest["spec"]["where"] = {}
        unproven = unproven or WITHOUT_PATHS
    return Entry(manifest=manifest, unproven=unproven)


def _attempts(events: Path) -> list[Attempt]:
    """Those in `events` of a training, without the names of hosts that are nobody's nodes, and without folders."""
    shown = [event if event.get("job") else {**event, "nodes": None} for event in events_in(events)]
    return [replace(attempt, end=_FOLDERS.sub("", attempt.end)) for attempt in attempts_of(shown)]


def base_folder(downloaded: Manifest, store: Store) -> Folder | None:
    """The model folder of this pipeline that a local base model is; None if it is none, or no longer there."""
    if settings_in(downloaded).get("source") != "local":
        return None
    try:
        path = Path(store.read_spec(store.spec_path(downloaded.digest)).where["path"])
        manifest = read_manifest(path)
    except (IntegrityError, Unreadable, KeyError):
        return None
    if not is_same_model(downloaded, manifest):
        return None
    found = path / LINEAGE_NAME
    lineage = None
    with suppress(OSError, ValueError, RecursionError, KeyError):
        if sha256_file(found) == manifest.files[LINEAGE_NAME].sha256:
            lineage = read_json(found)
    return Folder(manifest=read_json(path / MANIFEST_NAME), lineage=lineage)


def is_same_model(downloaded: Manifest, merged: Manifest) -> bool:
    """Whether the files of a local base model are those that a merge sealed."""
    if merged.stage != "merge":
        return False
    return bool(downloaded.files) and all(merged.files.get(name) == entry for name, entry in downloaded.files.items())


def read_record(folder: Path) -> Record | None:
    """What the lineage.json of a model folder tells; None without one. Raises IntegrityError if it is damaged."""
    path = folder / LINEAGE_NAME
    try:
        content = read_json(path)
        json_text(content)  # what is too deep to be written, or not finite, is no record
        return parse_record(content, str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged ({error})") from error


def parse_record(content: Any, where: str) -> Record:
    """The record in `content`. Raises IntegrityError naming `where` if it is none."""
    try:
        return Record.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise IntegrityError(f"{where}: damaged ({_problem(error)})") from error


def _problem(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc']) or 'it'}: {first['msg']}"


def parse_manifest(content: Any, where: str) -> Manifest:
    """The manifest in `content`. Raises IntegrityError naming `where` if it is none."""
    try:
        return Manifest.model_validate(content)
    except (ValidationError, RecursionError) as error:
        raise IntegrityError(f"{where}: damaged ({_problem(error)})") from error
