"""Where a model comes from, as its folder carries it: links, attempts, and the manifests behind them."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline_lib.core.errors import CONTINUES, IntegrityError, Unreadable
from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import json_text, read_json, sha256_file, sha256_text
from pipeline_lib.core.run_folder import EVENTS_NAME
from pipeline_lib.core.stage import Say, Sealed
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, Ref, Store, read_manifest

# What became of each attempt at a training: where it ran, from which step, and what ended it.

Event = Mapping[str, Any]
_ENDS = ("run.end", "run.interrupted", "run.failed", "run.requeued", "run.requeue_refused")


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, of a SLURM `job`. `first_step` is the step that it went on from, 0 from the start."""

    number: int
    place: str
    first_step: int
    end: str
    job: str = ""


def attempts_of(events: Sequence[Event]) -> list[Attempt]:
    """Those that left the event `run.launched`, in order."""
    found = []
    for event in events:
        number = event.get("attempt")
        if event.get("event") != "run.launched" or not isinstance(number, int):
            continue
        own = [other for other in events if other.get("attempt") == number]
        resumed = next(_named(own, "run.resumed"), {}).get("step")
        found.append(
            Attempt(
                number=number,
                place=_place(event),
                first_step=resumed if isinstance(resumed, int) else 0,
                end=_end(own),
                job=str(event.get("job") or ""),
            )
        )
    return found


def _place(launched: Event) -> str:
    """`4 ranks by srun on n1, n2 in SLURM job 7`."""
    text = f"{launched.get('ranks', '?')} ranks by {launched.get('launcher', '?')}"
    if isinstance(nodes := launched.get("nodes"), list) and nodes:
        text += f" on {', '.join(map(str, nodes))}"
    return f"{text} in SLURM job {launched['job']}" if launched.get("job") else text


def _end(own: Sequence[Event]) -> str:
    """By what came last of all that ends an attempt; the launcher's reason names whom the ranks themselves missed."""
    ends = [event for event in own if event.get("event") in _ENDS]
    last = ends[-1].get("event") if ends else None
    if last == "run.end":
        return "done"
    causes = list(filter(None, [_reason(ends), *map(_hang, _named(own, "flight.read"))]))
    told = "; ".join(causes) or "interrupted without a word: killed, or its node lost"
    if last == "run.requeued":
        return f"{told}; queued again at step {ends[-1].get('step', '?')}"
    return f"{told}; not queued again: {_first_line(ends[-1])}" if last == "run.requeue_refused" else told


def _reason(ends: Sequence[Event]) -> str:
    """Why it ended, without what was to be done then."""
    told = [event for event in ends if event.get("event") not in ("run.end", "run.requeue_refused")]
    return _first_line(told[0]).replace(f"; {CONTINUES}", "") if told else ""


def _first_line(event: Event) -> str:
    return str(event.get("reason") or "interrupted").splitlines()[0]


def _hang(event: Event) -> str:
    return "by NCCL's flight recorder, " + ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in ("at", "monotonic_s", "event", "attempt")
    )


def _named(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (event for event in events if event.get("event") == name)


# What a result was made from: the links from a model back to the sources, as the manifests tell it.

CODE = "code"  # the key of the commit among the versions
NEWEST_FIRST = ("report", "evaluate", "merge", "train", "shard", "tokenize", "data", "generation", "model")


@dataclass(frozen=True)
class Link:
    """One stage instance of the chain. `made_from` are its inputs, by part and digest; `sources` are texts.

    `job` names the SLURM jobs that made it. Durations are in seconds; `restarts` are those of a training.
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


def chain(inputs: Mapping[str, Sealed]) -> list[Link]:
    """The links of `inputs`, sealed directories by part, the newest first."""
    return [
        link_of(part, inputs[part].manifest, attempts_of(events_in(inputs[part].file(EVENTS_NAME))))
        for part in sorted(inputs, key=place_of)
    ]


def events_in(path: Path) -> list[dict[str, Any]]:
    """Those that a training left in its sealed file at `path`; of other stages, which have no such file, none."""
    return [event for event in read_events(path) if isinstance(event, dict)]


def link_of(part: str, manifest: Manifest, attempts: Sequence[Attempt] = ()) -> Link:
    """The link that `manifest` tells of; `attempts` are those of a training."""
    return Link(
        part=part,
        stage=manifest.stage,
        digest=manifest.digest,
        made_from=[(name, entry.digest) for name, entry in sorted(manifest.inputs.items(), key=_place_of_item)],
        sources=sources_of(manifest),
        versions=manifest.versions,
        machine=manifest.machine or None,
        job=", ".join(dict.fromkeys(filter(None, [*(attempt.job for attempt in attempts), manifest.job]))) or None,
        started_at=manifest.started_at,
        duration_s=manifest.duration_s,
        restarts=max(0, len(attempts) - 1),
        attempts=attempts,
    )


def settings_in(manifest: Manifest) -> Mapping[str, Any]:
    """Those of the spec that a manifest holds; none where it holds something else."""
    settings = manifest.spec.get("settings")
    return settings if isinstance(settings, dict) else {}


def sources_of(manifest: Manifest) -> list[str]:
    """Where a download came from, and every file that arrived with its sha256; of other stages nothing."""
    if manifest.stage != "download":
        return []
    return [origin_of(manifest), *(f"{name} sha256:{entry.sha256}" for name, entry in sorted(manifest.files.items()))]


def origin_of(manifest: Manifest) -> str:
    """Where a download came from: `modelscope Qwen/Qwen3-8B@COMMIT`, `files of this machine`."""
    told = settings_in(manifest)
    source = str(told.get("source", "unknown"))
    if "name" in told:
        return f"{source} {told['name']}@{told.get('revision', 'unknown')}"
    made_by = {"tiny": "built by the pipeline", "pydoc": "made of the documentation of Python"}
    if source in made_by:
        content = told.get("content")
        python = content.get("python") if isinstance(content, dict) else None
        return f"{source}: {made_by[source]}" + (f" {python}" if python and source == "pydoc" else "")
    return {"file": "files of the machine", "local": "a model folder of the machine"}.get(source, source)


def attempt_text(attempt: Attempt) -> str:
    """`2 ranks by torchrun, from step 50: done`."""
    start = f"from step {attempt.first_step}" if attempt.first_step else "from the start"
    return f"{attempt.place}, {start}: {attempt.end}"


def code_text(versions: Mapping[str, str]) -> str:
    """The commit of the code, and whether it had been changed since."""
    commit = versions.get(CODE)
    if commit is None:
        return "not known: not run from a git repository"
    dirty = commit.endswith("-dirty")
    return f"{commit.removesuffix('-dirty')}, with changes that were not committed" if dirty else commit


def place_of(part: str) -> tuple[int, int]:
    """Where `part` (`train`, `data.1`) stands in the chain, from the newest."""
    name, _, number = part.partition(".")
    known = NEWEST_FIRST.index(name) if name in NEWEST_FIRST else len(NEWEST_FIRST)
    return known, int(number) if number.isdecimal() else 0


def _place_of_item(item: tuple[str, Any]) -> tuple[int, int]:
    return place_of(item[0])


# lineage.json of a model folder: the manifests of all that it was made from, so that a copy tells it too.
#
# Each manifest names the sha256 of those that it was made from, up to that of the folder itself. So no link can be
# edited without one above it that no longer fits. Names of people and machines stay behind: the paths of files, the
# host where there is no SLURM.

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
