"""Answer Snakemake's questions about experiments: what to make, from what, under which title.

The main process compiles the YAML and freezes the result. Jobs that parse the Snakefile again, on
cluster nodes, read the frozen result, so later edits of the YAML do not change submitted work.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import (
    Experiment,
    Learn,
    Refuse,
    Rehearsal,
    open_sweep,
    rehearsal_of,
    unhashed_settings,
    with_parents,
)
from pipeline_lib.config.halving import (
    Decision,
    Halving,
    Rung,
    decision_path,
    reached_path,
    read_decision,
    read_halving,
    rungs_of,
)
from pipeline_lib.config.load import NONE_OVERRIDDEN, Overrides
from pipeline_lib.config.schema import Config
from pipeline_lib.config.stages import PRODUCTS, STAGES, is_of_base, stage_of
from pipeline_lib.config.strict_yaml import YamlDocument
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.files import (
    canonical_json,
    json_text,
    read_json,
    replace_link,
    sha256_text,
    take_out_of_future,
    write_json,
)
from pipeline_lib.core.store import DIGEST_CHARS, Ref, Spec, Store

OVERRIDES = "set"  # of Snakemake's `--config`: a list of `KEY=VALUE`
COMMAND_VARIABLE = "QWEN3_RUN"  # for snakemake: the command of ours that started it
FROZEN_VARIABLE = "PIPELINE_FROZEN_EXPERIMENT"
DEFAULT_CONFIG = Path("config/config.yaml")
MODULE_CONFIG = "the config of the module"
RESULTS = Path("results")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")


@dataclass(frozen=True)
class Dag:
    """The experiments of a config file in a store, as Snakemake sees them: one, or all of a sweep.

    Those of other files that they go on from are among them, each before its children. With
    `halving`, only the best trainings of a sweep run to their end. `name` is the name in the file,
    the prefix of the experiments' names, or that of a file with several experiments.
    """

    experiments: tuple[Experiment, ...]
    store: Store
    halving: Halving | None = None
    name: str = ""

    @staticmethod
    def compile(
        configfiles: list[str],
        overrides: Mapping[str, object],
        store: Store,
        refuse: Refuse = lambda _: None,
        learn: Learn = lambda _: None,
    ) -> "Dag":
        """Compile the one config file that Snakemake was given.

        Raises ConfigError, also those raised by `refuse`. `refuse` and `learn` are those of
        `open_experiments`. Of Snakemake's `--config` only OVERRIDES is read, which `qwen3 run`
        gives; others and a second config file are refused.
        """
        settings = overrides.get(OVERRIDES, [])
        if not isinstance(settings, list):
            raise ConfigError("--config", [f"{OVERRIDES}: a list of KEY=VALUE is expected"])
        if others := sorted(set(overrides) - {OVERRIDES}):
            remedy = "edit the YAML, give another with --configfile, or use qwen3 run"
            raise ConfigError("--config", [f"{', '.join(others)}: not read; {remedy}"])
        if len(configfiles) > 1:
            text = f"one file is read, not {len(configfiles)}: {', '.join(configfiles)}"
            raise ConfigError("--configfile", [text])
        path = Path(configfiles[0]) if configfiles else DEFAULT_CONFIG
        on_command_line = Overrides([str(each) for each in settings], flag="", in_names=True)
        return Dag.open(path, store, refuse, learn, on_command_line)

    @staticmethod
    def open(
        path: Path,
        store: Store,
        refuse: Refuse = lambda _: None,
        learn: Learn = lambda _: None,
        overrides: Overrides = NONE_OVERRIDDEN,
    ) -> "Dag":
        """Compile the config file at `path`; nothing is written into the store.

        Raises ConfigError, HubError.
        """
        name, experiments, halving = open_sweep(path, store, refuse, learn, overrides)
        return Dag(with_parents(experiments), store, halving, name)

    @staticmethod
    def of_mapping(
        keys: Mapping[str, object],
        store: Store,
        refuse: Refuse = lambda _: None,
        learn: Learn = lambda _: None,
    ) -> "Dag":
        """Compile the config `keys`, which a workflow gives that uses this one as a module.

        Raises as `open`.
        """
        document = YamlDocument(json.loads(json.dumps(keys)))
        name, experiments, halving = open_sweep(
            Path(MODULE_CONFIG), store, refuse, learn, document=document
        )
        return Dag(with_parents(experiments), store, halving, name)

    @property
    def experiment(self) -> Experiment:
        """The only experiment, or the first of a sweep."""
        return self.experiments[0]

    @cached_property
    def last(self) -> tuple[Experiment, ...]:
        """The experiments that none of the others goes on from: all, unless there is a chain."""
        parents = {one.config.parent.experiment for one in self.experiments if one.config.parent}
        return tuple(one for one in self.experiments if one.name not in parents)

    @cached_property
    def rehearsal(self) -> Rehearsal | None:
        """The first experiment's rehearsal, None if it stops too early; `all` leaves it out."""
        return rehearsal_of(self.experiment)

    def freeze(self) -> Path:
        """Write what the jobs read, and return `frozen_path`: only where something is about to run.

        That is each spec, and each experiment under the hash of its content. Pointers that mislead
        Snakemake are removed, so that it makes again what is missing.
        """
        self.store.write_specs(spec for spec, _ in self._placed.values())
        for rung, going in self.open_rungs():
            going_on = [training for training in rung.trainings if training in going]
            self.store.write_specs(rung.trainings[training] for training in going_on)
        for pointer in self.dangling_pointers():
            pointer.unlink(missing_ok=True)
        # the newest file is the latest request
        take_out_of_future((self.store.root / "experiments").glob("*.json"))
        for path, content in self._frozen.items():
            _write_or_touch(path, content)
        return self.frozen_path

    @property
    def frozen_path(self) -> Path:
        """The value of `FROZEN_VARIABLE`: the file that `freeze` writes last.

        For a sweep it lists the others.
        """
        return list(self._frozen)[-1].resolve()

    def dangling_pointers(self) -> list[Path]:
        """Return these experiments' pointers that lead to nothing, as `Store.dangling_pointers`."""
        return self.store.dangling_pointers(spec for spec, _ in self._placed.values())

    @cached_property
    def _frozen(self) -> dict[Path, dict[str, Any]]:
        """The content of each file that `freeze` writes, experiments first: hashes are names.

        A file's name is the hash of its content.
        """
        frozen: dict[Path, dict[str, Any]] = {}
        for experiment in self.experiments:
            parts = {part: spec.digest for part, spec in experiment.specs.items()}
            content = {"config": experiment.config.model_dump(mode="json"), "parts": parts}
            frozen[_hashed_path(self.store.root / "experiments", content)] = content
        if len(frozen) == 1:
            return frozen
        sweep: dict[str, Any] = {"name": self.name, "experiments": [path.name for path in frozen]}
        if self.halving:
            sweep["halving"] = asdict(self.halving)
        return {**frozen, _hashed_path(self.store.root / "sweeps", sweep): sweep}

    @staticmethod
    def thaw(path: Path, store: Store) -> "Dag":
        """Return the sweep or the single experiment that `freeze` wrote to `path`.

        Raises IntegrityError.
        """
        try:
            frozen = read_json(path)
            if "experiments" not in frozen:
                only = _thaw(frozen, store)
                return Dag((only,), store, name=only.name)
            if not frozen["experiments"]:
                raise ValueError("a sweep of no experiment")
            folder = path.parent.parent / "experiments"
            experiments = [_thaw(read_json(folder / name), store) for name in frozen["experiments"]]
            halving = None
            if "halving" in frozen:
                halving, _ = read_halving(frozen["halving"])
            return Dag(tuple(experiments), store, halving, frozen["name"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"{path}: cannot read the frozen experiment ({error}); run snakemake anew"
            raise IntegrityError(text) from error

    def config_of(self, digest: str) -> Config:
        """Return the config of the first experiment that has the stage instance `digest`."""
        return self._owners(digest)[0].config

    def pointer(self, part: str) -> str:
        """Return the path of the file that marks `part` of the first experiment as done."""
        return str(self.store.pointer(self.experiment.ref(part)))

    def pointers(self, stage: str, going: Collection[str] | None = None) -> list[str]:
        """Return the distinct pointers of `stage`, for all experiments or trainings in `going`.

        Of the downloads these are the ones that wait for no training of another experiment.
        """
        pointers: dict[str, None] = {}
        for one in self.experiments:
            if going is not None and one.ref("train").digest not in going:
                continue
            for spec in one.specs.values():
                is_made_here = spec.stage == "download" and bool(spec.inputs)
                if spec.stage == stage and not is_made_here:
                    pointers[str(self.store.pointer(spec.ref))] = None
        return list(pointers)

    def products(self, going: Collection[str] | None = None) -> list[str]:
        """Return the pointers of all that RESULTS links to, limited to `going` as in `pointers`."""
        stages = dict.fromkeys(stage_of(part) for part in PRODUCTS)
        return [pointer for stage in stages for pointer in self.pointers(stage, going)]

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The rungs at which halving decides which trainings go on; empty without halving."""
        if not self.halving:
            return ()
        trainings = {one.ref("train").digest: one.specs["train"] for one in self.last}
        return rungs_of(self.halving, trainings)

    def rung(self, digest: str) -> tuple[Rung, Rung | None]:
        """Return the rung `digest` and the rung before it.

        Raises IntegrityError if the sweep has no such rung.
        """
        before = None
        for rung in self.rungs:
            if rung.digest == digest:
                return rung, before
            before = rung
        raise IntegrityError(f"{digest}: no rung of this sweep; ask for its own targets")

    def decisions(self) -> list[tuple[Rung, Decision]]:
        """Return each rung decided so far, with its decision. Raises IntegrityError."""
        found: list[tuple[Rung, Decision]] = []
        for rung in self.rungs:
            path = decision_path(self.store, rung.digest)
            if (found and found[-1][1].next_step is None) or not path.exists():
                break
            found.append((rung, read_decision(path)))
        return found

    def open_rungs(self) -> list[tuple[Rung, Collection[str]]]:
        """Return the first rung and each that a decision opened, with the trainings that run to it.

        Raises IntegrityError if a decision cannot be read.
        """
        if not self.rungs:
            return []
        opened: list[tuple[Rung, Collection[str]]] = [(self.rungs[0], self.rungs[0].trainings)]
        for rung, (_, decision) in zip(self.rungs[1:], self.decisions(), strict=False):
            if decision.next_step is not None:
                opened.append((rung, decision.survivors))
        return opened

    def next_to_rung(self, training: str) -> Spec | None:
        """Return the spec that takes `training` to the next open rung; None if there is none."""
        for rung, going in self.open_rungs():
            spec = rung.trainings[training]
            if training in going and not reached_path(self.store, spec.digest).exists():
                return spec
        return None

    def names_of(self, training: str) -> list[str]:
        """Return the names of the experiments that share the whole `training`."""
        return [experiment.name for experiment in self._owners(training)]

    def is_trained(self, digest: str) -> bool:
        """Return whether the training `digest`, a whole one or one to a rung, is done."""
        if self.store.pointer(Ref("train", digest)).exists():
            return True
        return reached_path(self.store, digest).exists()

    def to_train(self, digest: str) -> list[Experiment]:
        """Return the experiments that wait for a training where the training `digest` does.

        Those are all that are not trained and that no decision has stopped; a rehearsal is of the
        first alone. Raises IntegrityError.
        """
        if self.rehearsal and digest in (self.rehearsal.first.digest, self.rehearsal.second.digest):
            return self._owners(digest)
        decisions = self.decisions()
        going = decisions[-1][1].survivors if decisions else None
        waiting = []
        for one in self.experiments:
            training = one.ref("train").digest
            is_going = going is None or training in going
            if is_going and not self.is_trained(training):
                waiting.append(one)
        return waiting

    def outputs(self) -> list[Path]:
        """Return the paths of all outputs whose times Snakemake compares, existing or not."""
        pointers = [self.store.pointer(spec.ref) for spec, _ in self._placed.values()]
        reached = [reached_path(self.store, digest) for digest in self._to_rungs]
        return pointers + reached + [decision_path(self.store, rung.digest) for rung in self.rungs]

    def plan_pointer(self, digest: str) -> str:
        """Return the pointer of the plan that places the training `digest`."""
        return str(self.store.pointer(self._owners(digest)[0].ref("plan")))

    def pointers_read_by(self, digest: str, *, is_to_rung: bool = False) -> list[str]:
        """Return the pointers of all that the stage instance `digest` reads or has to wait for.

        A training to a rung waits only for its inputs, even if the rehearsal's second training has
        the same digest. The evaluation of the base model waits for the plan as the training does,
        so that both are ready then, and that goes first.
        """
        spec = self._spec(digest)
        refs = [ref for _, ref in sorted(spec.inputs.items())]
        if self.rehearsal and not is_to_rung:
            refs += self.rehearsal.waits_for(digest)
        # else a new plan would start it again
        if is_of_base(spec) and not self.store.pointer(spec.ref).exists():
            refs.append(self._owners(digest)[0].ref("plan"))
        return [str(self.store.pointer(ref)) for ref in refs]

    def following(self, training: str) -> list[Spec]:
        """Return what is made of the whole `training` and of no other, in order.

        Those are its merges, the evaluations of the base model that its own are compared with, and
        these.
        """
        placed = [spec for spec, _ in self._placed.values()]
        merges = [spec for spec in placed if spec.stage == "merge" and _reads(spec, {training})]
        merged = {spec.digest for spec in merges}
        tuned = [spec for spec in placed if spec.stage == "evaluate" and _reads(spec, merged)]
        compared = {ref.digest for spec in tuned for ref in spec.inputs.values()}
        of_base = [spec for spec in placed if is_of_base(spec) and spec.digest in compared]
        return [*merges, *of_base, *tuned]

    def unhashed_arguments(self, digest: str) -> list[str]:
        """Return the arguments by which `digest`'s rule passes what no digest has: `--where JSON`.

        The spec file has it too, but another config that shares the stage instance may rewrite that
        at any time.
        """
        spec = self._spec(digest)
        if STAGES[spec.stage].unhashed is None:
            return []
        return ["--where", json.dumps(dict(spec.where))]

    def title(self, digest: str) -> str:
        """Return one line about a stage instance, for the job list of a dry run."""
        spec = self._spec(digest)
        owners = self._owners(digest)
        config = owners[0].config
        parts = [part for part, each in owners[0].specs.items() if each.digest == digest]
        detail = STAGES[spec.stage].title(config, parts)
        if digest in self._to_rungs:
            detail += f", to step {spec.settings['until_step']}, where the best go on"
        elif self.rehearsal:
            detail = self.rehearsal.title(digest) or detail
        shared = f", shared with {len(owners) - 1} more" if len(owners) > 1 else ""
        return f"{config.experiment}: {spec.stage} ({detail}{shared})"

    def titles(self) -> dict[str, str]:
        """Return the titles of all stage instances, by digest."""
        return {digest: self.title(digest) for digest in (*self._placed, *self._to_rungs)}

    def link_results(self, results: Path = RESULTS) -> None:
        """Link the finished PRODUCTS of each experiment, as the function `link_results` does."""
        for experiment in self.experiments:
            link_results(experiment, self.store, results)

    @cached_property
    def _placed(self) -> dict[str, tuple[Spec, list[Experiment]]]:
        """Every stage instance, after its inputs, with the experiments that it belongs to."""
        placed: dict[str, tuple[Spec, list[Experiment]]] = {}
        for experiment in self.experiments:
            distinct = {spec.digest: spec for spec in experiment.specs.values()}
            for digest, spec in distinct.items():
                placed.setdefault(digest, (spec, []))[1].append(experiment)
        if self.rehearsal:
            for spec in self.rehearsal.specs:
                placed.setdefault(spec.digest, (spec, [self.experiment]))
        return placed

    @cached_property
    def _to_rungs(self) -> dict[str, str]:
        """The digest of the whole training, by the digest of each training to a rung."""
        found = {}
        for rung in self.rungs:
            for whole, spec in rung.trainings.items():
                found[spec.digest] = whole
        return found

    def _owners(self, digest: str) -> list[Experiment]:
        self._spec(digest)
        return self._placed[self._to_rungs.get(digest, digest)][1]

    def _spec(self, digest: str) -> Spec:
        """Return the spec with that digest.

        Raises IntegrityError if it is none of these experiments'. Specs of other experiments are
        refused, because no plan of these experiments places them.
        """
        if digest in self._placed:
            return self._placed[digest][0]
        for rung in self.rungs:
            for spec in rung.trainings.values():
                if spec.digest == digest:
                    return spec
        text = f"{digest}: no stage of experiment {self.experiment.name!r}"
        raise IntegrityError(f"{text}; ask for its own targets")


def _reads(spec: Spec, digests: Collection[str]) -> bool:
    """Return whether one of `digests` is an input of `spec`."""
    return any(ref.digest in digests for ref in spec.inputs.values())


def link_results(experiment: Experiment, store: Store, results: Path = RESULTS) -> dict[str, Path]:
    """Link RESULTS/NAME/{report.html,model,...} to finished PRODUCTS; return the links.

    A link of ours that leads to nothing, into another store, or to what is no longer asked for, is
    removed. A file or folder that the user put there is left alone.
    """
    links = {}
    for part, product in PRODUCTS.items():
        link = results / experiment.name / product.link
        if part not in experiment.specs:  # not asked for any more, or newer than this experiment
            if _target_of(link, part) is not None:
                link.unlink(missing_ok=True)
            continue
        ref = experiment.ref(part)
        if store.is_sealed(ref) and (link.is_symlink() or not link.exists()):
            replace_link(link, store.sealed(ref) / product.file)
            links[link.stem] = link
        elif _leads_astray(link, part, store):
            link.unlink(missing_ok=True)
    return links


def _leads_astray(link: Path, part: str, store: Store) -> bool:
    """Return whether `link` leads to a sealed `part` that is missing or in another store."""
    target = _target_of(link, part)
    if target is None:
        return False
    is_here = target.parent.parent.resolve() == store.root.resolve()
    return not link.exists() or not is_here


def _target_of(link: Path, part: str) -> Path | None:
    """Return the folder of a sealed `part` that `link` leads to or into; None if it does not."""
    if not link.is_symlink():
        return None
    target = Path(os.path.normpath(link.parent.resolve() / link.readlink()))
    for folder in (target, target.parent):
        if folder.parent.name == stage_of(part) and _DIGEST.fullmatch(folder.name):
            return folder
    return None


def _hashed_path(folder: Path, content: dict[str, Any]) -> Path:
    return folder / f"{sha256_text(canonical_json(content))[:DIGEST_CHARS]}.json"


def _write_or_touch(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, or stamp the file with it: the newest is the latest request."""
    try:
        is_known = path.read_text(encoding="utf-8") == json_text(content)
    except (OSError, ValueError):
        is_known = False
    if is_known:
        try:
            os.utime(path)
        except PermissionError:  # another user's, whose umask lets nobody else write
            is_known = False
    if not is_known:
        write_json(path, content)


def _thaw(frozen: Mapping[str, Any], store: Store) -> Experiment:
    config = Config.model_validate_json(canonical_json(frozen["config"]))
    specs = {}
    for part, digest in frozen["parts"].items():
        # Another config may have written the spec since: the same digest, and other values beside
        # it.
        spec = store.read_spec(store.spec_path(digest))
        specs[part] = replace(spec, where=unhashed_settings(config, part))
    return Experiment(config, specs)
