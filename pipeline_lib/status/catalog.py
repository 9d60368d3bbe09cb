"""Read the frozen experiments of a store and the decisions of halving."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.halving import (
    RUNG_LOGS,
    decision_path,
    read_decision,
    read_halving,
    rung_digests,
)
from pipeline_lib.config.stages import PRODUCTS, stage_of
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.files import unreadable_named
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.slurm.queue import QueuedJob


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`; empty if there is none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def changed_at(path: Path) -> float | None:
    """Return when the file at `path` last changed, in seconds since 1970; None if unreadable."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


# The frozen experiments of a store, and which of their parts are still to be made. Files in
# STORE/experiments are read as leniently as possible: those of older versions of the code are shown
# too.

LAST_PART = "report"


@dataclass(frozen=True)
class Frozen:
    """A frozen experiment: its digests by part.

    One that cannot be read has no parts, and its file's name. `unreadable` is the system's error if
    the file, which may well be intact, could not be read; else it is empty.
    """

    name: str
    path: Path
    frozen_at: float
    parts: Mapping[str, str]
    unreadable: str = ""


@dataclass
class Catalog:
    """The frozen experiments of `store`. Their files are named by content, so each is read once."""

    store: Store
    _read: dict[Path, Frozen] = field(default_factory=dict)
    _specs: dict[str, Spec] = field(default_factory=dict)

    def experiments(self, all_of_them: bool = False) -> list[Frozen]:
        """Return the newest experiment of each name, or `all_of_them`, newest first."""
        found = []
        for path in self._files():
            experiment = self._open(path)
            if experiment is not None:
                found.append(experiment)
        found.sort(key=lambda experiment: experiment.frozen_at, reverse=True)
        if all_of_them:
            return found
        return [configs[0] for configs in by_name(found).values()]

    @property
    def folder(self) -> Path:
        """The folder of frozen experiments."""
        return self.store.root / "experiments"

    def ready(self, experiment: Frozen) -> list[Spec]:
        """Return the stage instances to make next: missing ones whose inputs are all there.

        A missing input counts as done if everything made from it is there. Raises IntegrityError
        naming a spec that cannot be read.
        """
        found: dict[str, Spec] = {}
        seen: set[str] = set()
        waiting = [ref.digest for ref in missing_products(experiment, self.store)]
        while waiting:
            spec = self.spec(waiting.pop())
            if spec.digest in seen:
                continue
            seen.add(spec.digest)
            inputs = list(spec.inputs.values())
            # no input of the spec
            is_own_training = spec.digest == experiment.parts.get("train")
            if is_own_training and (plan := experiment.parts.get("plan")):
                inputs.append(Ref("plan", plan))
            missing = [ref.digest for ref in inputs if not self.store.is_sealed(ref)]
            waiting += missing
            if not missing:
                found[spec.digest] = spec
        return [found[digest] for digest in sorted(found)]

    def _files(self) -> list[Path]:
        """Return the JSON files in the folder.

        Raises Unreadable: a folder that cannot be read is not empty.
        """
        try:
            with unreadable_named(self.folder):
                return [path for path in self.folder.iterdir() if path.suffix == ".json"]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _open(self, path: Path) -> Frozen | None:
        try:
            with unreadable_named(path):
                frozen_at = path.stat().st_mtime
                known = self._read.get(path)
                if known is None or known.frozen_at != frozen_at:
                    known = self._read[path] = _frozen(path, frozen_at)
        except Unreadable as error:
            return Frozen(path.name, path, 0.0, {}, str(error))
        except (FileNotFoundError, NotADirectoryError):  # removed since the folder was listed
            return None
        return known

    def frozen(self, name: str) -> Frozen | None:
        """Return the experiment in the file called `name`; None if there is no such file."""
        if not name.isprintable() or name != Path(name).name:
            return None
        return self._open(self.folder / name)

    def spec(self, digest: str) -> Spec:
        """Return the spec with that digest. Raises IntegrityError if it cannot be read."""
        if digest not in self._specs:
            self._specs[digest] = self.store.read_spec(self.store.spec_path(digest))
        return self._specs[digest]


def by_name(experiments: Iterable[Frozen]) -> dict[str, list[Frozen]]:
    """Return the experiments by name, in their order."""
    found: dict[str, list[Frozen]] = {}
    for one in experiments:
        found.setdefault(one.name, []).append(one)
    return found


def newest_with(part: str, configs: Sequence[Frozen], store: Store) -> Frozen:
    """Return what the name of `configs` means: the newest with `part` made, else the newest.

    `configs` has the newest first. Raises Unreadable.
    """
    for one in configs:
        if part in one.parts and store.is_sealed(Ref(stage_of(part), one.parts[part])):
            return one
    return configs[0]


def said_of_newer(meant: Frozen, newest: Frozen) -> str:
    """Return a line about `newest`, a newer config of the name of `meant` that is not finished."""
    return (
        f"{meant.name}: its newest config ({newest.path.stem}) is not finished, so this is the "
        f"newest finished one ({meant.path.stem}); `qwen3 status "
        f"{shlex.quote(meant.name)}` shows how far the other is"
    )


def _frozen(path: Path, frozen_at: float) -> Frozen:
    with suppress(IsADirectoryError):
        path.open("rb").close()  # raises if the file cannot be read, which json_object hides
    value = json_object(path)
    config = value.get("config")
    parts = value.get("parts")
    name = config.get("experiment") if isinstance(config, dict) else None
    if (
        not isinstance(name, str)
        or not isinstance(parts, dict)
        or not isinstance(parts.get(LAST_PART), str)
    ):
        return Frozen(path.name, path, frozen_at, {})
    known = {part: digest for part, digest in parts.items() if isinstance(digest, str)}
    return Frozen(name, path, frozen_at, known)


def missing_products(experiment: Frozen, store: Store) -> list[Ref]:
    """Return the `PRODUCTS` of the experiment that are not there."""
    made = [part for part in PRODUCTS if part in experiment.parts]
    refs = [Ref(stage_of(part), experiment.parts[part]) for part in made]
    return [ref for ref in refs if not store.is_sealed(ref)]


def unreadable(experiment: Frozen) -> IntegrityError | Unreadable:
    """Return the error for an experiment that has no parts."""
    if experiment.unreadable:
        return Unreadable(experiment.unreadable)
    return IntegrityError(
        f"{experiment.path}: not a valid experiment file; run snakemake again with its config, or "
        "delete it"
    )


# Halving in a store: which trainings it stopped, and which are on their way to a rung. A stop
# counts as long as its sweep is the latest request of the experiment: snakemake touches the files
# that it froze, and decides anew when another experiment is added.

_JOB_TO_RUNG = re.compile(r"rule_rung_stage_wildcards_([0-9a-f]+)")


@dataclass
class Sweeps:
    """The state of the store's sweeps, read once.

    `logs` is the folder of logs, `jobs` are SLURM's.
    """

    catalog: Catalog
    logs: Path
    jobs: list[QueuedJob]
    _stopped: dict[Path, dict[str, str]] = field(default_factory=dict)

    def why_stopped(self, experiment: Frozen) -> str | None:
        """Return why the latest sweep of `experiment` stopped its training.

        None if the sweep did not stop it, or if the experiment was frozen again after the sweep.
        """
        if (path := self.latest_of(experiment)) is None:
            return None
        if path not in self._stopped:
            _, _, names = next(request for request in self._newest_first if request[1] == path)
            self._stopped[path] = self._stopped_by(path, names)
        return self._stopped[path].get(experiment.parts.get("train", ""))

    def latest_of(self, experiment: Frozen) -> Path | None:
        """Return the file of the latest sweep of `experiment`; None if it was frozen again.

        It is also None if there is no sweep.
        """
        for asked_at, path, names in self._newest_first:
            if experiment.path.name in names:
                return path if asked_at >= experiment.frozen_at else None
        return None

    def _stopped_by(self, path: Path, names: dict[str, None]) -> dict[str, str]:
        """Return why the sweep at `path` stopped trainings, by whole training, if readable."""
        halving, _ = read_halving(json_object(path).get("halving"))
        if halving is None:
            return {}
        swept = [frozen for name in names if (frozen := self.catalog.frozen(name)) is not None]
        trainings = list(dict.fromkeys(one.parts["train"] for one in swept if "train" in one.parts))
        found: dict[str, str] = {}
        with suppress(IntegrityError, Unreadable):
            for _, digest in rung_digests(halving, trainings):
                decision = read_decision(decision_path(self.catalog.store, digest))
                for one in decision.competitors:
                    if not one.goes_on:
                        why = f"at step {decision.step} of its sweep: {one.why}"
                        found[str(one.training)] = why
                if decision.next_step is None:
                    break
        return found

    @cached_property
    def _newest_first(self) -> list[tuple[float, Path, dict[str, None]]]:
        """The time of each sweep's latest request, its file, and its experiments' files."""
        found = []
        for path in (self.catalog.store.root / "sweeps").glob("*.json"):
            listed = json_object(path).get("experiments")
            if isinstance(listed, list) and (asked_at := changed_at(path)) is not None:
                names = dict.fromkeys(name for name in listed if isinstance(name, str))
                found.append((asked_at, path, names))
        return sorted(found, key=lambda one: one[0], reverse=True)

    @cached_property
    def to_rungs(self) -> dict[str, list[str]]:
        """Digests of trainings to a rung with a log or a SLURM job, by the whole one's digest."""
        digests = {path.stem for path in (self.logs / RUNG_LOGS).glob("*.log")}
        for job in self.jobs:
            digests.update(_JOB_TO_RUNG.findall(job.comment))
        found: dict[str, list[str]] = {}
        for digest in sorted(digests):
            with suppress(IntegrityError, RecursionError):
                found.setdefault(run_digest(self.catalog.spec(digest)), []).append(digest)
        return found
