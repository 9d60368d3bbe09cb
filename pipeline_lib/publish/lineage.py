"""What a result was made from: the links from a model back to the sources, as the manifests tell it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline_lib.base.events import read_events
from pipeline_lib.base.manifest import Manifest
from pipeline_lib.base.run_folder import EVENTS_NAME
from pipeline_lib.base.stage import Sealed
from pipeline_lib.publish.attempts import Attempt, attempts_of

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
