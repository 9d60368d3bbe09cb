"""Answers Snakemake's questions about experiments: what to make, from what, under which title.

The main process compiles the YAML and freezes the result; jobs that parse the Snakefile again (on cluster
nodes) read the frozen one, so that editing the YAML meanwhile changes nothing that was submitted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import ConfigError, IntegrityError
from pipeline_lib.base.fsio import canonical_json, read_json, replace_link, sha256_text, write_json
from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.base.spec import DIGEST_CHARS, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment, of_each, open_experiments
from pipeline_lib.config.rehearsal import Rehearsal, rehearsal_of
from pipeline_lib.config.schema import Config

FROZEN_VARIABLE = "PIPELINE_FROZEN_EXPERIMENT"
DEFAULT_CONFIG = Path("config/config.yaml")
RESULTS = Path("results")


@dataclass(frozen=True)
class Dag:
    """The experiments of a config file in a store, as Snakemake sees them: one, or those of a sweep."""

    experiments: tuple[Experiment, ...]
    store: Store

    @staticmethod
    def compile(configfiles: list[str], overrides: Mapping[str, object], store: Store) -> "Dag":
        """Compile the one config file and freeze its specs. Raises ConfigError."""
        if overrides:
            keys = ", ".join(sorted(overrides))
            raise ConfigError("--config", [f"{keys}: not read; edit the YAML or give another with --configfile"])
        if len(configfiles) > 1:
            raise ConfigError("--configfile", [f"one file is read, not {len(configfiles)}: {', '.join(configfiles)}"])
        path = Path(configfiles[0]) if configfiles else DEFAULT_CONFIG
        dag = Dag(open_experiments(path, store), store)
        store.write_specs(dag._placed.specs.values())
        store.drop_dangling_pointers(dag._placed.specs.values())
        return dag

    @property
    def experiment(self) -> Experiment:
        """The only one, or of a sweep the first."""
        return self.experiments[0]

    @cached_property
    def rehearsal(self) -> Rehearsal | None:
        """How the first experiment is rehearsed, if it has enough steps; `all` does not ask for it."""
        return rehearsal_of(self.experiment)

    def refuse(self, check: Callable[[Config], None]) -> None:
        """Raise one ConfigError with all that `check` raises for any of the experiments."""
        of_each([experiment.config for experiment in self.experiments], "the experiments of the sweep", check)

    def freeze(self) -> Path:
        """Write each experiment under the hash of its content; returns the path for `FROZEN_VARIABLE`.

        Of a sweep that is a file that lists the experiments.
        """
        frozen = [_freeze(experiment, self.store) for experiment in self.experiments]
        if len(frozen) == 1:
            return frozen[0].resolve()
        names = [path.name for path in frozen]
        return _write_hashed(self.store.root / "sweeps", {"experiments": names}).resolve()

    @staticmethod
    def thaw(path: Path, store: Store) -> "Dag":
        """What `freeze` wrote: a sweep, or one experiment. Raises IntegrityError."""
        try:
            frozen = read_json(path)
            if "experiments" not in frozen:
                return Dag((_thaw(frozen, store),), store)
            first, *others = (path.parent.parent / "experiments" / name for name in frozen["experiments"])
            return Dag(tuple(_thaw(read_json(one), store) for one in (first, *others)), store)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{path}: cannot read the frozen experiment ({error}); run snakemake anew") from error

    def config_of(self, digest: str) -> Config:
        """The config of an experiment with that stage instance: of one that is shared, the first."""
        return self._owner(digest).config

    def pointer(self, part: str) -> str:
        """The file that says that `part` of the (first) experiment is done."""
        return str(self.store.pointer(self.experiment.ref(part)))

    def pointers(self, part: str) -> list[str]:
        """Those of all experiments, each once."""
        return list(dict.fromkeys(str(self.store.pointer(one.ref(part))) for one in self.experiments))

    def plan_pointer(self, digest: str) -> str:
        """The plan that places the training `digest`."""
        return str(self.store.pointer(self._owner(digest).ref("plan")))

    def pointers_read_by(self, digest: str) -> list[str]:
        """The pointers of everything that the stage instance `digest` reads, or has to wait for."""
        refs = [ref for _, ref in sorted(self._spec(digest).inputs.items())]
        refs += self.rehearsal.waits_for(digest) if self.rehearsal else []
        return [str(self.store.pointer(ref)) for ref in refs]

    def title(self, digest: str) -> str:
        """One line about a stage instance, for the job list of a dry run."""
        config, spec = self.config_of(digest), self._spec(digest)
        where = f"{config.cluster.ranks} {config.cluster.device} ranks"
        parts = [part for part, each in self._owner(digest).specs.items() if each.digest == digest]
        details = {
            "download": ", ".join(parts),
            "tokenize": f"{len(config.data.train)} sources, up to {config.tokenize.max_tokens} tokens a sample",
            "shard": f"blocks of {config.shard.block_tokens} tokens in {config.shard.shards} files",
            "plan": where,
            "train": f"{config.train.method} fine-tuning by {config.train.strategy} on {where}",
            "merge": "model folder in Hugging Face format, checked against the trained model",
            "evaluate": "base against tuned on held-out answers",
            "report": "one page with everything",
        }
        detail = (self.rehearsal and self.rehearsal.title(digest)) or details[spec.stage]
        others = len(self._placed.owners[digest]) - 1
        shared = f", shared with {others} more" if others else ""
        return f"{config.experiment}: {spec.stage} ({detail}{shared})"

    def titles(self) -> dict[str, str]:
        """The titles of all stage instances, by digest."""
        return {digest: self.title(digest) for digest in self._placed.specs}

    def link_results(self, results: Path = RESULTS) -> None:
        """Point RESULTS/NAME/{report.html,model} of each experiment at what is finished."""
        for experiment in self.experiments:
            link_results(experiment, self.store, results)

    @cached_property
    def _placed(self) -> "_Placed":
        """Every stage instance, after all that it reads, with the experiments that it belongs to."""
        specs: dict[str, Spec] = {}
        owners: dict[str, list[Experiment]] = {}
        for experiment in self.experiments:
            for digest, spec in {spec.digest: spec for spec in experiment.specs.values()}.items():
                specs.setdefault(digest, spec)
                owners.setdefault(digest, []).append(experiment)
        for spec in self.rehearsal.specs if self.rehearsal else ():
            specs.setdefault(spec.digest, spec)
            owners.setdefault(spec.digest, [self.experiment])
        return _Placed(specs, owners)

    def _owner(self, digest: str) -> Experiment:
        self._spec(digest)
        return self._placed.owners[digest][0]

    def _spec(self, digest: str) -> Spec:
        """The spec with that digest. Only these experiments', since their plans place them."""
        spec = self._placed.specs.get(digest)
        if spec is None:
            name = self.experiment.name
            raise IntegrityError(f"{digest}: no stage of experiment {name!r}; ask for its own targets")
        return spec


@dataclass(frozen=True)
class _Placed:
    specs: dict[str, Spec]
    owners: dict[str, list[Experiment]]


def link_results(experiment: Experiment, store: Store, results: Path = RESULTS) -> dict[str, Path]:
    """Point RESULTS/NAME/{report.html,model} at what is finished; returns those links.

    A file or folder of the user's own under such a name is left alone.
    """
    links = {}
    for part, name, inside in (("report", "report.html", "report.html"), ("merge", "model", "")):
        link, sealed = results / experiment.name / name, store.sealed(experiment.ref(part))
        if (sealed / MANIFEST_NAME).exists() and (link.is_symlink() or not link.exists()):
            replace_link(link, sealed / inside)
            links[link.stem] = link
    return links


def _freeze(experiment: Experiment, store: Store) -> Path:
    parts = {part: spec.digest for part, spec in experiment.specs.items()}
    frozen = {"config": experiment.config.model_dump(mode="json"), "parts": parts}
    return _write_hashed(store.root / "experiments", frozen)


def _write_hashed(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / f"{sha256_text(canonical_json(content))[:DIGEST_CHARS]}.json"
    if path.exists():
        path.touch()  # the newest is what was asked for last
    else:
        write_json(path, content)
    return path


def _thaw(frozen: Mapping[str, Any], store: Store) -> Experiment:
    config = Config.model_validate_json(canonical_json(frozen["config"]))
    parts = {part: store.read_spec(store.spec_path(digest)) for part, digest in frozen["parts"].items()}
    return Experiment(config, parts)
