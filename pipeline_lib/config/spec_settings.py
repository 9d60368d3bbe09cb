"""What the specs of stages hold: the keys of a config that decide their results, and what else.

Each function takes the config, the hashes of the local files that it names, and the part.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import Content
from pipeline_lib.config.rope import INHERITED_ROPE, ROPE, settings_with_rope
from pipeline_lib.config.schema import (
    VALIDATION_SOURCES,
    Config,
    ExperimentModel,
    FileData,
    HubModel,
    Rows,
    Weighted,
)
from pipeline_lib.config.section import Section, settings_of
from pipeline_lib.config.train import fixed_keys

# In the spec of a plan whose model another experiment trains: the digest of that model.
TRAINED_MODEL = "trained_model"
# The part that is the model at the beginning of a chain of experiments. No training changes its sizes
# and its tokenizer. What needs no more than these reads it as the model, and waits for no training.
ROOT = "root"
# The parts of an experiment that trains adapters on: these, and the merged model of the experiment
# before, which evaluations read as the base model.
ADAPTER_PART, PARENT = "adapter", "parent"
# Keys of a source that give its location. Specs have the hash of the content there instead.
WHERE_KEYS = frozenset({"path", "tokenizer"})
# Keys of a data source that say how the tokenize stage reads its rows, and how often the rows are
# used.
ROW_KEYS = frozenset(Rows.model_fields) - Weighted.model_fields.keys()
USE_KEYS = frozenset(Weighted.model_fields)
# In the spec of a merge of several checkpoints: how far they are apart.
SAVE_EVERY_STEPS = "save_every_steps"
PUSH = "push_"  # how the names of the parts of the stage push begin, before the hub
# Keys of a benchmark that decide which questions it asks.
ASKED_KEYS = ("name", "score", "max_questions", "few_shot", "seed")
# Keys of `tokenize` and `shard` that decide whether a result is accepted and into how many files it
# is cut, but not what it holds. They are not hashed; `plan/preflight.py` judges results that are
# sealed already.
UNHASHED_KEYS = frozenset({"max_dropped_fraction", "max_quarantined_fraction", "shards"})


def download_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return what `part` downloads: `model`, `generation`, `data.0`, `questions.0` and so on."""
    kind, _, number = part.partition(".")
    hashes = content.model
    if kind == "generation":
        hashes = content.generation
    elif kind == "data":
        hashes = content.data[int(number)]
    elif kind == "questions":
        return {"kind": kind, "source": "file", "content": content.questions[int(number)]}
    elif kind == ADAPTER_PART:
        return _adapter_settings(config, content)
    elif isinstance(config.model, ExperimentModel):
        return {"kind": "model", "source": config.model.source}
    return {"kind": kind} | _keyed_source(_source_of(config, part), hashes)


def _adapter_settings(config: Config, content: Content) -> dict[str, Any]:
    """Return the settings of a download of adapters; `base` is the hub's model that they are for."""
    adapter = config.starting_adapter
    if adapter is None:
        return {"kind": ADAPTER_PART, "source": config.model.source}
    settings = {"kind": ADAPTER_PART} | _keyed_source(adapter, content.adapter)
    if isinstance(config.model, HubModel):
        settings["base"] = config.model.name
    return settings


def _source_of(config: Config, part: str) -> Any:
    kind, _, number = part.partition(".")
    if kind == "questions":
        return config.evaluate.benchmarks[int(number)]
    if kind == ROOT:
        return config.root.model
    if kind == ADAPTER_PART and config.starting_adapter is not None:
        return config.starting_adapter
    if kind in ("model", "generation") and config.continues and config.parent is not None:
        return _source_of(config.parent, part)
    return config.data.sources[int(number)] if kind == "data" else config.model


def _keyed_source(source: Any, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return a source's settings, with the hashes of its files in place of its paths."""
    left_out = WHERE_KEYS | USE_KEYS | {ROPE, ADAPTER_PART}
    if isinstance(source, Rows):
        left_out |= ROW_KEYS
    if isinstance(source, FileData):
        left_out |= {"split"}  # says where the files are, as the path does
    settings: dict[str, Any] = source.model_dump(
        mode="json", exclude_defaults=True, exclude=set(left_out)
    )
    settings["source"] = source.source
    if hashes:
        settings["content"] = dict(sorted(hashes.items()))
    return settings


def download_where(config: Config, part: str) -> dict[str, Any]:
    """Return a source's locations as absolute paths, since several clones may share a store.

    Of the model of an experiment it is the name of that: another name is the same model.
    """
    source = _source_of(config, part)
    if isinstance(source, ExperimentModel):
        return {"experiment": source.name}
    found = {key: getattr(source, key, None) for key in sorted(WHERE_KEYS)}
    where = {key: str(Path(value).absolute()) for key, value in found.items() if value is not None}
    if isinstance(source, FileData) and source.split:
        where["split"] = source.split
    return where


def tokenize_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the section's settings and, if any source sets how rows are read, each source's."""
    row_keys: list[dict[str, Any]] = []
    for source in config.data.sources:
        others = frozenset(type(source).model_fields) - ROW_KEYS
        row_keys.append(settings_of(source, exclude=others) if isinstance(source, Rows) else {})
    settings = settings_of(config.tokenize, exclude=UNHASHED_KEYS) | _validation_sources(config)
    return {**settings, "sources": row_keys} if any(row_keys) else settings


def shard_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the section's settings, held-out fraction and sources' weights unless all are 1."""
    settings = {
        **settings_of(config.shard, exclude=UNHASHED_KEYS),
        "validation_fraction": config.data.held_out_fraction,
        **_validation_sources(config),
    }
    weights = [source.weight for source in config.data.train]
    return {**settings, "weights": weights} if set(weights) != {1.0} else settings


def _validation_sources(config: Config) -> dict[str, int]:
    """Return how many sources are held out: the last of the stage's inputs or its samples."""
    return {VALIDATION_SOURCES: len(config.data.validation)} if config.data.validation else {}


def plan_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the plan stage's settings; `held` lists keys that `strategy: auto` must not change."""
    train = settings_of(config.train)
    if content.deepspeed_json is not None:
        # in place of its path: queued jobs keep it when it is edited
        train["deepspeed_json"] = content.deepspeed_json
    settings: dict[str, Any] = {
        "experiment": config.experiment,
        "cluster": settings_of(config.cluster, exclude=frozenset({"measured"})),
        "train": train,
        "tracking": settings_of(config.tracking),
    }
    if content.measured is not None:
        settings["measured"] = content.measured
    if config.train.strategy == "auto":
        settings["held"] = fixed_keys(config.train)
    if config.parent is not None:
        inherited = settings_with_rope({}, config.parent.rope)
        if inherited:
            settings[INHERITED_ROPE] = inherited[ROPE]
    return settings_with_rope(settings, config.model.rope)


def merge_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the section's settings, and of a mean of checkpoints which ones these are."""
    if part != "merge" or config.merge.average is None:
        return settings_of(config.merge, exclude=frozenset({"average"}))
    return {**settings_of(config.merge), SAVE_EVERY_STEPS: config.train.save_every_steps}


def evaluate_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the settings of the section and, if it has prompts, the default system text and tools.

    These begin the conversations that have none of their own. The variables of the chat template
    belong to all.
    """
    own = settings_of(config.evaluate, exclude=frozenset({"benchmarks"}))
    settings = settings_with_rope(own, config.model.rope)
    context = _asked_with(config)
    return {**settings, "context": context} if config.evaluate.prompts and context else settings


def _asked_with(config: Config) -> dict[str, Any]:
    """Return what of `tokenize` belongs to every conversation, also to one that asks a question."""
    keys = ("system", "tools", "chat_template_kwargs")
    tokenize = settings_of(config.tokenize)
    return {key: value for key, value in tokenize.items() if key in keys}


def benchmark_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the benchmarks without their paths, and what begins their conversations."""
    benchmarks = []
    for benchmark in config.evaluate.benchmarks:
        benchmarks.append(settings_of(benchmark, exclude=WHERE_KEYS))
    settings: dict[str, Any] = {"benchmarks": benchmarks}
    if context := _asked_with(config):
        settings["context"] = context
    return settings_with_rope(settings, config.model.rope)


def overlap_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return what of the benchmarks decides which questions they ask."""
    benchmarks = []
    for benchmark in config.evaluate.benchmarks:
        settings = settings_of(benchmark)
        benchmarks.append({key: settings[key] for key in ASKED_KEYS if key in settings})
    return {"benchmarks": benchmarks}


def push_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the hub of `part`, the repository there, and the rules by which it may ship."""
    hub = part.removeprefix(PUSH)
    settings: dict[str, Any] = {"hub": hub, "repository": getattr(config.push, hub)}
    if ship := settings_of(config.ship):
        settings["ship"] = ship
    return settings


def report_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    """Return the experiment's name, the page's language, and the rules by which it may ship."""
    settings = {"experiment": config.experiment, **settings_of(config.report)}
    if ship := settings_of(config.ship):
        settings["ship"] = ship
    return settings


def unhashed_in(section: Section) -> dict[str, Any]:
    """Return the settings of `section` that specs do not hash."""
    return {key: value for key, value in settings_of(section).items() if key in UNHASHED_KEYS}
