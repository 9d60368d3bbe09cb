"""Compile a config to specs: one per stage instance, each with the digests of its inputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipeline_lib.config.content import HASHES_NAME, Content, HashCache, read_content
from pipeline_lib.config.halving import Halving, until
from pipeline_lib.config.load import NONE_OVERRIDDEN, Overrides, load_sweep
from pipeline_lib.config.parts import parts_of
from pipeline_lib.config.rope import ROPE
from pipeline_lib.config.schema import Cluster, Config, HubRepository
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.spec_settings import ADAPTER_PART, PARENT, ROOT, TRAINED_MODEL
from pipeline_lib.config.stages import LAST_MERGE, STAGES, Stage, kind_of, stage_of
from pipeline_lib.config.strict_yaml import YamlDocument
from pipeline_lib.config.sweep import collapsed
from pipeline_lib.config.train import DEALING, PLACEMENT_KEYS, Train, read_train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.snapshot import REVISIONS_NAME, Revisions

# Compilation is a pure function of the config, with hub repositories pinned to commits, and of the
# content hashes of the local files it names.

Found = TypeVar("Found")
Refuse = Callable[[Config], None]
Learn = Callable[[Config], None]

# Since version 4 the rate of the last update is above 0; a constant rate is what it was before.
CONSTANT_RATE_VERSION = 3
# Since version 5 dropout is drawn by block, and not by rank.
DROPOUT_VERSION = 5

SHOWN_NAMES = 5  # of experiments of a sweep, in a message


@dataclass(frozen=True)
class Experiment:
    """A config and its specs, keyed by part (`model`, `data.0`, `tokenize`, ..., `report`).

    `parent` is the experiment whose merged model it trains on; one that was thawed has none.
    """

    config: Config
    specs: Mapping[str, Spec]
    parent: "Experiment | None" = None

    @property
    def name(self) -> str:
        """The name the user gave it."""
        return self.config.experiment

    def ref(self, part: str) -> Ref:
        """Return the reference to the stage instance of `part`."""
        return self.specs[part].ref


def compile_config(config: Config, content: Content) -> Experiment:
    """Compile `config` to an experiment, given the hashes of the local files that it names."""
    parent = None
    if config.parent is not None and content.parent is not None:
        parent = compile_config(config.parent, content.parent)
    specs: dict[str, Spec] = {}
    for stage in STAGES.values():
        for kind in stage.parts:
            for part in parts_of(kind, config, content):
                specs[part] = _compiled(stage, part, specs, config, content, parent)
    return Experiment(config, specs, parent)


def _compiled(
    stage: Stage,
    part: str,
    above: Mapping[str, Spec],
    config: Config,
    content: Content,
    parent: Experiment | None,
) -> Spec:
    """Return the spec of `part`; `above` has the specs of the parts before it."""
    if parent is not None and _is_the_parents(part, config):
        return parent.specs.get(part, parent.specs["model"])
    if stage.settings is None:
        return training_of(above["plan"])
    settings = stage.settings(config, content, part)
    if part == "plan":
        settings |= _what_is_trained(above)
    inputs = _inputs_of(stage, part, above, config, parent)
    return Spec(stage.name, stage.version, settings, inputs, unhashed_settings(config, part))


def _is_the_parents(part: str, config: Config) -> bool:
    """Return whether a child's `part` is that of its parent; the first parent's root is its model."""
    return part == ROOT or (config.continues and part in ("model", "generation"))


def _what_is_trained(above: Mapping[str, Spec]) -> dict[str, Any]:
    """Return the model and adapters that a plan does not read: it plans by the first of a chain."""
    trained = {}
    if ROOT in above:
        trained[TRAINED_MODEL] = above["model"].digest
    if ADAPTER_PART in above:
        trained[ADAPTER_PART] = above[ADAPTER_PART].digest
    return trained


def _inputs_of(
    stage: Stage,
    part: str,
    above: Mapping[str, Spec],
    config: Config,
    parent: Experiment | None,
) -> dict[str, Ref]:
    """Return what `part` reads, by name."""
    read = set(stage.parts[kind_of(part)])
    if part == "evaluate" and len(config.data.held_out_sources) < 2:
        # It tells the sources of held-out documents apart, which matters for several only.
        read.remove("tokenize")
    inputs = {name: spec.ref for name, spec in above.items() if kind_of(name) in read}
    if parent is not None and part in ("model", ADAPTER_PART, PARENT):
        inputs["merge"] = parent.ref("merge")
    for other in (ROOT, PARENT):
        if other in inputs:  # it takes the place of the model that is trained
            inputs["model"] = inputs.pop(other)
            inputs.pop("generation", None)
    return inputs


def unhashed_settings(config: Config, part: str) -> dict[str, Any]:
    """Return what the spec of `part` has in `where`.

    It is not in its digest, so that another config may write other values to the same spec file: a
    frozen experiment takes its own from its config.
    """
    stage = STAGES.get(stage_of(part))
    if stage is None or stage.unhashed is None:
        return {}
    return stage.unhashed(config, part)


def training_of(plan: Spec) -> Spec:
    """Return the training that `plan` plans, without PLACEMENT_KEYS: they do not change the result.

    Where ranks approximate by themselves, their number and the blocks of their micro-batches do.
    """
    settings = {
        key: value for key, value in plan.settings["train"].items() if key not in PLACEMENT_KEYS
    }
    settings |= {key: value for key, value in plan.settings.items() if key == ROPE}
    train = read_settings(Train, plan.settings["train"])
    cluster = read_settings(Cluster, plan.settings["cluster"])
    if train.depends_on_ranks:
        settings[DEALING] = {"ranks": cluster.ranks, "micro_batch_blocks": train.micro_batch_blocks}
    model = plan.inputs["model"]
    if TRAINED_MODEL in plan.settings:
        model = Ref("download", plan.settings[TRAINED_MODEL])
    inputs = {"model": model, "shard": plan.inputs["shard"]}
    if ADAPTER_PART in plan.settings:
        inputs[ADAPTER_PART] = Ref("download", plan.settings[ADAPTER_PART])
    return Spec("train", version_of_training(train), settings, inputs)


def version_of_training(train: Train) -> int:
    """Return the version of the code that computes such a training."""
    if train.lora.dropout > 0:
        return DROPOUT_VERSION
    return CONSTANT_RATE_VERSION if train.lr_schedule == "constant" else STAGES["train"].version


def refuse_other_version(spec: Spec) -> None:
    """Raise ConfigError for another code version's spec: this code computes something else."""
    ours = STAGES[spec.stage].version
    if spec.stage == "train":
        ours = version_of_training(read_train(spec.settings))
    if spec.version != ours:
        problem = (
            f"is of version {spec.version} of the stage, and this code computes version "
            f"{ours}; run snakemake again"
        )
        raise ConfigError(f"the spec {spec.digest} of {spec.stage}", [problem])


def run_digest(train: Spec) -> str:
    """Return the name of a training run's working directory, whatever its `until_step`."""
    settings = {key: value for key, value in train.settings.items() if key != "until_step"}
    return replace(train, settings=settings).digest


def open_experiment(config_path: Path, store: Store, name: str | None = None) -> Experiment:
    """Return the only experiment of a config file, or the one called `name`.

    Raises as `open_experiments`, and ConfigError if no experiment, or more than one, is meant.
    """
    found = open_experiments(config_path, store)
    names = [experiment.name for experiment in found]
    if name is None and len(found) == 1:
        return found[0]
    if name in names:
        return found[names.index(name)]
    problem = f"no experiment is called {name!r}"
    if name is None:
        problem = f"a sweep of {len(found)} experiments"
    if name is not None and (nearest := did_you_mean(name, names)):
        raise ConfigError(str(config_path), [f"{problem}{nearest}"])
    some = ", ".join(names[:SHOWN_NAMES])
    if len(names) > SHOWN_NAMES:
        some += ", ..."
    raise ConfigError(str(config_path), [f"{problem}; name one with --experiment NAME: {some}"])


def open_experiments(
    config_path: Path, store: Store, refuse: Refuse = lambda _: None, learn: Learn = lambda _: None
) -> tuple[Experiment, ...]:
    """Read, check and compile the config file at `config_path`.

    Raises ConfigError with every problem, or HubError. `refuse` may raise ConfigError for a config.
    It is called with the first checks, before files are hashed or a hub is asked, and again for the
    compiled configs. In between, `learn` may look up what `refuse` needs to know of a config's
    model. What the experiments of a sweep share is hashed and looked up once.
    """
    return open_sweep(config_path, store, refuse, learn)[1]


def open_sweep(
    config_path: Path,
    store: Store,
    refuse: Refuse = lambda _: None,
    learn: Learn = lambda _: None,
    overrides: Overrides = NONE_OVERRIDDEN,
    document: YamlDocument | None = None,
) -> tuple[str, tuple[Experiment, ...], Halving | None]:
    """Compile as `open_experiments`; return the file's name, experiments, and any halving.

    `document` is a config that stands in no file; `config_path` then says what it is.
    """
    checks = (lambda config: read_content(config, Path(), None), refuse)
    loaded = load_sweep(
        config_path, overrides, [partial(_problems_of, check) for check in checks], document
    )
    store.require_writable()
    configs = loaded.configs
    hashes = HashCache.load(store.remembered(HASHES_NAME), store.verified)
    revisions = Revisions.load(store.remembered(REVISIONS_NAME))
    contents = of_each(
        configs, str(config_path), lambda config: read_content(config, config_path, hashes)
    )
    experiments = tuple(
        compile_config(pinned(config, revisions), content)
        for config, content in zip(configs, contents, strict=True)
    )
    compiled = [experiment.config for experiment in experiments]
    for number, config in enumerate(compiled):
        if config.model not in [other.model for other in compiled[:number]]:
            learn(config)
    of_each(compiled, str(config_path), refuse)
    if loaded.halving and len({experiment.ref("train") for experiment in experiments}) == 1:
        problem = "all experiments share one training, so there is nothing to compare"
        raise ConfigError(str(config_path), [f"{loaded.halving_line}sweep: halving: {problem}"])
    return loaded.name, experiments, loaded.halving


def with_parents(experiments: Sequence[Experiment]) -> tuple[Experiment, ...]:
    """Return `experiments` and all that they go on from, each once, parents first.

    Raises ConfigError for two with one name, which would have one folder of results.
    """
    found: dict[str, Experiment] = {}
    problems = []
    for experiment in experiments:
        for one in reversed(list(_with_ancestors(experiment))):
            known = found.setdefault(one.name, one)
            if known.specs != one.specs:
                text = f"{one.name!r} is the name of two experiments of one chain; rename one"
                problems.append(f"experiment: {text}")
    if problems:
        source = f"experiment {experiments[-1].name!r}"
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return tuple(found.values())


def _with_ancestors(experiment: Experiment) -> Iterator[Experiment]:
    """Yield `experiment`, then the experiment that it goes on from, and so on."""
    one: Experiment | None = experiment
    while one is not None:
        yield one
        one = one.parent


def _problems_of(check: Callable[[Config], object], config: Config) -> list[str]:
    try:
        check(config)
    except ConfigError as error:
        return error.problems
    return []


def of_each(
    configs: Sequence[Config], source: str, function: Callable[[Config], Found]
) -> list[Found]:
    """Return `function` of each config, in order.

    With several configs, raises one ConfigError for `source` that has the problems of all of them.
    """
    if len(configs) == 1:
        return [function(configs[0])]
    found, problems = [], []
    for config in configs:
        own: list[str] = []
        try:
            found.append(function(config))
        except ConfigError as error:
            is_known = error.source in (source, f"experiment {config.experiment!r}")
            own = [
                problem if is_known else f"{error.source}: {problem}" for problem in error.problems
            ]
        problems.append((config.experiment, own))
    if distinct := collapsed(problems):
        raise ConfigError(source, distinct)
    return found


def pinned(config: Config, revisions: Revisions) -> Config:
    """Return `config` with a commit in place of every hub branch or tag. Raises HubError."""

    def pin(source: Any, kind: Literal["model", "dataset"]) -> Any:
        if not isinstance(source, HubRepository):
            return source
        repository = Repository(source.source, kind, source.name)
        return source.model_copy(
            update={"revision": revisions.commit_of(repository, source.revision)}
        )

    lists = {"train": config.data.train, "validation": config.data.validation}
    pinned_lists = {}
    for key, sources in lists.items():
        if sources:
            pinned_lists[key] = tuple(pin(source, "dataset") for source in sources)
    data = config.data.model_copy(update=pinned_lists)
    model = pin(config.model, "model")
    if config.starting_adapter is not None:
        model = model.model_copy(update={"adapter": pin(config.starting_adapter, "model")})
    if config.parent is not None:
        model = model.model_copy(update={"parent": pinned(config.parent, revisions)})
    revisions.save()
    return config.model_copy(update={"model": model, "data": data})


# A rehearsal: the training of an experiment to its first save, resumed to its second save, and
# merged. `until_step` is not part of a run's digest, so both trainings work in the folder of the
# real run, which continues from where they end: nothing is computed twice, and no stage of the
# experiment gets another digest.


@dataclass(frozen=True)
class Rehearsal:
    """Two trainings, to `first_step` and from there to `last_step`, and the merge of the second."""

    first: Spec
    second: Spec
    merge: Spec

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs, in the order in which they are made."""
        return self.first, self.second, self.merge

    @property
    def first_step(self) -> int:
        """The step at which the first training saves and ends."""
        return int(self.first.settings["until_step"])

    @property
    def last_step(self) -> int:
        """The step at which the second training ends."""
        return int(self.second.settings["until_step"])

    def waits_for(self, digest: str) -> list[Ref]:
        """Return what `digest` awaits but does not read: the second training resumes the first."""
        return [self.first.ref] if digest == self.second.digest else []

    def title(self, digest: str) -> str | None:
        """Return what `digest` does in the rehearsal; None if it is not part of it."""
        titles = {
            self.first.digest: f"rehearsal: to step {self.first_step}, saved",
            self.second.digest: f"rehearsal: resumed, to step {self.last_step}",
            self.merge.digest: f"rehearsal: model folder of step {self.last_step}",
        }
        return titles.get(digest)


def rehearsal_of(experiment: Experiment) -> Rehearsal | None:
    """Return the rehearsal of `experiment`; None if the experiment itself stops no later.

    It has two steps. With local SGD it has twice the steps between two averagings, since a stop in
    between would change the result.
    """
    train = experiment.specs["train"]
    merge = experiment.specs.get(LAST_MERGE, experiment.specs["merge"])
    settings = experiment.config.train
    steps = (settings.local_sgd_steps, 2 * settings.local_sgd_steps)
    if settings.until_step is not None and settings.until_step <= steps[-1]:
        return None
    first, second = (until(step, train) for step in steps)
    return Rehearsal(first, second, replace(merge, inputs={**merge.inputs, "train": second.ref}))
