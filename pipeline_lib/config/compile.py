"""Compiles a config to specs: one per stage instance, each naming the digests of what it reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline_lib.config.content import Content, HashCache, look, read_content
from pipeline_lib.config.halving import Halving
from pipeline_lib.config.load import load_sweep
from pipeline_lib.config.schema import (
    CHOSEN_KEYS,
    PLACEMENT_KEYS,
    Config,
    HubRepository,
    Rows,
    Train,
    Weighted,
    settings_of,
)
from pipeline_lib.config.sweep import collapsed
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.snapshot import Revisions

# Compiles a config to specs: one per stage instance, each naming the digests of what it reads.
#
# A pure function of the config, its hub repositories pinned to commits, and of the content hashes of the local
# files it names. The versions below are bumped by hand when a stage's code begins to compute something else from
# the same settings.

Found = TypeVar("Found")
Refuse = Callable[[Config], None]

VERSIONS = {
    "download": 2,
    "tokenize": 3,
    "shard": 2,
    "plan": 9,
    "train": 3,
    "merge": 3,
    "evaluate": 3,
    "report": 2,
}


# What an experiment is run for: results/NAME points at these.
PRODUCTS = ("report", "merge")

# Keys of a source that say where it lies: what lies there is hashed instead.
WHERE_KEYS = frozenset({"path", "tokenizer"})
# Keys of a data source that say how its rows are read, which the tokenize stage does, and how often they are used.
ROW_KEYS = frozenset(Rows.model_fields) - Weighted.model_fields.keys()
USE_KEYS = frozenset(Weighted.model_fields)
SHOWN_NAMES = 5  # of a sweep's experiments, in a message


@dataclass(frozen=True)
class Experiment:
    """A config and its specs, by the name of their part in it (`model`, `data.0`, `tokenize`, ..., `report`)."""

    config: Config
    specs: Mapping[str, Spec]

    @property
    def name(self) -> str:
        """The name the user gave it."""
        return self.config.experiment

    def ref(self, part: str) -> Ref:
        """The stage instance that plays `part`."""
        return self.specs[part].ref

    def by_digest(self, digest: str) -> Spec | None:
        """The spec with that digest, if it belongs to this experiment."""
        return next((spec for spec in self.specs.values() if spec.digest == digest), None)


def compile_config(config: Config, content: Content) -> Experiment:
    """The specs of `config`, given the hashes of the local files that it names."""
    specs: dict[str, Spec] = {}

    def add(part: str, stage: str, settings: Mapping[str, Any], reads: tuple[str, ...] = ()) -> None:
        specs[part] = Spec(stage, VERSIONS[stage], settings, {name: specs[name].ref for name in reads})

    def add_download(part: str, kind: str, source: Any, hashes: Mapping[str, str]) -> None:
        settings = {"kind": kind, **_keyed_source(source, hashes)}
        specs[part] = Spec("download", VERSIONS["download"], settings, where=_where(source))

    add_download("model", "model", config.model, content.model)
    generation: tuple[str, ...] = ()  # of a local model alone: it is published, and decides no training
    if content.generation:
        add_download("generation", "generation", config.model, content.generation)
        generation = ("generation",)
    data_parts = tuple(f"data.{index}" for index in range(len(config.data.train)))
    for part, source, hashes in zip(data_parts, config.data.train, content.data, strict=True):
        add_download(part, "data", source, hashes)
    add("tokenize", "tokenize", _tokenize_settings(config), ("model", *data_parts))
    add("shard", "shard", _shard_settings(config), ("tokenize",))
    add("plan", "plan", _plan_settings(config, content), ("model", "tokenize", "shard"))
    specs["train"] = training_of(specs["plan"])
    add("merge", "merge", settings_of(config.merge), ("model", *generation, "train"))
    add("evaluate", "evaluate", _evaluate_settings(config), ("model", *generation, "merge", "shard"))
    report_reads = ("model", *data_parts, "tokenize", "shard", "train", "merge", "evaluate")
    add("report", "report", {"experiment": config.experiment}, report_reads)
    return Experiment(config, specs)


def _plan_settings(config: Config, content: Content) -> dict[str, Any]:
    """What the plan goes by; `held` are the keys that `strategy: auto` has to leave as the file gives them."""
    settings: dict[str, Any] = {
        "experiment": config.experiment,
        "cluster": settings_of(config.cluster, exclude=frozenset({"measured"})),
        "train": settings_of(config.train),
        "tracking": settings_of(config.tracking),
    }
    if content.measured is not None:
        settings["measured"] = content.measured
    if config.train.strategy == "auto":
        settings["held"] = held_keys(config.train)
    return settings


def training_of(plan: Spec) -> Spec:
    """The training that `plan` is of: its settings but for the keys that say how and where, which change no result."""
    settings = {key: value for key, value in plan.settings["train"].items() if key not in PLACEMENT_KEYS}
    return Spec("train", VERSIONS["train"], settings, {name: plan.inputs[name] for name in ("model", "shard")})


def held_keys(train: Train) -> list[str]:
    """Those of CHOSEN_KEYS that the config file gives a value other than `auto`."""
    return [key for key in CHOSEN_KEYS if key in train.model_fields_set and getattr(train, key) != "auto"]


def run_digest(train: Spec) -> str:
    """Names the working directory of a training run: the same wherever it is told to stop meanwhile."""
    settings = {key: value for key, value in train.settings.items() if key != "until_step"}
    return Spec(train.stage, train.version, settings, train.inputs).digest


def open_experiment(config_path: Path, store: Store, name: str | None = None) -> Experiment:
    """The one experiment of a config file, or of a sweep the one of that name. Raises as `open_experiments`."""
    found = open_experiments(config_path, store)
    names = [experiment.name for experiment in found]
    if name is None and len(found) == 1:
        return found[0]
    if name in names:
        return found[names.index(name)]
    problem = f"a sweep of {len(found)} experiments" if name is None else f"no experiment is called {name!r}"
    if name is not None and (close := get_close_matches(name, names, n=1)):
        raise ConfigError(str(config_path), [f"{problem}; did you mean {close[0]!r}?"])
    some = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    raise ConfigError(str(config_path), [f"{problem}; name one with --experiment NAME: {some}"])


def open_experiments(config_path: Path, store: Store, refuse: Refuse = lambda _: None) -> tuple[Experiment, ...]:
    """Read, check and compile the config file at `config_path`. Raises ConfigError with all that is wrong, or HubError.

    What `refuse` raises a ConfigError of is told with the rest, before anything is hashed or asked of a hub; then it is
    asked again, with what is known then. Whatever the experiments of a sweep have in common is hashed and asked once.
    """
    return open_sweep(config_path, store, refuse)[1]


def open_sweep(
    config_path: Path, store: Store, refuse: Refuse = lambda _: None
) -> tuple[str, tuple[Experiment, ...], Halving | None]:
    """`open_experiments`, after the name that the file gives them all; and whether the worst are stopped on the way."""
    loaded = load_sweep(config_path, looks=(look, lambda config: _refused(config, refuse)))
    store.require_writable()
    configs = loaded.configs
    hashes, revisions = HashCache.load(store.root / "hashes.json"), Revisions.load(store.root / "revisions.json")
    contents = of_each(configs, str(config_path), lambda config: read_content(config, config_path, hashes))
    experiments = tuple(
        compile_config(pinned(config, revisions), content) for config, content in zip(configs, contents, strict=True)
    )
    of_each([experiment.config for experiment in experiments], str(config_path), refuse)
    if loaded.halving and len({experiment.ref("train") for experiment in experiments}) == 1:
        problem = "all experiments share one training, and there is nothing to compare it with"
        raise ConfigError(str(config_path), [f"{loaded.halving_line}sweep: halving: {problem}"])
    return loaded.name, experiments, loaded.halving


def _refused(config: Config, refuse: Refuse) -> list[str]:
    try:
        refuse(config)
    except ConfigError as error:
        return error.problems
    return []


def of_each(configs: Sequence[Config], source: str, function: Callable[[Config], Found]) -> list[Found]:
    """`function` of each config. Raises one ConfigError, of `source`, with what it raises for any of several."""
    if len(configs) == 1:
        return [function(configs[0])]
    found, problems = [], []
    for config in configs:
        own: list[str] = []
        try:
            found.append(function(config))
        except ConfigError as error:
            is_known = error.source in (source, f"experiment {config.experiment!r}")
            own = [problem if is_known else f"{error.source}: {problem}" for problem in error.problems]
        problems.append((config.experiment, own))
    if told := collapsed(problems):
        raise ConfigError(source, told)
    return found


def pinned(config: Config, revisions: Revisions) -> Config:
    """`config` with a commit for every branch or tag of a hub that it names. Raises HubError."""

    def pin(source: Any, kind: Literal["model", "dataset"]) -> Any:
        if not isinstance(source, HubRepository):
            return source
        repository = Repository(source.source, kind, source.name)
        return source.model_copy(update={"revision": revisions.commit_of(repository, source.revision)})

    train = tuple(pin(source, "dataset") for source in config.data.train)
    data = config.data.model_copy(update={"train": train})
    all_pinned = config.model_copy(update={"model": pin(config.model, "model"), "data": data})
    revisions.save()
    return all_pinned


def _keyed_source(source: Any, hashes: Mapping[str, str]) -> dict[str, Any]:
    """A source's settings, its paths replaced by the hashes of what lies there."""
    left_out = WHERE_KEYS | USE_KEYS | (ROW_KEYS if isinstance(source, Rows) else frozenset())
    settings: dict[str, Any] = source.model_dump(mode="json", exclude_defaults=True, exclude=set(left_out))
    settings["source"] = source.source
    if hashes:
        settings["content"] = dict(sorted(hashes.items()))
    return settings


def _where(source: Any) -> dict[str, str]:
    """Absolute, since a store may be shared by several clones."""
    found = {key: getattr(source, key, None) for key in sorted(WHERE_KEYS)}
    return {key: str(Path(value).absolute()) for key, value in found.items() if value is not None}


def _tokenize_settings(config: Config) -> dict[str, Any]:
    """Those of the section and, where a source has its own way of reading rows, that of each source."""
    row_keys = [
        settings_of(source, exclude=frozenset(type(source).model_fields) - ROW_KEYS) if isinstance(source, Rows) else {}
        for source in config.data.train
    ]
    settings = settings_of(config.tokenize)
    return {**settings, "sources": row_keys} if any(row_keys) else settings


def _shard_settings(config: Config) -> dict[str, Any]:
    """Those of the section, the held-out fraction and, where they differ from 1, the weights of the sources."""
    settings = {**settings_of(config.shard), "validation_fraction": config.data.validation_fraction}
    weights = [source.weight for source in config.data.train]
    return {**settings, "weights": weights} if set(weights) != {1.0} else settings


def _evaluate_settings(config: Config) -> dict[str, Any]:
    """Those of the section and, where it has prompts, what conversations that bring nothing of their own begin with."""
    settings = settings_of(config.evaluate)
    context = {key: value for key, value in settings_of(config.tokenize).items() if key in ("system", "tools")}
    return {**settings, "context": context} if config.evaluate.prompts and context else settings


# The stage instances of a rehearsal: the training of an experiment up to its first save, then to its second, merged.
#
# `until_step` does not enter a run's digest, so both trainings work in the folder of the real run, which continues from
# where they end: nothing is computed twice, and nothing of the experiment gets another digest.


@dataclass(frozen=True)
class Rehearsal:
    """Two trainings, until `first_step` and from there until `last_step`, and the merge of the second."""

    first: Spec
    second: Spec
    merge: Spec

    @property
    def specs(self) -> tuple[Spec, ...]:
        """In the order in which they are made."""
        return self.first, self.second, self.merge

    @property
    def first_step(self) -> int:
        """Where the first training saves and ends."""
        return int(self.first.settings["until_step"])

    @property
    def last_step(self) -> int:
        """Where the second training ends."""
        return int(self.second.settings["until_step"])

    def waits_for(self, digest: str) -> list[Ref]:
        """What has to be done before `digest` though it does not read it: the second training resumes."""
        return [self.first.ref] if digest == self.second.digest else []

    def title(self, digest: str) -> str | None:
        """What `digest` does in the rehearsal, if it is of it."""
        return self._titles.get(digest)

    @cached_property
    def _titles(self) -> dict[str, str]:
        return {
            self.first.digest: f"rehearsal: to step {self.first_step}, saved",
            self.second.digest: f"rehearsal: resumed, to step {self.last_step}",
            self.merge.digest: f"rehearsal: model folder of step {self.last_step}",
        }


def rehearsal_of(experiment: Experiment) -> Rehearsal | None:
    """Two steps; with local SGD twice the steps between averagings, since one in between would change the result.

    None if the experiment itself is to stop by then.
    """
    train, merge, settings = experiment.specs["train"], experiment.specs["merge"], experiment.config.train
    steps = (settings.local_sgd_steps, 2 * settings.local_sgd_steps)
    if settings.until_step is not None and settings.until_step <= steps[-1]:
        return None
    first, second = (
        Spec(train.stage, train.version, {**train.settings, "until_step": step}, train.inputs) for step in steps
    )
    inputs = {**merge.inputs, "train": second.ref}
    return Rehearsal(first, second, Spec(merge.stage, merge.version, merge.settings, inputs))
