"""The frozen experiments of a store, and which of their parts are still to be made.

Files in STORE/experiments are read as leniently as possible: those of older versions of the code are shown too.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.base.fsio import unreadable_named
from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import PRODUCTS
from pipeline_lib.status.tail import json_object

LAST_PART = "report"


@dataclass(frozen=True)
class Frozen:
    """An experiment as it was frozen: digests by part. One that cannot be read has no parts, and its file's name.

    `unreadable` is the system's refusal to read the file, which may well be whole; empty where it was read.
    """

    name: str
    path: Path
    frozen_at: float
    parts: Mapping[str, str]
    unreadable: str = ""


@dataclass
class Catalog:
    """What is frozen in `store`. Files there are named by their content, so each is read once."""

    store: Store
    _read: dict[Path, Frozen] = field(default_factory=dict)
    _specs: dict[str, Spec] = field(default_factory=dict)

    def experiments(self, names: Iterable[str] = (), all_of_them: bool = False) -> list[Frozen]:
        """The newest of each name, or `all_of_them`, newest first. Raises ConfigError for a name that is not there."""
        found = [experiment for path in self._files() if (experiment := self._open(path)) is not None]
        found.sort(key=lambda experiment: experiment.frozen_at, reverse=True)
        wanted = set(names)
        if unknown := sorted(wanted - {experiment.name for experiment in found}):
            known = ", ".join(sorted({experiment.name for experiment in found})) or "none"
            raise ConfigError(
                str(self.folder), [f"{name}: no experiment of that name; known: {known}" for name in unknown]
            )
        if wanted:
            found = [experiment for experiment in found if experiment.name in wanted]
        if all_of_them:
            return found
        newest: dict[str, Frozen] = {}
        for experiment in found:
            newest.setdefault(experiment.name, experiment)
        return list(newest.values())

    @property
    def folder(self) -> Path:
        """Where experiments are frozen."""
        return self.store.root / "experiments"

    def ready(self, experiment: Frozen) -> list[Spec]:
        """The stage instances to be made next: those that are missing, and miss nothing themselves.

        What is no longer needed because all that was made from it is there counts as done.
        Raises IntegrityError naming a spec that cannot be read.
        """
        found: dict[str, Spec] = {}
        seen: set[str] = set()
        waiting = [ref.digest for ref in missing_products(experiment, self.store)]
        while waiting:
            spec = self.spec(waiting.pop())
            if spec.digest in seen:
                continue
            seen.add(spec.digest)
            missing = [ref.digest for ref in self._read_by(spec, experiment) if not self.is_done(ref)]
            waiting += missing
            if not missing:
                found[spec.digest] = spec
        return [found[digest] for digest in sorted(found)]

    def is_done(self, ref: Ref) -> bool:
        """Whether the sealed directory of `ref` is there."""
        return self.store.is_sealed(ref)

    def train(self, experiment: Frozen) -> Ref | None:
        """The experiment's training."""
        digest = experiment.parts.get("train")
        return Ref("train", digest) if digest else None

    def _read_by(self, spec: Spec, experiment: Frozen) -> list[Ref]:
        """What `spec` reads, and the plan that places a training, which is no input of its spec."""
        plan = experiment.parts.get("plan") if spec.stage == "train" else None
        return [*spec.inputs.values(), *([Ref("plan", plan)] if plan else [])]

    def _files(self) -> list[Path]:
        """Those in the folder. Raises Unreadable: a folder that cannot be read is not empty."""
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
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
            return None
        return known

    def frozen(self, name: str) -> Frozen | None:
        """The experiment in the file called `name`; None if there is none."""
        return self._open(self.folder / name) if name.isprintable() and name == Path(name).name else None

    def spec(self, digest: str) -> Spec:
        """The spec with that digest. Raises IntegrityError if it cannot be read."""
        if digest not in self._specs:
            self._specs[digest] = self.store.read_spec(self.store.spec_path(digest))
        return self._specs[digest]


def _frozen(path: Path, frozen_at: float) -> Frozen:
    with suppress(IsADirectoryError):
        path.open("rb").close()  # json_object hides what cannot be read
    value = json_object(path)
    config, parts = value.get("config"), value.get("parts")
    name = config.get("experiment") if isinstance(config, dict) else None
    if not isinstance(name, str) or not isinstance(parts, dict) or not isinstance(parts.get(LAST_PART), str):
        return Frozen(path.name, path, frozen_at, {})
    return Frozen(name, path, frozen_at, {part: digest for part, digest in parts.items() if isinstance(digest, str)})


def missing_products(experiment: Frozen, store: Store) -> list[Ref]:
    """Those of its `PRODUCTS` that are not there."""
    refs = [Ref(part, experiment.parts[part]) for part in PRODUCTS if part in experiment.parts]
    return [ref for ref in refs if not store.is_sealed(ref)]


def unreadable(experiment: Frozen) -> IntegrityError | Unreadable:
    """What to say of an experiment that has no parts."""
    if experiment.unreadable:
        return Unreadable(experiment.unreadable)
    return IntegrityError(
        f"{experiment.path}: not a frozen experiment; run snakemake again with its config, or delete it"
    )
